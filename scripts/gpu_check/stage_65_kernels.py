"""The kernels on the device: equal bits to the CPU's, in the tests that run emulated elsewhere.

CUB's sort runs nowhere else, and its batches are a hundred times larger here.
"""

from collections.abc import Iterator
from typing import Any

from scripts.gpu_check import device_tests

SECONDS = 35.0
NEEDS = device_tests.NEEDS
OTHER_STAGES = (*device_tests.OF_TORCHREC, *device_tests.OF_GRAPHS, *device_tests.WITH_RANKS)
DRY = ("tests/cuda/test_check_bags.py", "-k", "emulated")


def records(library: str | None) -> Iterator[dict[str, Any]]:
    which = ["tests/cuda", *(f"--ignore={path}" for path in OTHER_STAGES)]
    yield from device_tests.device_tests(library, which, DRY, SECONDS)
