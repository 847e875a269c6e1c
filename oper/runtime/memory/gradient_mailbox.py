"""Mailbox: a rank's summed gradients, for the owners of the rows to read.

In shared memory, written by its rank once a step and read by all others of the node: the number of
rows of each bucket and owner, their slots in ascending order (shared_slots.py), and the gradients,
which lie in a segment of their own. Both segments are as long as the largest batch so far needed,
so that no rank must ask another for more than the ends of its segments.

    int64    [2, buckets · (1 + ranks) + 1]   rows and values before each group (row_gradients.py)
    int64    [rows]                           slots

    float32  [values]                         bucket after bucket

On devices the host does not know the number of rows. There both are one segment, as long as batches
of so many accesses may need; it is replaced when it must grow (growing_segments.py).
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from oper.cost.step_memory import mailbox_row_bytes, most_values, with_slack
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import (
    LINE_BYTES,
    RESERVE_BYTES,
    DeviceSegment,
    Segment,
    aligned,
)
from oper.runtime.memory.device import Cpu, Cuda
from oper.runtime.memory.gradient_segments import GradientSegments
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.memory.shared_slots import SharedSlots
from oper.runtime.tables.row_gradients import RowGradients, laid_out


class Mailbox(Protocol):
    """The place at which a rank leaves its gradients, and finds those of others."""

    @property
    def bytes(self) -> int:
        """Bytes of this rank's mailbox; it grows with the largest batch and is kept."""

    def open(self, rows: SortedRows) -> RowGradients:
        """Begin a new content: the gradients of these rows, whose values are to be written."""

    def read(self, rank: int) -> RowGradients:
        """Return the gradients that a rank has for all owners."""


class Mailboxes:
    """The mailboxes of the ranks of a node, of buckets of the given dims."""

    def __init__(self, node: Node, dims: Sequence[int]) -> None:
        self._rank, self._dims = node.rank, tuple(dims)
        groups = len(dims) * (1 + node.ranks)
        self._rows = SharedSlots(node, 2 * (groups + 1), "mailbox-rows")
        self._values = node.share(Segment.create(0, RESERVE_BYTES, "mailbox"))
        # The views that `read` returned for a rank, with their sizes (shared_slots.py).
        self._views: dict[int, tuple[tuple[int, int], RowGradients]] = {}

    @property
    def bytes(self) -> int:
        return self._rows.bytes + self._values[self._rank].bytes

    def open(self, rows: SortedRows) -> RowGradients:
        groups = laid_out(rows.before, self._dims, Cpu())
        self._rows.write(groups, rows.slots)
        self._values[self._rank].grow(4 * int(groups[1, -1]))
        return self.read(self._rank)

    def read(self, rank: int) -> RowGradients:
        groups, slots = self._rows.read(rank)
        values = self._values[rank]
        sizes = (len(slots), values.bytes // 4)
        known = self._views.get(rank)
        if known is None or known[0] != sizes:
            views = RowGradients(
                slots, groups.view(2, -1), values.tensor(0, sizes[1:], torch.float32)
            )
            known = self._views[rank] = (sizes, views)
        return known[1]


class DeviceMailboxes:
    """The mailboxes of the ranks of a node on devices, of buckets of the given dims.

    Writes are part of the device's other work: the others see them once this rank has waited for
    its device, and then signalled that.
    """

    def __init__(self, node: Node, device: Cuda, dims: Sequence[int]) -> None:
        self._rank, self._device, self._dims = node.rank, device, tuple(dims)
        self._groups = (2, len(dims) * (1 + node.ranks) + 1)
        self._slots_at = aligned(8 * self._groups[0] * self._groups[1])
        # A mailbox of no rows; a line more, because values begin at a line.
        self._fixed_bytes = self._slots_at + LINE_BYTES + 4 * most_values(0, dims)
        self._row_bytes = mailbox_row_bytes(max(dims, default=0))
        self._segments = GradientSegments(node, device, self._fixed_bytes)
        # Views of segments, whose making would take the host 9 µs of each rank in each step.
        self._contents: dict[int, tuple[DeviceSegment, RowGradients]] = {}

    @property
    def bytes(self) -> int:
        return self._segments.bytes

    @property
    def segments(self) -> list[DeviceSegment]:
        """The memory of all ranks' mailboxes now."""
        return self._segments.known

    def open(self, rows: SortedRows) -> RowGradients:
        most = len(rows.slots)
        if most > self._room(self.bytes):
            self._segments.grow(self._fixed_bytes + with_slack(most) * self._row_bytes)
        mine = self.read(self._rank)
        groups = laid_out(rows.before, self._dims, self._device)
        mine.groups.copy_(groups, non_blocking=True)
        mine.slots[:most].copy_(rows.slots, non_blocking=True)
        return mine

    def read(self, rank: int) -> RowGradients:
        segment = self._segments.of_step(rank)
        known = self._contents.get(rank)
        if known is None or known[0] is not segment:
            known = self._contents[rank] = (segment, self._content(segment))
        return known[1]

    def _content(self, segment: DeviceSegment) -> RowGradients:
        """Return a segment's parts, which are as long as it has room for: all ranks find the
        same."""
        rows = self._room(segment.reserve_bytes)
        values_at = aligned(self._slots_at + 8 * rows)
        values = (segment.reserve_bytes - values_at) // 4
        return RowGradients(
            segment.tensor(self._slots_at, (rows,), torch.int64),
            segment.tensor(0, self._groups, torch.int64),
            segment.tensor(values_at, (values,), torch.float32),
        )

    def _room(self, bytes: int) -> int:
        """Return the number of rows that a segment has room for."""
        return (bytes - self._fixed_bytes) // self._row_bytes
