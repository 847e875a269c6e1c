"""Counts of a lookup: accesses by the rank whose rows they read, and rows and bytes fetched.

They are counted where they are known: in a batch whose rows are found from these, in any other by a
pass over its addresses.
"""

from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import BatchRows, PreparedBatch, Runs


class ReadCounts:
    """The counts of one engine's lookups. `distinct`: of tables that are not pooled every distinct
    row is fetched once."""

    def __init__(self, memory: TableMemory, distinct: bool) -> None:
        self._device, self._distinct = memory.heap.device, distinct
        self._rank, self._ranks = memory.node.rank, memory.node.ranks
        rows = [memory.heap.rows(bucket.width) for bucket in memory.buckets]
        self._row_bytes = np.array([of_bucket.shape[1] for of_bucket in rows])
        self._pooled = np.array([bucket.pooled for bucket in memory.buckets])

    def count(self, batch: PreparedBatch, counters: Counters) -> None:
        """Count a lookup. The counters keep methods of this object, and must not be part of it."""
        counters.add(lookups=1, accesses=len(batch.addresses))
        on_host = self._device.kind == "cpu"
        if isinstance(batch.sort, Future) and batch.sorting and batch.all_sorted:
            counters.add_when(batch.sort, self._by_rows)
            return
        rows = batch.rows if on_host and not batch.sorting else None
        if rows is not None and rows.accesses >= len(batch.addresses):
            counters.add(**self._by_rows(rows))
            return
        accesses = self._device.ops().accesses_by_rank(
            batch.addresses,
            batch.segment_offset,
            batch.features,
            len(self._row_bytes),
            self._rank,
            self._ranks,
            self._device.stream,
            batch.report,
        )
        if on_host:
            counters.add(**self._by_source(accesses.numpy()))
        elif self._distinct and isinstance(batch.rows, Runs):
            fetched = batch.rows.before.diff().view_as(accesses)
            counters.add_later(torch.stack([accesses, fetched]), self._by_source_and_row)
        else:
            counters.add_later(accesses, self._by_source)

    def _by_rows(self, rows: BatchRows) -> dict[str, Any]:
        return self._by_source(rows.access_counts(), rows.row_counts() if self._distinct else None)

    def _by_source_and_row(self, counts: Ints) -> dict[str, Any]:
        return self._by_source(counts[0], counts[1])

    def _by_source(self, accesses: Ints, rows: Ints | None = None) -> dict[str, Any]:
        """Return counters from accesses [buckets, ranks + 1], replicas first, and the rows fetched
        for them (None: one for each)."""
        fetched = accesses[:, 1:]
        if rows is not None:
            fetched = np.where(self._pooled[:, None], fetched, rows[:, 1:])
        by_source = accesses.sum(axis=0)
        return {
            "replica_accesses": int(by_source[0]),
            "accessed_rows": by_source[1:],
            "fetched_rows": fetched.sum(axis=0),
            "fetched_bytes": self._row_bytes @ fetched,
        }
