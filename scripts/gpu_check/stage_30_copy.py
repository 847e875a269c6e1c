"""Bandwidth of a copy, read plus written: what the bars are read against."""

from collections.abc import Iterator
from typing import Any

SECONDS = 60.0
NEEDS = ("torch",)
SIZES = (1 << 30, 8 << 30)


def records() -> Iterator[dict[str, Any]]:
    import torch

    from scripts.gpu_check.timing import copy_bandwidth

    for size in SIZES:
        bandwidth = copy_bandwidth(torch.device("cuda"), size)
        yield {"copied_bytes": size, "bytes_per_second": bandwidth}
