"""The degree of infrequency (DoI) of tables: which of them decide where a sample goes (Herald).

A cached row is infrequent if it was in fewer samples so far than one worker trained: a frequent one
is needed by every worker in nearly every iteration, wherever samples go. DoI of a table: infrequent
rows over all rows, of those that are cached.
"""

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.scheduler.cache import Caches
from oper.scheduler.row_addresses import ROW_MASK

REFRESH = 100  # batches, after which the tables are chosen anew


class Infrequency:
    """The samples that contain each row, of T tables whose rows begin at `first` [T + 1]."""

    def __init__(self, first: Ints, workers: int) -> None:
        self._first, self._workers = first, workers
        self._samples = 0
        self._samples_with_row = np.zeros(int(first[-1]), dtype=np.uint32)

    def count(self, addresses: Ints, samples: int) -> None:
        """Note a batch: the addresses of its samples' distinct rows."""
        np.add.at(self._samples_with_row, self.rows_of(addresses), 1)
        self._samples += samples

    def of_tables(self, caches: Caches) -> Floats:
        """The degree of infrequency of each table, [T]; 0 where none of its rows is cached."""
        addresses, copies = caches.cached()
        rows, table = self.rows_of(addresses), self.tables_of(addresses)
        rare = self._samples_with_row[rows] < self._samples / self._workers
        tables = len(self._first) - 1
        cached = np.bincount(table, copies.astype(np.float64), tables)
        infrequent = np.bincount(table, (copies * rare).astype(np.float64), tables)
        degrees: Floats = infrequent / np.maximum(cached, 1.0)
        return degrees

    def rows_of(self, addresses: Ints) -> Ints:
        """The number of each row through all tables."""
        return addresses & ROW_MASK

    def tables_of(self, addresses: Ints) -> NDArray[np.int64]:
        """The table of each row."""
        return np.searchsorted(self._first, self.rows_of(addresses), side="right") - 1
