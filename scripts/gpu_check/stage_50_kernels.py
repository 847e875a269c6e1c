"""The kernels on the device: equal bits to the CPU's, in the tests that run emulated elsewhere.

CUB's sort runs nowhere else, and batches of it are a hundred times larger here.
"""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from scripts import build_cuda

SECONDS = 90.0
NEEDS = ("torch", "numpy", "pytest", "hypothesis", "msgspec", "yaml")
# Tests that start ranks are stages of their own (stage_65_ranks.py, stage_68_graphs.py), as they
# take longer.
STARTING_RANKS = ("engine", "training", "mailbox", "replica_allreduce", "measure", "torchrec")
WITH_RANKS = tuple(f"tests/cuda/test_{name}.py" for name in STARTING_RANKS)
OF_TORCHREC = ("tests/cuda/test_torchrec.py", "tests/cuda/test_graph_step.py")
WITH_GRAPHS = ("tests/cuda/test_step_graph.py", "tests/cuda/test_graph_step.py")


def records() -> Iterator[dict[str, Any]]:
    yield from tests_on_the_device(
        "tests/cuda", *(f"--ignore={test}" for test in (*WITH_RANKS, *WITH_GRAPHS))
    )


def tests_on_the_device(*which: str) -> Iterator[dict[str, Any]]:
    """What became of those tests that have a variant for the device."""
    if importlib.util.find_spec("torchrec") is None:
        which = tuple(each for each in which if each not in OF_TORCHREC)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *which]
    done = subprocess.run(
        [*command, "-k", "on_cuda"],
        cwd=build_cuda.REPOSITORY,
        capture_output=True,
        text=True,
    )
    sys.stderr.write(done.stdout + done.stderr)
    counted = {
        word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped)", done.stdout)
    }
    yield {
        "passed": counted.get("passed", 0),
        "failed": counted.get("failed", 0),
        "skipped": counted.get("skipped", 0),
    }
    if not counted.get("passed"):
        yield {"failed": True, "why": "no test ran on the device"}
