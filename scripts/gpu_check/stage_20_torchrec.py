"""TorchRec's modules on the device, trained and served: the bits of CPU ranks.

1, 2 and 4 ranks share the device. State dicts and checkpoints go from devices to CPU ranks and
back.
"""

from collections.abc import Iterator
from typing import Any

from scripts.gpu_check import device_tests

SECONDS = 50.0
NEEDS = (*device_tests.NEEDS, "torchrec")
DRY = (
    "tests/cuda/test_torchrec.py::test_modules_train_the_bits_of_cpu_ranks[emulated-1-adam]",
    "tests/cuda/test_torchrec.py::test_modules_give_the_bits_of_cpu_ranks[emulated-shard-1]",
)


def records(library: str | None) -> Iterator[dict[str, Any]]:
    yield from device_tests.device_tests(library, device_tests.OF_TORCHREC, DRY, SECONDS)
