"""Mailbox: a rank's summed gradients, for the owners of the rows to read.

In shared memory, written by its rank once a step and read by all others of the node: how many rows
there are of each bucket and owner, their slots in ascending order, and beside them the gradients
(prepared_batch.py has the order).

    int64    [buckets · (1 + ranks) + 1]   rows before those of each bucket and owner
    int64    [rows]                        slots
    float32  [rows, dim]                   bucket after bucket
"""

from collections.abc import Sequence

import torch

from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import RESERVE_BYTES, Segment, aligned
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.optimizers import RowGradients


class Mailboxes:
    """The mailboxes of the ranks of a node, of buckets of the given dims."""

    def __init__(self, node: Node, dims: Sequence[int]) -> None:
        self._rank, self._ranks, self._dims = node.rank, node.ranks, tuple(dims)
        self._counts = len(dims) * (1 + node.ranks) + 1
        self._slots_at = aligned(8 * self._counts)
        own = Segment.create(self._slots_at, RESERVE_BYTES, "mailbox")
        self._segments = node.share(own)

    @property
    def bytes(self) -> int:
        """Bytes of this rank's mailbox; it grows with the largest batch and is kept."""
        return self._segments[self._rank].bytes

    def open(self, rows: SortedRows) -> list[torch.Tensor]:
        """Begin a new content, of these rows: what the gradients of each bucket are to be written
        to, float32 [rows of the bucket, dim]."""
        own = self._segments[self._rank]
        starts, end = self._layout(rows)
        if end > own.bytes:
            own.grow(end)
        own.tensor(0, (self._counts,), torch.int64).copy_(rows.before)
        own.tensor(self._slots_at, (len(rows),), torch.int64).copy_(rows.slots)
        buckets = [rows.bucket(b) for b in range(len(self._dims))]
        return [
            own.tensor(start, (of_bucket.stop - of_bucket.start, dim), torch.float32)
            for start, of_bucket, dim in zip(starts, buckets, self._dims, strict=True)
        ]

    def read(self, rank: int, owner: int) -> list[RowGradients]:
        """What `rank` has for an owner, of each bucket."""
        segment = self._segments[rank]
        before = segment.tensor(0, (self._counts,), torch.int64)
        slots = segment.tensor(self._slots_at, (int(before[-1]),), torch.int64)
        rows = SortedRows(slots, before, self._ranks)
        starts, _ = self._layout(rows)
        found = []
        for b, (start, dim) in enumerate(zip(starts, self._dims, strict=True)):
            mine, base = rows.range(b, owner), rows.bucket(b).start
            grads = segment.tensor(
                start + 4 * dim * (mine.start - base), (mine.stop - mine.start, dim), torch.float32
            )
            found.append(RowGradients(slots[mine], grads))
        return found

    def _layout(self, rows: SortedRows) -> tuple[list[int], int]:
        """Where each bucket's gradients begin, and where the content ends, in bytes."""
        end = aligned(self._slots_at + 8 * len(rows))
        starts = []
        for b, dim in enumerate(self._dims):
            starts.append(end)
            of_bucket = rows.bucket(b)
            end = aligned(end + 4 * dim * (of_bucket.stop - of_bucket.start))
        return starts, end
