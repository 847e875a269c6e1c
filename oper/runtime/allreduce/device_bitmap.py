"""The bitmap method on devices, for ranks of one node (OPER §5.3).

As on the processor (methods.py), bit by bit, but that no count comes to the host: buffers have room
for as many replicas as all ranks have accesses, or for all if those are fewer, and each bucket's
gradients begin at a line of them. A rank sums its slice in its own buffer, where only it reads that
slice, and all gather the slices when they have `reduced`: so all ranks' links serve alike. Where
replicas are dense, or are gathered, on CPU ranks, the sums have the same bits, so that devices need
no method but this one.

A rank's memory that the others read:

    int64    [words]   its bitmap of touched replicas
    float32  [values]  its gradients of the replicas that any rank touched, and its slice of the
                       sum; replaced where it must grow (growing_segments.py)
    int64              how many accesses its batch has, in the host's memory
"""

from dataclasses import replace
from functools import partial

import torch

from oper.base.errors import OperError
from oper.cost.step_memory import LINE_VALUES, most_values, with_slack
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.comm.growing_segments import GrowingSegments
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, DeviceSegment, Segment, aligned
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.gradient_mailbox import segment_for_gradients
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients


class DeviceBitmap:
    """A gradient of every replica that any rank touched, on the ranks' devices."""

    def __init__(self, node: Node, device: Cuda, replicas: Replicas) -> None:
        if len(node.peers) < node.ranks:
            raise OperError(
                f"the plan has replicas, and {node.ranks} ranks on devices are of several hosts: "
                "devices sum gradients of replicas on one host; plan for one (--topology), or "
                "train on CPU ranks (device='cpu')"
            )
        on = device.torch_device
        self._device, self._rank = device, node.peers.index(node.rank)
        self._replicas = replace(replicas, slots=[slots.to(on) for slots in replicas.slots])
        self._dims = torch.tensor(replicas.dims, device=on)
        words = sum(-(-count // 64) for count in replicas.counts)
        sizes = (n * dim for n, dim in zip(replicas.counts, replicas.dims, strict=True))
        values = sum(-(-size // LINE_VALUES) * LINE_VALUES for size in sizes)
        self._most_values = values
        bitmaps = node.share(device.segment(aligned(8 * words)))
        self._bitmaps = [s.tensor(0, [words], torch.int64) for s in bitmaps.values()]
        self._bitmap_bytes = bitmaps[node.rank].reserve_bytes
        self._segments = GrowingSegments(node, partial(segment_for_gradients, device), LINE_BYTES)
        self._peers = node.peers
        size = LINE_BYTES * len(node.peers)
        lines = node.share_first(Segment.create(size, size, "accesses"))
        shape = [len(node.peers), LINE_BYTES // 8]
        self._accesses = lines.tensor(0, shape, torch.int64).numpy()[:, 0]
        self._values = 0  # in this step's sum
        self._buffers: list[torch.Tensor] = []
        self.read_bytes = torch.zeros(1, dtype=torch.int64, device=on)
        self._united: tuple[torch.Tensor, torch.Tensor]  # slots and groups of touched replicas

    @property
    def shared_bytes(self) -> int:
        return self._bitmap_bytes + self._segments.mine.reserve_bytes

    def mark(self, rows: SortedRows) -> None:
        self._accesses[self._rank] = len(rows.slots)
        bitmaps = sum(bitmap.nbytes for bitmap in self._bitmaps)
        self.read_bytes = torch.full_like(self.read_bytes, bitmaps)
        self._device.ops().mark_replicas(
            rows.slots,
            rows.before,
            self._replicas.groups,
            self._replicas.slots,
            self._replicas.counts,
            self._bitmaps[self._rank],
            self._device.stream,
        )

    def write(self, sums: RowGradients) -> None:
        replicas, ops, stream = self._replicas, self._device.ops(), self._device.stream
        most_rows = min(sum(replicas.counts), int(self._accesses.sum()))
        size = min(4 * self._most_values, aligned(4 * most_values(most_rows, replicas.dims)))
        if size > self._segments.mine.reserve_bytes:
            self._segments.grow(min(4 * self._most_values, with_slack(size)))
        self._values = size // 4
        self._united = ops.unite_replicas(
            self._bitmaps,
            replicas.slots,
            replicas.counts,
            replicas.dims,
            most_rows,
            stream,
        )
        ops.aggregate_rows(
            sums.slots,
            sums.groups,
            sums.values,
            replicas.groups,
            replicas.counts,
            *self._united,
            replicas.dims,
            self._buffer(self._segments.mine),
            stream,
        )

    def reduce(self) -> None:
        self._buffers = [self._buffer(self._segments.of(peer)) for peer in self._peers]
        self._device.ops().sum_slice(
            self._buffers,
            self._united[1],
            self._dims,
            self._rank,
            self._buffers[self._rank],
            self.read_bytes,
            self._device.stream,
        )

    def read(self) -> RowGradients:
        # Kept no longer than needed: the next step makes new ones, and ranks new buffers.
        (slots, groups), buffers = self._united, self._buffers
        del self._united
        self._buffers = []
        total = torch.empty(self._values, device=self._device.torch_device)
        self._device.ops().gather_slices(buffers, groups, total, self._device.stream)
        return RowGradients(slots, groups, total)

    def _buffer(self, segment: DeviceSegment) -> torch.Tensor:
        """A rank's gradients in this step, as long as the sum."""
        return segment.tensor(0, [self._values], torch.float32)
