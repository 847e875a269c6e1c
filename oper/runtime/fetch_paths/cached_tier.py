"""Cached tier: rows of the hosts' tier are read in the caches of a row source (row_source.py).

The caches serve training alone: a batch that is not trained settles the heap, and reads it by the
path below.
"""

from collections.abc import Collection, Sequence

from oper.base.errors import OperError
from oper.runtime.fetch_paths.fetch_path import Fetched, FetchPath, PathOver
from oper.runtime.fetch_paths.row_source import RowSource
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import PreparedBatch


class CachedTier(PathOver):
    """The path of the `cached` buckets, by number, over the path of all others."""

    def __init__(
        self, memory: TableMemory, below: FetchPath, source: RowSource, cached: Sequence[int]
    ) -> None:
        super().__init__(memory, below)
        self._source, self._cached = source, cached

    def fetch(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """See FetchPath."""
        if not batch.trains:
            self._source.settle()
            return super().fetch(batch, but)
        return self._source.read(batch, super().fetch(batch, [*but, *self._cached]))

    def fetch_again(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """See FetchPath."""
        if not (batch.trains and self._source.holds(batch)):
            return super().fetch_again(batch, but)
        return self._source.reread(batch, super().fetch_again(batch, [*but, *self._cached]))

    def check_graphs(self) -> None:
        """See FetchPath."""
        raise OperError(
            "a graph of torch.compile cannot look up tables of the tier, which are cached: leave "
            "the lookup out of it, as the sharded modules do"
        )
