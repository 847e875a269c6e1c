"""The dense method on devices (OPER §5.3), with the bits of the processor's sums (methods.py)."""

import torch

from oper.runtime.allreduce.device_sliced_sum import DeviceSlicedSum
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients, laid_out_on_host


class DeviceDense:
    """A gradient of every replica, touched or not, on the ranks' devices.

    Ranks sum and gather the buffers of all replicas in place. They tell the rows that any rank
    touched from padding (gradient_buffers.h) and copy them, so that updates see no other rows.
    """

    def __init__(self, node: Node, proxies: Proxies, device: Cuda, replicas: Replicas) -> None:
        self._device, on, rows = device, device.torch_device, replicas.rows
        self._replicas = replicas = replicas.on(on)
        self._slots = rows.slots.to(on)  # of all replicas, one group per bucket
        self._groups = laid_out_on_host(rows.groups[0], replicas.dims).to(on)
        self._words = sum(replicas.words)
        self._sum = DeviceSlicedSum(node, proxies, device, replicas)
        self.segments = self._sum.segments

    @property
    def read_bytes(self) -> torch.Tensor:
        return self._sum.read_bytes

    @property
    def shared_bytes(self) -> int:
        return self.segments.bytes

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
