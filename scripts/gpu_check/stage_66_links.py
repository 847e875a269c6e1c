"""What `oper topology measure` says of one device: how fast it reads random rows of its own.

Links between devices need several; on one device ranks would share what is measured.
"""

from collections.abc import Iterator
from typing import Any

SECONDS = 60.0
NEEDS = ("torch", "numpy", "yaml")
ROW_BYTES = (64, 128, 256, 512)


def records(device: str = "cuda") -> Iterator[dict[str, Any]]:
    """With `device` "cpu" the same of a CPU rank: to try the script."""
    from oper.measure.launch import measure_local

    for row_bytes in ROW_BYTES:
        measured = measure_local(1, row_bytes=row_bytes, on_devices=device != "cpu")
        yield {
            "row_bytes": row_bytes,
            "bytes_per_second": measured.bandwidth[0][0],
            "spread": measured.spread[0][0],
            "memory_bytes": measured.memory_bytes[0],
        }
