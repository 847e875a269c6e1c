"""The bitmap method on devices, for ranks of one node (OPER §5.3).

As on the processor (methods.py), bit by bit, but that no count comes to the host: buffers have room
for every replica, and each bucket's gradients begin at a line of them. A rank sums its slice in its
own buffer, where only it reads that slice, and all gather the slices when they have `reduced`: so
all ranks' links serve alike. Where replicas are dense, or are gathered, on CPU ranks, the sums have
the same bits, so that devices need no method but this one.

A rank's memory that the others read:

    int64    [words]   its bitmap of touched replicas
    float32  [values]  its gradients of the replicas that any rank touched, and its slice of the sum
"""

from dataclasses import replace

import torch

from oper.base.errors import OperError
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import aligned
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import LINE_VALUES, RowGradients


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
        begin = aligned(8 * words)
        segments = list(node.share(device.segment(begin + 4 * values)).values())
        self.shared_bytes = segments[self._rank].reserve_bytes
        self._bitmaps = [s.tensor(0, [words], torch.int64) for s in segments]
        self._buffers = [s.tensor(begin, [values], torch.float32) for s in segments]
        self._total = torch.empty(values, device=on)
        self.read_bytes = torch.zeros(1, dtype=torch.int64, device=on)
        self._united: tuple[torch.Tensor, torch.Tensor]  # slots and groups of touched replicas

    def mark(self, rows: SortedRows) -> None:
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
        self._united = ops.unite_replicas(
            self._bitmaps,
            replicas.slots,
            replicas.counts,
            replicas.dims,
            sum(replicas.counts),
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
            self._buffers[self._rank],
            stream,
        )

    def reduce(self) -> None:
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
        slots, groups = self._united
        ops, stream = self._device.ops(), self._device.stream
        ops.gather_slices(self._buffers, groups, self._total, stream)
        return RowGradients(slots, groups, self._total)
