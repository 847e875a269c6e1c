"""Steps captured as CUDA graphs, of TorchRec's models and of engines; ranks share the device."""

import importlib.util
from collections.abc import Iterator
from typing import Any

from scripts.gpu_check import device_tests

SECONDS = 40.0
NEEDS = device_tests.NEEDS
DRY = ("tests/cuda/test_step_graph.py::test_serves_as_on_the_cpu[emulated-1]",)


def records(library: str | None) -> Iterator[dict[str, Any]]:
    of_torchrec, of_engines = device_tests.OF_GRAPHS
    which = [of_engines]
    if importlib.util.find_spec("torchrec") is not None:
        which.insert(0, of_torchrec)
    yield from device_tests.device_tests(library, which, DRY, SECONDS)
