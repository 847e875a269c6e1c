"""Arrays of counters: how large, how wide, and where each table begins in them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oper.base.arrays import Counts, Ints
from oper.base.errors import OperError
from oper.tables.table import Table

_MOST_ACCESSES = 2.0**62


def containing_offsets(tables: Sequence[Table], bagged: Sequence[bool]) -> Ints:
    """Where each table begins in `containing`, int64 [T + 1]: only bagged tables take room."""
    result = np.zeros(len(tables) + 1, dtype=np.int64)
    np.cumsum([t.rows * b for t, b in zip(tables, bagged, strict=True)], out=result[1:])
    return result


def new_counters(size: int, dtype: Any, folder: Path | None, name: str) -> Any:
    """Counters at 0: in memory, or in file `name` of a folder that is being made.

    A file of that name goes, but arrays mapped to it stay readable.
    """
    if folder is None or size == 0:
        return np.zeros(size, dtype=dtype)
    path = folder / f".{name}"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
    # Without it a full disk would show only as a fatal signal, at the first write to a page.
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    path.replace(folder / name)
    return array


def check_total(where: str, *counters: Counts) -> None:
    """OperError where sums over rows, which are int64, could overflow."""
    wide = (array for array in counters if array.dtype == np.uint64)  # others do not come near
    total = sum(float(array.sum(dtype=np.float64)) for array in wide)
    if total > _MOST_ACCESSES:
        raise OperError(
            f"{where}: counts {total:.4g} accesses in all, and at most {_MOST_ACCESSES:.4g} can be "
            "planned for; count a part of the log"
        )
