"""The example as a user starts it: on a small log, from the shell, by itself and by torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import fine

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "train_dlrm.py"
STARTS = {
    "itself": [sys.executable],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "2"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_a_dlrm_is_trained_by_both_plans_and_counted(tmp_path: Path, start: str) -> None:
    log, profile, plan = (str(tmp_path / name) for name in ("log.parquet", "profile", "plan"))
    tables = str(tmp_path / "log.tables.yaml")
    fine("synth", "criteo-kaggle", "-o", log, "--scale", 0.0005, "--samples", 6000)
    fine("profile", log, "-o", profile, "--tables", tables)
    fine("plan", profile, "-o", plan, "--topology", "cpu:2", "--batch-size", 500)
    done = subprocess.run(
        [*STARTS[start], EXAMPLE, log, plan],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},  # this checkout's, whatever is installed
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(
        r"(OPER|TorchRec's plan) +[0-9.]+ ms a step, log loss ([0-9.]+)", done.stdout
    )
    assert [name for name, _ in losses] == ["OPER", "TorchRec's plan"]
    # Guessing the share of clicks alone costs 0.53.
    assert all(float(loss) < 0.6 for _, loss in losses), losses
    traffic = re.findall(r"(fetch|gradient) +([0-9.]+) +([0-9.]+)", done.stdout)
    assert [name for name, *_ in traffic] == ["fetch", "gradient"]
    assert all(float(b) == pytest.approx(float(a), rel=0.1) for _, a, b in traffic), traffic
