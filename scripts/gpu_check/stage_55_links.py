"""Bandwidth of random rows of the device's own memory, as `oper topology measure` reports it.

Links between devices need several devices: ranks on one device would share its bandwidth.
"""

from collections.abc import Iterator
from typing import Any

SECONDS = 10.0
NEEDS = ("torch", "numpy", "yaml")
ROW_BYTES = (64, 128, 256, 512)


def records(library: str | None) -> Iterator[dict[str, Any]]:
    from oper.measure.launch import measure_local

    for row_bytes in ROW_BYTES if library is None else ROW_BYTES[:1]:
        measured = measure_local(1, row_bytes=row_bytes, on_devices=library is None)
        yield {
            "row_bytes": row_bytes,
            "bytes_per_second": measured.bandwidth[0][0],
            "spread": measured.spread[0][0],
            "memory_bytes": measured.memory_bytes[0],
        }
