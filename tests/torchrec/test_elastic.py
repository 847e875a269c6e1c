"""The example that outlives its ranks: a killed one, and a start with another number of them."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.commands import oper

REPOSITORY = Path(__file__).resolve().parents[2]


def train(folder: Path, run: str, ranks: int, steps: int, kill_at: int = 0) -> list[float]:
    """The losses of a run's steps, in the order in which they were printed first; its last rank is
    killed after step `kill_at`."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    launch += [f"--nproc-per-node={ranks}", str(REPOSITORY / "examples" / "elastic.py")]
    arguments = [str(folder / "log.parquet"), str(folder / "profile"), str(folder / run)]
    started = subprocess.Popen(
        [*launch, *arguments, "--steps", str(steps)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
    )
    overdue = threading.Timer(150, started.kill)
    overdue.start()
    losses: dict[int, float] = {}
    process = 0
    assert started.stdout is not None
    with started, started.stdout:
        for line in started.stdout:
            if named := re.match(rf"rank {ranks - 1} of {ranks} is process (\d+)", line):
                process = int(named[1])
            if found := re.match(r"step (\d+): loss (.*)", line):
                step, loss = int(found[1]), float(found[2])
                assert losses.setdefault(step, loss) == loss, f"step {step} was repeated otherwise"
                if step == kill_at:
                    kill_at = 0
                    os.kill(process, signal.SIGKILL)
    overdue.cancel()
    assert started.returncode == 0
    first = min(losses)
    assert list(losses) == list(range(first, steps + 1))
    return [losses[step] for step in losses]


@pytest.mark.slow
def test_a_job_goes_on_after_a_death_and_on_other_ranks(tmp_path: Path) -> None:
    log, tables = tmp_path / "log.parquet", tmp_path / "log.tables.yaml"
    sizes = ("--scale", "0.001", "--samples", "100000", "--dim", "8")
    oper("synth", "criteo-kaggle", *sizes, "-o", str(log))
    oper("profile", str(log), "--tables", str(tables), "-o", str(tmp_path / "profile"))
    whole = train(tmp_path, "whole", 2, 24)
    killed = train(tmp_path, "killed", 2, 17, kill_at=8)
    assert killed == whole[:17]
    # From the checkpoint of step 15 on, on other ranks: by another plan, made from the first.
    more = train(tmp_path, "killed", 3, 24)
    assert len(more) == 9
    assert more == pytest.approx(whole[15:], rel=1e-5)
    assert {p.name for p in (tmp_path / "killed").glob("plan-*")} == {"plan-2", "plan-3"}
