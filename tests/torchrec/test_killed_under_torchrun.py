"""Ranks of torchrun, of which one is killed at a random moment: all others name it before they end,
whether they are in DistributedDataParallel, in a checkpoint or in OPER."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "tests" / "support" / "torchrec" / "train_till_killed.py"


@pytest.mark.slow
@pytest.mark.parametrize("kill", range(6))
def test_all_others_name_the_rank(tmp_path: Path, kill: int) -> None:
    kill_one(tmp_path, kill)


def kill_one(folder: Path, kill: int, *library: str) -> None:
    """Kill a rank at a moment that is drawn by `kill`, and see what the others say. Tables are on
    emulated devices where a library of emulated kernels is given."""
    ranks = 2 + kill % 2
    drawn = random.Random(kill)
    victim, seconds = drawn.randrange(ranks), drawn.random()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects", "3"]
    launch += ["--nproc-per-node", str(ranks), "--log-dir", str(folder / "logs")]
    ended = subprocess.run(
        [*launch, str(SCRIPT), str(folder), str(victim), str(seconds), *library],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    assert ended.returncode == 1, ended.stderr
    process = (folder / "process").read_text()
    logs = list((folder / "logs").glob("*/attempt_0/*/stderr.log"))
    assert len(logs) == ranks
    for log in logs:
        rank, text = int(log.parent.name), log.read_text(encoding="utf-8")
        named = f"rank {victim} (process {process}) died" in text or f"rank {victim} died" in text
        assert named == (rank != victim), text
        others = set(range(ranks)) - {victim}
        assert not any(f"rank {other} died" in text for other in others), text
        assert not any(f"rank {other} (process" in text for other in others), text
