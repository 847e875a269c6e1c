"""Row counts of all tables as arrays, and the row and table of each counter.

Counters of accesses are in global row order. Counters of the samples that contain a row are kept
only for bagged tables, those of which a sample may read several rows: for the others the number
of samples that contain a row equals its accesses. Counters that are stored sparse are expanded when
they are first read.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oper.base.arrays import Counts, Ints
from oper.base.display import Summarised
from oper.base.errors import OperError
from oper.profiling.counter_files import SparseCounts
from oper.profiling.histogram import RowHistogram, histogram
from oper.tables.table import Table
from oper.tables.table import offsets as table_offsets

# Sums over rows are int64; half of its range leaves room for the sum of two.
_MOST_ACCESSES = 2.0**62


@dataclass(eq=False)
class RowCounts(Summarised):
    """Accesses of each row in `samples` samples, and the number of samples that contain the row.

    accesses: uint32 or uint64 [rows]. samples_with_row: the same type, only rows of tables that are
    `bagged`, in table order. Both may be set to `SparseCounts`, and read as dense counters, which
    are kept until `release`.
    """

    tables: tuple[Table, ...]
    samples: int
    accesses: Counts
    samples_with_row: Counts
    bagged: tuple[bool, ...]

    @cached_property
    def offsets(self) -> Ints:
        """Offset of each table's first row, and the end: int64 [T + 1]."""
        return table_offsets(self.tables)

    @cached_property
    def samples_with_row_offsets(self) -> Ints:
        """Offset of each table's first row in `samples_with_row`; tables without bags have no rows
        there."""
        return samples_with_row_offsets(self.tables, self.bagged)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return int(self.offsets[-1])

    def table_accesses(self, table: int) -> Counts:
        """Return the accesses of a table's rows."""
        return self.accesses[self.offsets[table] : self.offsets[table + 1]]

    @property
    def accesses_of_tables(self) -> Ints:
        """Accesses of all rows of each table: int64 [T], one pass over all counters."""
        tables = range(len(self.tables))
        sums = [int(self.table_accesses(t).sum(dtype=np.int64)) for t in tables]
        return np.array(sums, dtype=np.int64)

    @cached_property
    def total_accesses(self) -> int:
        """Accesses of all rows of all tables, counted once."""
        return int(self.accesses_of_tables.sum())

    def table_samples_with_row(self, table: int) -> Counts:
        """Return the samples that contain each of a table's rows."""
        if not self.bagged[table]:
            return self.table_accesses(table)
        return self.samples_with_row[
            self.samples_with_row_offsets[table] : self.samples_with_row_offsets[table + 1]
        ]

    def stored(self, name: str) -> Counts | SparseCounts:
        """Return `accesses` or `samples_with_row`, sparse if they are stored so."""
        counters: Counts | SparseCounts = vars(self)[name]
        return counters

    def release(self) -> None:
        """Free the dense counters that were made of sparse ones; reading makes them again."""
        for name in ("accesses", "samples_with_row"):
            if isinstance(counters := self.stored(name), SparseCounts):
                vars(counters).pop("dense", None)

    def histogram(self) -> RowHistogram:
        """Return the rows by table, accesses and samples with the row: one pass over all
        counters."""
        return histogram(
            self.accesses, self.samples_with_row, self.offsets, self.samples_with_row_offsets
        )


class _Dense:
    """A field that may be set to dense or sparse counters, and reads as dense ones."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, counts: RowCounts, owner: Any = None) -> Counts:
        counters = counts.stored(self._name)
        return counters.dense if isinstance(counters, SparseCounts) else counters

    def __set__(self, counts: RowCounts, counters: Counts | SparseCounts) -> None:
        vars(counts)[self._name] = counters


for _name in ("accesses", "samples_with_row"):
    setattr(RowCounts, _name, _Dense(_name))


def samples_with_row_offsets(tables: Sequence[Table], bagged: Sequence[bool]) -> Ints:
    """Return the offset of each table in `samples_with_row`, int64 [T + 1]; only bagged tables have
    rows there."""
    result = np.zeros(len(tables) + 1, dtype=np.int64)
    np.cumsum([t.rows * b for t, b in zip(tables, bagged, strict=True)], out=result[1:])
    return result


def new_counters(size: int, dtype: Any, folder: Path | None, name: str) -> Any:
    """Create counters of 0 [size]: in memory, or in file `name` of a folder that is being written.

    Replaces a file of that name; arrays that are mapped to the old one stay readable.
    """
    if folder is None or size == 0:
        return np.zeros(size, dtype=dtype)
    path = folder / f".{name}"
    array = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=(size,))
    # Without this a full disk would be a SIGBUS at the first write to a page.
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    path.replace(folder / name)
    return array


def check_total(where: str, *counters: Counts | SparseCounts) -> None:
    """Raise OperError if sums over rows, which are int64, could overflow."""
    wide = (
        array for array in counters if array.dtype == np.uint64
    )  # Sums of uint32 stay far below.
    total = sum(float(array.sum(dtype=np.float64)) for array in wide)
    if total > _MOST_ACCESSES:
        raise OperError(
            f"{where}: has {total:.4g} accesses, and at most {_MOST_ACCESSES:.4g} are supported; "
            "count a part of the log"
        )
