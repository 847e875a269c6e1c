"""The dense method on devices (OPER §5.3): the sums of the processor's (methods.py), bit by bit."""

from dataclasses import replace

import torch

from oper.runtime.allreduce.device_sliced_sum import DeviceSlicedSum
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import DeviceSegment
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients, laid_out_on_host


class DeviceDense:
    """A gradient of every replica, touched or not, on the ranks' devices.

    Ranks sum and gather the buffers of all replicas in place. The rows that any rank touched are
    told from padding (gradient_buffers.h) and copied, so that updates see no others.
    """

    def __init__(self, node: Node, proxies: Proxies, device: Cuda, replicas: Replicas) -> None:
        self._device, on, rows = device, device.torch_device, replicas.rows
        self._replicas = replicas = replace(replicas, slots=[s.to(on) for s in replicas.slots])
        self._slots = rows.slots.to(on)  # of all replicas, a bucket each group
        self._groups = laid_out_on_host(rows.groups[0], replicas.dims).to(on)
        self._words = sum(-(-count // 64) for count in replicas.counts)
        self._sum = DeviceSlicedSum(node, proxies, device, replicas)

    @property
    def read_bytes(self) -> torch.Tensor:
        return self._sum.read_bytes

    @property
    def shared_bytes(self) -> int:
        return self._sum.shared_bytes

    @property
    def segments(self) -> list[DeviceSegment]:
        """The memory of all ranks that gradients are written to now."""
        return self._sum.segments

    def mark(self, rows: SortedRows) -> None:
        self._sum.begin()

    def write(self, sums: RowGradients) -> None:
        self._sum.write(sums, self._slots, self._groups, self._sum.most_values)

    def reduce(self) -> None:
        self._sum.sum()

    def read(self) -> RowGradients:
        replicas, ops, stream = self._replicas, self._device.ops(), self._device.stream
        counts, dims = replicas.counts, replicas.dims
        total = self._sum.buffer
        self._sum.gather(total)
        bitmap = self._device.new(self._words, torch.int64)
        ops.mark_touched(total, self._groups, counts, dims, bitmap, stream)
        all_rows = len(self._slots)
        slots, groups = ops.unite_replicas([bitmap], replicas.slots, counts, dims, all_rows, stream)
        touched = self._device.new(len(total), torch.float32)
        ops.aggregate_rows(
            self._slots,
            self._groups,
            total,
            range(len(counts)),
            counts,
            slots,
            groups,
            dims,
            touched,
            stream,
        )
        return RowGradients(slots, groups, touched)
