"""Rows by access: each access of a row of another node has the row sent, repeats too.

Each rank asks all ranks of other nodes for its own accesses, and sends them its own gradients.
Rows of this node are read in place.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import Ints
from oper.plan.layout import SLOT_BITS
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.fetch_path import Arrived, Fetched, FetchPath, Needs
from oper.runtime.fetch_paths.row_exchange import RowExchange
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import PreparedBatch, Runs
from oper.runtime.tables.row_gradients import RowGradients


class RowsByAccess(FetchPath):
    """The path of the `asked` buckets, by number, between several nodes of CPU ranks. The gradients
    of the `sent` ones go to owners there."""

    needs = Needs(rows=True, runs=True, together=True, messages=True)

    def __init__(
        self, memory: TableMemory, asked: Sequence[int], sent: Sequence[int], counters: Counters
    ) -> None:
        super().__init__(memory)
        self._asked = asked
        self._exchange = RowExchange(memory, False, sent, counters)

    def fetch(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """See FetchPath."""
        runs = batch.rows
        assert isinstance(runs, Runs)  # of the positions of accesses
        buckets = [b for b in self._asked if b not in but]
        bases = self._heap.bases_on_host.copy()
        addresses = batch.addresses.clone()
        buffers = [self._fetch_far(runs, buckets, addresses, bases)] if buckets else []
        return Fetched(addresses, torch.from_numpy(bases), buffers)

    def _fetch_far(
        self, runs: Runs, buckets: Sequence[int], addresses: torch.Tensor, bases: Ints
    ) -> torch.Tensor:
        """Fetch rows of other nodes, and redirect the accesses to their places here."""
        exchange = self._exchange
        accesses = [
            slice(*runs.starts[[rows.start, rows.stop]].tolist())
            for rows in (runs.owned(b, owner) for owner in exchange.owners for b in buckets)
        ]
        lengths = runs.starts.diff().long()
        each = runs.slots.repeat_interleave(lengths)
        slots = torch.cat([each[:0], *(each[span] for span in accesses)])
        counts = np.array([span.stop - span.start for span in accesses], dtype=np.int64)
        counts = counts.reshape(-1, len(buckets))
        rows = exchange.fetch(slots, counts, buckets, _new_bytes)
        places = exchange.places(counts, buckets)
        exchange.read_there(bases, rows.data_ptr(), exchange.owners, buckets, places)
        targets = torch.full((runs.accesses,), -1)
        owners = [owner for owner in exchange.owners for _ in buckets]
        for span, first, owner in zip(accesses, places.firsts.flat, owners, strict=True):
            last = int(first) + span.stop - span.start
            targets[span] = (owner << SLOT_BITS) + torch.arange(int(first), last)
        # As if each were a run.
        starts = torch.arange(runs.accesses + 1, dtype=runs.starts.dtype)
        native.ops().redirect(addresses, runs.positions, starts, targets)
        return rows

    def exchange_gradients(self, mailbox: Callable[[int], RowGradients], step: int) -> Arrived:
        """See FetchPath."""
        return self._exchange.exchange_gradients(mailbox, step)

    def carry(self, digests: Ints) -> bool:
        """See FetchPath."""
        return self._exchange.carry(digests)


def _new_bytes(size: int) -> torch.Tensor:
    """Return new memory of so many bytes."""
    memory: torch.Tensor = native.ops().reused_tensor(size, torch.uint8)
    return memory
