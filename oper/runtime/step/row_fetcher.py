"""Sources: from where a batch's rows are read, and the reading (§5: retrieve-based, any pooling).

    raw        every access reads its row, through a pointer into the owner's arena
    distinct   every distinct remote row is copied once into a buffer here, and pooled from there

Rows of ranks that share no memory always come into the buffer, by two all_to_all. To the kernels
the buffer is one more rank, number M: accesses that read it get addresses in it.
"""

from collections.abc import Sequence

import numpy as np
import torch

from oper.base import native
from oper.runtime.comm.all_to_all import AllToAll
from oper.runtime.comm.node import Node
from oper.runtime.memory.heap import Heap
from oper.runtime.step.batch import PreparedBatch
from oper.runtime.step.counters import Counters
from oper.runtime.tables.buckets import Bucket


class RowFetcher:
    """The rows of all ranks as one of them reads them; `fetch` is the plan's."""

    def __init__(
        self,
        heap: Heap,
        buckets: Sequence[Bucket],
        node: Node,
        fetch: str,
        exchange: AllToAll | None,
    ) -> None:
        self._heap, self._buckets, self._node = heap, buckets, node
        self._rank, self._ranks = node.rank, node.ranks
        self._distinct, self._exchange = fetch == "distinct", exchange
        self._row_bytes = np.array([heap.rows(bucket.width).shape[1] for bucket in buckets])

    @property
    def needs_runs(self) -> bool:
        """Whether a batch must be sorted to be read."""
        return self._exchange is not None or (self._distinct and self._ranks > 1)

    def read(self, batch: PreparedBatch, counters: Counters) -> torch.Tensor:
        """The output of a batch, flat float32 [out_elements]."""
        self._count(batch, counters)
        addresses, bases, _fetched = self._fetch(batch)
        return native.ops().pooled_rows(
            addresses,
            batch.offsets,
            batch.weights,
            batch.features,
            bases,
            self._rank,
            batch.out_elements,
            torch.float32,
        )

    def weight_gradients(self, batch: PreparedBatch, grad: torch.Tensor) -> torch.Tensor:
        """The gradients of a batch's weights [N], from that of its output."""
        addresses, bases, _fetched = self._fetch(batch)
        return native.ops().weight_gradients(
            grad, addresses, batch.offsets, batch.weights, batch.features, bases, self._rank
        )

    def _fetch(self, batch: PreparedBatch) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Addresses and bases with remote rows in the buffer; the third keeps the buffer alive."""
        if not self.needs_runs:
            return batch.addresses, self._heap.bases, []
        assert batch.runs is not None
        positions, run_start, run_slot, run_count = batch.runs
        addresses, bases = batch.addresses.clone(), self._heap.bases.clone()
        prefix, codes = run_count.tolist(), self._ranks + 1
        parts: list[list[torch.Tensor]] = [[] for _ in range(len(bases))]
        size = [0] * len(bases)
        for b, bucket in enumerate(self._buckets):
            wanted = []
            for rank in range(self._ranks):
                first, last = prefix[b * codes + 1 + rank : b * codes + 3 + rank]
                if rank == self._rank or (rank in self._node.peers and not self._distinct):
                    last = first
                slots, start = run_slot[first:last], run_start
                if not self._distinct and last > first:
                    # Each access on its own: as if it were a run.
                    lengths = (run_start[first + 1 : last + 1] - run_start[first:last]).long()
                    slots = slots.repeat_interleave(lengths)
                    first, last = run_start[[first, last]].tolist()
                    start = torch.arange(len(positions) + 1, dtype=run_start.dtype)
                if last > first:
                    native.ops().redirect(
                        addresses, positions, start, first, last, size[bucket.width], self._ranks
                    )
                size[bucket.width] += last - first
                wanted.append(slots)
            parts[bucket.width] += self._copies(bucket.width, wanted)
        buffers = [torch.cat(found) if found else torch.empty(0) for found in parts]
        bases[:, self._ranks] = torch.tensor([buffer.data_ptr() for buffer in buffers])
        return addresses, bases, buffers

    def _copies(self, width: int, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of a width as bytes, by the slots wanted of each rank."""
        size = self._heap.rows(width).shape[1]
        found: list[torch.Tensor] = [torch.empty(0, size, dtype=torch.uint8)] * self._ranks
        asked = list(wanted)
        for rank in self._node.peers:
            if len(wanted[rank]):
                found[rank] = self._copy(width, rank, wanted[rank])
            asked[rank] = wanted[rank][:0]
        if self._exchange is not None:
            asked = self._exchange.send(asked, "ask for rows")
            answers = [self._copy(width, self._rank, slots) for slots in asked]
            for rank, rows in enumerate(self._exchange.send(answers, "send rows")):
                if rank not in self._node.peers:
                    found[rank] = rows
        return found

    def _copy(self, width: int, rank: int, slots: torch.Tensor) -> torch.Tensor:
        size = self._heap.rows(width).shape[1]
        out = torch.empty(len(slots), size, dtype=torch.uint8)
        native.ops().copy_rows(slots, int(self._heap.bases[width, rank]), size, out)
        return out

    def _count(self, batch: PreparedBatch, counters: Counters) -> None:
        shape = (len(self._buckets), self._ranks + 1)  # replicas first
        runs = None if batch.sorting else batch.runs
        if runs is None or len(runs[0]) < len(batch.addresses):
            given = (batch.addresses, batch.segment_offset, batch.features)
            accesses = (
                native.ops().accesses_by_rank(*given, shape[0], self._rank, self._ranks).numpy()
            )
            fetched = accesses[:, 1:]
        else:
            start, prefix = runs[1].numpy(), runs[3].numpy()
            accesses = np.diff(start[prefix]).astype(np.int64).reshape(shape)
            fetched = (np.diff(prefix).reshape(shape) if self._distinct else accesses)[:, 1:]
        by_source = accesses.sum(axis=0)
        counters.add(
            lookups=1,
            accesses=len(batch.addresses),
            replica_accesses=int(by_source[0]),
            accessed_rows=by_source[1:],
            fetched_rows=fetched.sum(axis=0),
            fetched_bytes=self._row_bytes @ fetched,
        )
