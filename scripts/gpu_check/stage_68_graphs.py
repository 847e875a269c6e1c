"""Steps captured as CUDA graphs, of engines and of TorchRec's models; ranks share the device."""

from collections.abc import Iterator
from typing import Any

from scripts.gpu_check.stage_50_kernels import WITH_GRAPHS, tests_on_the_device

SECONDS = 60.0
NEEDS = ("torch", "numpy", "pytest", "hypothesis", "msgspec", "yaml")


def records() -> Iterator[dict[str, Any]]:
    yield from tests_on_the_device(*WITH_GRAPHS)
