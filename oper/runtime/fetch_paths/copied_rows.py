"""Copied rows: every distinct row of the node's other ranks is copied once into a buffer here.

To the kernels the buffer is one more rank, number M: accesses of copied rows get addresses in it.
Rows of other nodes, if there are any, are copied by a path that derives from this one.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.plan.layout import SLOT_BITS
from oper.runtime.comm.shared_segment import aligned
from oper.runtime.fetch_paths.fetch_path import Fetched, FetchPath, Needs
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import BatchRows, PreparedBatch


class CopiedRows(FetchPath):
    """The path of the `copied` buckets, by number; the rows of all others are read in place."""

    def __init__(self, memory: TableMemory, copied: Sequence[int]) -> None:
        super().__init__(memory)
        self.copied = copied
        self.needs = Needs(rows=True, runs=self._device.kind != "cpu")
        self._row_bytes = [self._heap.rows(b.width).shape[1] for b in self._buckets]

    def fetch(self, batch: PreparedBatch, but: Collection[int] = ()) -> Fetched:
        """See FetchPath."""
        rows = batch.rows
        assert rows is not None
        bases = self._heap.bases_on_host.copy()
        buckets = [b for b in self.copied if b not in but]
        targets = rows.slots.new_full((int(rows.before_on_host[-1]),), -1)  # addresses of copies
        buffer = self._copy(rows, buckets, targets, bases)
        self._fetch_far(rows, buckets, targets, bases)
        addresses = rows.redirected(batch.addresses, targets, self._device)
        return Fetched(addresses, self._device.send(torch.from_numpy(bases)), [buffer])

    def _fetch_far(
        self, rows: BatchRows, buckets: Sequence[int], targets: torch.Tensor, bases: Ints
    ) -> None:
        """Copy rows of other nodes: here there are none."""

    def _copy(
        self, rows: BatchRows, buckets: Sequence[int], targets: torch.Tensor, bases: Ints
    ) -> torch.Tensor:
        """Copy the distinct rows of this node's other ranks into a buffer, width after width."""
        pieces: list[tuple[int, ...]] = []  # as the operator takes them
        end = 0
        for width in sorted({self._buckets[b].width for b in buckets}):
            begin = end = aligned(end)
            for b in (b for b in buckets if self._buckets[b].width == width):
                row_bytes = self._row_bytes[b]
                for rank in self._node.peers:
                    owned = rows.owned(b, rank)
                    if rank == self._rank or owned.start == owned.stop:
                        continue
                    called = (self._ranks << SLOT_BITS) + (end - begin) // row_bytes
                    arena = int(bases[width, rank])
                    count = owned.stop - owned.start
                    pieces.append((owned.start, count, arena, row_bytes, end, called))
                    end += count * row_bytes
            bases[width, self._ranks] = begin
        buffer = self._device.new(end, torch.uint8)
        bases[:, self._ranks] += buffer.data_ptr()
        *copied, places, names = np.array(pieces, dtype=np.int64).reshape(-1, 6).T.tolist()
        into = (buffer, places, targets, names)
        self._device.ops().copy_rows(rows.slots, *copied, *into, self._device.stream)
        return buffer
