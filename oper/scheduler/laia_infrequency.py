"""Degree of infrequency (DoI) of tables, by which Herald selects those that decide the worker of a
sample.

A cached row is infrequent if fewer samples have read it so far than one worker trained: every
worker needs a frequent row in nearly every iteration, whatever the assignment. DoI of a table:
infrequent rows over all rows, of the cached ones.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.scheduler.cache import Caches
from oper.scheduler.row_addresses import ROW_MASK

REFRESH = 100  # batches, after which the tables are chosen again


class Infrequency:
    """Numbers of samples that contain each of R rows, and the degree of infrequency of each
    table."""

    def __init__(self, table_of: NDArray[np.integer[Any]], tables: int, workers: int) -> None:
        """Start with no samples; `table_of` [R] is the table of each row, by the row's number
        (`rows_of`)."""
        self._table_of, self._tables, self._workers = table_of, tables, workers
        self._samples = 0
        self._samples_with_row = np.zeros(len(table_of), dtype=np.uint32)

    @staticmethod
    def of_numbered_rows(first: Ints, workers: int) -> "Infrequency":
        """Return the infrequency of rows that are numbered through all tables, which begin at
        `first` [T + 1]."""
        tables = len(first) - 1
        numbers = np.arange(tables, dtype=np.min_scalar_type(tables))
        return Infrequency(np.repeat(numbers, np.diff(first)), tables, workers)

    def count(self, rows: Ints, samples: int) -> None:
        """Count a batch: the numbers of its samples' distinct rows."""
        # One in the counters' own type: NumPy adds numbers of another type 40 times as slowly.
        np.add.at(self._samples_with_row, rows, self._samples_with_row.dtype.type(1))
        self._samples += samples

    def of_tables(self, caches: Caches) -> Floats:
        """Return the degree of infrequency of each table, [T]; 0 if none of its rows is cached."""
        addresses, copies = caches.cached()
        rows = self.rows_of(addresses)
        table = self.tables_of(rows)
        rare = self._samples_with_row[rows] < self._samples / self._workers
        cached = np.bincount(table, copies.astype(np.float64), self._tables)
        infrequent = np.bincount(table, (copies * rare).astype(np.float64), self._tables)
        degrees: Floats = infrequent / np.maximum(cached, 1.0)
        return degrees

    def rows_of(self, addresses: Ints) -> Ints:
        """Return the number of the row at each address."""
        return addresses & ROW_MASK

    def tables_of(self, rows: Ints) -> NDArray[np.integer[Any]]:
        """Return the table of each row, by the rows' numbers."""
        return self._table_of[rows]
