"""Engines on the device: 1, 2 and 4 ranks share its memory, train and serve; some are killed."""

from collections.abc import Iterator
from typing import Any

from scripts.gpu_check.stage_50_kernels import WITH_RANKS, tests_on_the_device

SECONDS = 120.0
NEEDS = ("torch", "numpy", "pytest", "hypothesis", "msgspec", "yaml")


def records() -> Iterator[dict[str, Any]]:
    yield from tests_on_the_device(*WITH_RANKS)
