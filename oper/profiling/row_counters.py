"""Count batches into row counters: exact, without overflow, in bounded memory.

For every sample, each id adds 1 to its row's accesses (over the samples, f_k of the paper's §3.2),
and each distinct row of a table adds 1 to the samples that contain it. Each bag, of a sample and a
feature, adds 1 to the bags of its length. A row takes 4 bytes until a
counter could exceed 2^32 − 1, then 8; twice that in tables of which some sample had several ids.
Counters beyond a memory limit are in files of the folder that is being written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from oper.base import native
from oper.base.arrays import as_int64, as_tensor
from oper.base.errors import OperError
from oper.base.free_memory import free_memory
from oper.logs.batches.batch import Batch, Jagged
from oper.logs.table_discovery import Prepared
from oper.profiling.counter_arrays import new_counters, samples_with_row_offsets
from oper.profiling.counter_files import sparse_counts
from oper.profiling.distinct_rows import tensors
from oper.profiling.profile import Profile
from oper.tables.bag_lengths import BagLengths, BagLengthSums
from oper.tables.table import Table, offsets

_MOST_UINT32 = int(np.iinfo(np.uint32).max)


def free_memory_bytes() -> int:
    """Return the memory available without swapping: of the machine, or of a control group if
    less."""
    return min(left.free_bytes for left in free_memory())


@dataclass
class Memory:
    """Allocates counters: in memory up to `limit_bytes` (None: all), beyond that in files."""

    limit_bytes: int | None = None
    used_bytes: int = 0

    def new(self, size: int, dtype: Any, folder: Path | None, name: str) -> Any:
        """Create counters of 0 [size], in memory or in file `name` of `folder`."""
        needed = size * np.dtype(dtype).itemsize
        fits = self.limit_bytes is None or self.used_bytes + needed <= self.limit_bytes
        if folder is None or fits:
            self.used_bytes += needed
            return np.zeros(size, dtype=dtype)
        folder.mkdir(exist_ok=True)
        return new_counters(size, dtype, folder, name)

    def free(self, counters: Any) -> None:
        """Give the memory of counters that are no longer used to others."""
        if not isinstance(counters, np.memmap):
            self.used_bytes -= counters.nbytes


class RowCounters:
    """The counters of one profile."""

    def __init__(
        self, tables: Sequence[Table], memory: Memory | None = None, folder: Path | None = None
    ) -> None:
        self.tables = tuple(tables)
        self.samples = 0
        self.bagged = (False,) * len(self.tables)
        self._offsets = offsets(self.tables)
        self._memory = memory or Memory()
        self._folder = folder
        self.accesses = self._new(int(self._offsets[-1]), np.uint32, "accesses.npy")
        self.samples_with_row = np.zeros(0, np.uint32)
        self.bound = 0  # an upper bound of all counters
        self._bag_lengths = BagLengthSums()
        # For tables with several features: the rows of all bags, each counted once per bag.
        self._distinct = np.zeros(len(self.tables), dtype=np.int64)
        self._several = np.zeros(len(self.tables), dtype=bool)

    def add(self, batch: Batch, table_of: Mapping[str, int]) -> None:
        """Count a batch of row ids; `table_of` is the table of each of its features.

        OperError names the sample, feature and value if an id is not a row of its table; the rest
        of the batch may have been counted then, so that the counters cannot be used.
        """
        columns: list[list[Jagged]] = [[] for _ in self.tables]
        for key, table in table_of.items():
            columns[table].append(batch.features[key])
        several = {t for t, ids in enumerate(columns) if _has_several(ids)}
        self._keep_samples_with_row(several)
        self._make_room(max((sum(len(i.values) for i in ids) for ids in columns), default=0))
        starts = samples_with_row_offsets(self.tables, self.bagged)[:-1]
        values, lengths, tables = tensors(batch, table_of)
        # `bad`, by feature: the place of its first id that is not a row, and the number of those.
        bad, bag_lengths, distinct = native.ops().count(
            as_tensor(self.accesses),
            as_tensor(self.samples_with_row),
            as_int64(self._offsets),
            as_int64(np.where(self.bagged, starts, -1)),
            values,
            lengths,
            tables,
            batch.samples,
        )
        for (key, table), (position, number) in zip(table_of.items(), bad.tolist(), strict=True):
            if number:
                self._refuse(batch, key, self.tables[table], position)
        self._bag_lengths.add(bag_lengths.numpy())
        self._distinct += distinct.numpy()
        self._several |= [len(ids) > 1 for ids in columns]
        self.samples += batch.samples

    @property
    def bag_lengths(self) -> BagLengths:
        """Number of counted bags of each length, and their distinct rows."""
        lengths = BagLengths.of_pairs(self._bag_lengths.pairs, self._distinct)
        # The bags of one feature are its samples, so that the counters have their distinct rows.
        distinct = np.where(self._several, self._distinct, lengths.ids_of_tables)
        starts = samples_with_row_offsets(self.tables, self.bagged)
        for t in np.flatnonzero(np.array(self.bagged, dtype=bool) & ~self._several).tolist():
            distinct[t] = self.samples_with_row[starts[t] : starts[t + 1]].sum(dtype=np.int64)
        return replace(lengths, distinct=distinct)

    def profile(self, source: dict[str, Any], prepared: Prepared | None = None) -> Profile:
        """Return the profile of the counts, which shares the counters' memory."""
        return Profile(
            self.tables,
            self.samples,
            self.accesses,
            self.samples_with_row,
            self.bagged,
            source=source,
            vocabularies=prepared,
            bag_lengths=self.bag_lengths,
        )

    def snapshot(self) -> Profile:
        """Return a profile of the counts so far, in memory of its own."""
        snapshot = self.profile({})
        for name in ("accesses", "samples_with_row"):
            setattr(snapshot, name, sparse_counts(getattr(self, name)))
        return snapshot

    def _new(self, size: int, dtype: Any, name: str) -> Any:
        return self._memory.new(size, dtype, self._folder, name)

    def _keep_samples_with_row(self, several: set[int]) -> None:
        """Start to count samples with the row for tables of which a sample has several ids.

        Before, every sample had at most one id, so they equal the accesses.
        """
        bagged = tuple(b or t in several for t, b in enumerate(self.bagged))
        if bagged == self.bagged:
            return
        before = samples_with_row_offsets(self.tables, self.bagged)
        after = samples_with_row_offsets(self.tables, bagged)
        samples_with_row = self._new(int(after[-1]), self.accesses.dtype, "samples_with_row.npy")
        for t in np.flatnonzero(bagged).tolist():
            samples_with_row[after[t] : after[t + 1]] = (
                self.samples_with_row[before[t] : before[t + 1]]
                if self.bagged[t]
                else self.accesses[self._offsets[t] : self._offsets[t + 1]]
            )
        self._memory.free(self.samples_with_row)
        self.samples_with_row, self.bagged = samples_with_row, bagged

    def _make_room(self, most: int) -> None:
        """Widen the counters if one could overflow by growing by `most`."""
        if self.accesses.dtype == np.uint32 and self.bound + most > _MOST_UINT32:
            self.bound = int(self.accesses.max())
            if self.bound + most > _MOST_UINT32:
                self.accesses = self._widen(self.accesses, "accesses.npy")
                self.samples_with_row = self._widen(self.samples_with_row, "samples_with_row.npy")
        self.bound += most

    def _widen(self, narrow: Any, name: str) -> Any:
        # A new file takes the name of the narrow counters', which stay mapped to the old one.
        wide = self._new(len(narrow), np.uint64, name)
        wide[:] = narrow
        self._memory.free(narrow)
        return wide

    def _refuse(self, batch: Batch, key: str, table: Table, position: int) -> None:
        ids = batch.features[key]
        raise OperError(
            f"{batch.location.of(ids.sample_of(position))}: expected ids from 0 to "
            f"{table.rows - 1:,} in feature {key!r}, as table {table.name!r} has {table.rows:,} "
            f"rows, got {int(ids.values[position])}; give the table more rows, or a rule for raw "
            "values (`ids: hash` or `ids: vocab`)"
        )


def _has_several(columns: Sequence[Jagged]) -> bool:
    """Return True if any sample has more than one id in all columns of a table together."""
    if len(columns) == 1:
        lengths = columns[0].lengths
        return lengths is not None and int(lengths.max(initial=0)) > 1
    total: Any = 0
    for ids in columns:
        total = total + (1 if ids.lengths is None else ids.lengths)
    return bool(np.any(np.asarray(total) > 1))
