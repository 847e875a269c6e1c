"""Mailbox: a rank's summed gradients, for the owners of the rows to read.

In shared memory, written by its rank once a step and read by all others of the node: how many rows
there are of each bucket and owner, their slots in ascending order, and the gradients, which lie in
a segment of their own. Both segments are as long as the largest batch so far needed, so that no
rank must ask another for more than where its segments end.

    int64    [2, buckets · (1 + ranks) + 1]   rows and values before each group (row_gradients.py)
    int64    [rows]                           slots

    float32  [values]                         bucket after bucket
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import RESERVE_BYTES, Segment, aligned
from oper.runtime.memory.device import Cpu, Device
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients, laid_out, room

_MOST_ROWS = 1 << 31  # of a batch: the sort calls accesses by 31 bits


class Mailbox(Protocol):
    """Where a rank leaves its gradients, and finds those of others."""

    @property
    def bytes(self) -> int:
        """Bytes of this rank's mailbox; it grows with the largest batch and is kept."""

    def open(self, rows: SortedRows) -> RowGradients:
        """Begin a new content: the gradients of these rows, whose values are to be written."""

    def read(self, rank: int) -> RowGradients:
        """What a rank has for all owners."""


class OwnMailbox:
    """The mailbox of a device's only rank, of buckets of the given dims, which nobody else reads:
    memory of torch's, which comes round in the order of the device's work."""

    def __init__(self, device: Device, dims: Sequence[int]) -> None:
        self._device, self._dims = device, tuple(dims)
        self._content: RowGradients | None = None
        self.bytes = 0

    def open(self, rows: SortedRows) -> RowGradients:
        groups = laid_out(rows.before, self._dims, self._device)
        size = room(rows.slots, groups, self._dims, self._device)
        values = torch.empty(size, device=self._device.torch_device)
        self._content = RowGradients(rows.slots, groups, values)
        self.bytes = max(self.bytes, rows.slots.nbytes + groups.nbytes + values.nbytes)
        return self._content

    def read(self, rank: int) -> RowGradients:
        assert self._content is not None
        return self._content


class Mailboxes:
    """The mailboxes of the ranks of a node, of buckets of the given dims."""

    def __init__(self, node: Node, dims: Sequence[int]) -> None:
        self._rank, self._dims = node.rank, tuple(dims)
        self._groups = (2, len(dims) * (1 + node.ranks) + 1)
        self._slots_at = aligned(8 * self._groups[0] * self._groups[1])
        most = self._slots_at + 8 * _MOST_ROWS
        self._rows = node.share(Segment.create(self._slots_at, most, "mailbox-rows"))
        self._values = node.share(Segment.create(0, RESERVE_BYTES, "mailbox"))

    @property
    def bytes(self) -> int:
        return self._rows[self._rank].bytes + self._values[self._rank].bytes

    def open(self, rows: SortedRows) -> RowGradients:
        groups = laid_out(rows.before, self._dims, Cpu())
        self._rows[self._rank].grow(self._slots_at + rows.slots.nbytes)
        self._values[self._rank].grow(4 * int(groups[1, -1]))
        mine = self.read(self._rank)
        mine.groups.copy_(groups)
        mine.slots[: len(rows.slots)] = rows.slots
        return mine

    def read(self, rank: int) -> RowGradients:
        rows, values = self._rows[rank], self._values[rank]
        slots, size = (rows.bytes - self._slots_at) // 8, values.bytes // 4
        return RowGradients(
            rows.tensor(self._slots_at, (slots,), torch.int64),
            rows.tensor(0, self._groups, torch.int64),
            values.tensor(0, (size,), torch.float32),
        )
