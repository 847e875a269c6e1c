"""Pointers: rows are read in place, in memory of the node's ranks that is mapped here.

Gradients stay in the mailboxes of the node's ranks, where owners read them by pointer too.
"""

from collections.abc import Collection

from oper.runtime.fetch_paths.fetch_path import Fetched, FetchPath
from oper.runtime.memory.prepared_batch import PreparedBatch


class Pointers(FetchPath):
    """The path of tables whose rows all lie on this node."""

    def fetch(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """See FetchPath."""
        return Fetched(batch.addresses, self._heap.bases)
