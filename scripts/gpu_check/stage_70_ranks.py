"""Engines on the device: 1, 2 and 4 ranks share its memory, train and serve; some are killed."""

from collections.abc import Iterator
from typing import Any

from scripts.gpu_check import device_tests

SECONDS = 30.0
NEEDS = device_tests.NEEDS
DRY = ("tests/cuda/test_engine.py::test_serves_as_on_the_cpu[emulated-one rank]",)


def records(library: str | None) -> Iterator[dict[str, Any]]:
    yield from device_tests.device_tests(library, device_tests.WITH_RANKS, DRY, SECONDS)
