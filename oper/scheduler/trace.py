"""Log as global batches of row addresses, for the caches.

A row's address here is the number of its width, then its number among the rows of all tables.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Ints
from oper.logs.row_reader import RowReader
from oper.scheduler.row_addresses import WIDTH_SHIFT, sample_major
from oper.tables.table import Table, offsets


class Width(NamedTuple):
    """Bytes of a row on a link: with its optimizer's state, and of its gradient."""

    row_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, table: Table) -> "Width":
        """Return the width of a table's rows."""
        return cls(table.memory_bytes("training"), table.row_bytes)


class Batch(NamedTuple):
    """Global batch: sample s reads the rows `addresses[offsets[s] : offsets[s + 1]]`."""

    addresses: Ints
    offsets: Ints  # [samples + 1]

    @property
    def samples(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Trace:
    """Batches of a log, `batch_size` samples each; the last one may have fewer."""

    reader: RowReader
    batch_size: int

    @property
    def tables(self) -> tuple[Table, ...]:
        return self.reader.tables

    @cached_property
    def widths(self) -> tuple[Width, ...]:
        """The distinct widths of the tables' rows, ascending."""
        return tuple(sorted(set(map(Width.of, self.tables))))

    @property
    def rows_of_width(self) -> Ints:
        """Number of rows of each width."""
        of_table = [self.widths.index(Width.of(table)) for table in self.tables]
        rows = [table.rows for table in self.tables]
        return np.bincount(of_table, rows, len(self.widths)).astype(np.int64)

    def addresses_of(self, rows: Ints) -> Ints:
        """Return the addresses of rows that are numbered through all tables."""
        of_table = np.array([self.widths.index(Width.of(table)) for table in self.tables])
        table = np.searchsorted(offsets(self.tables), rows, side="right") - 1
        return rows | of_table[table] << WIDTH_SHIFT

    def __iter__(self) -> Iterator[Batch]:
        first = offsets(self.tables)
        base = {
            key: int(first[t]) + (self.widths.index(Width.of(self.tables[t])) << WIDTH_SHIFT)
            for key, t in self.reader.tables_of.items()
        }
        for batch in self.reader.batches(self.batch_size, ids_only=True):
            columns = [(base[key] + rows.values, rows) for key, rows in batch.features.items()]
            if all(rows.lengths is None for _, rows in columns):
                addresses = np.stack([values for values, _ in columns], axis=1)
                ends = np.arange(batch.samples + 1, dtype=np.int64) * len(columns)
                yield Batch(addresses.ravel(), ends)
                continue
            lengths = np.stack([np.diff(rows.offsets()) for _, rows in columns])
            addresses = np.concatenate([values for values, _ in columns])[sample_major(lengths)]
            yield Batch(addresses, np.append(0, np.cumsum(lengths.sum(axis=0))))
