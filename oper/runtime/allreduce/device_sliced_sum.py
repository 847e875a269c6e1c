"""The sum over all ranks of buffers of equal size on the ranks' devices, bit-equal on all of them.

The sums are those of the processor (sliced_sum.py), bit by bit, with two differences. Buffers have
a gap before each bucket, whose gradients begin at a line, and only the devices know how many
gradients there are. And no rank has the whole sum for others to read: a rank sums its slice in its
own buffer, where nobody else reads that slice, and all ranks gather the slices once they have
`reduced`, so that all links carry the same bytes.

A rank's memory that the others read:

    float32  [values]  its gradients of replicas, and its slice of the sum; replaced where it must
                       grow (growing_segments.py)
"""

import itertools
from collections.abc import Iterator
from functools import partial

import torch

from oper.cost.step_memory import LINE_VALUES, most_values, with_slack
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.allreduce.sliced_sum import SumOverNodes, bytes_read, slice_cuts
from oper.runtime.comm.growing_segments import GrowingSegments
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, DeviceSegment
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.gradient_mailbox import GRADIENTS
from oper.runtime.memory.step_room import device_segment
from oper.runtime.tables.row_gradients import RowGradients


class DeviceSlicedSum:
    """The buffers of the ranks of a node. In a step call `begin`, `write`, `sum` once all ranks
    have written, and `gather` once all have summed."""

    def __init__(self, node: Node, proxies: Proxies, device: Cuda, replicas: Replicas) -> None:
        self._device, self._replicas, self._node = device, replicas, node
        self._peers, self._rank = node.peers, node.peers.index(node.rank)
        self._dims = torch.tensor(replicas.dims, device=device.torch_device)
        sizes = (n * dim for n, dim in zip(replicas.counts, replicas.dims, strict=True))
        self.most_values = sum(-(-size // LINE_VALUES) * LINE_VALUES for size in sizes)
        self._segments = GrowingSegments(
            node, partial(device_segment, device, GRADIENTS), LINE_BYTES
        )
        self._over_nodes = None
        if proxies.proxies:
            self._over_nodes = SumOverNodes(node, proxies, replicas.node_sum, device)
        # Of this step's sum over nodes, which the host must know: where each bucket begins in a
        # buffer, where it ends in the sum, and its size; and where slices begin.
        self._buckets: list[tuple[int, int, int]] = []
        self._cuts: list[int] = []
        self._values = 0  # in this step's sum
        self._groups: torch.Tensor
        self._buffers: list[torch.Tensor] = []
        self.read_bytes = torch.zeros(1, dtype=torch.int64, device=device.torch_device)

    @property
    def shared_bytes(self) -> int:
        return self._segments.mine.reserve_bytes

    @property
    def segments(self) -> list[DeviceSegment]:
        """The memory of all ranks that gradients are written to now."""
        return self._segments.known

    @property
    def most_rows(self) -> int:
        """How many replicas all ranks have room for the gradients of."""
        dims = self._replicas.dims
        values = min(segment.reserve_bytes for segment in self.segments) // 4
        return (values - most_values(0, dims)) // max(dims)

    def begin(self, read_bytes: int = 0) -> None:
        """Begin a step, which has read so many bytes that others wrote."""
        self.read_bytes = self._dims.new_full((1,), read_bytes)

    def write(
        self, sums: RowGradients, slots: torch.Tensor, groups: torch.Tensor, values: int
    ) -> None:
        """Write this rank's gradients of these replicas, a bucket each group, to its buffer, which
        has so many values on all ranks."""
        if 4 * values > self._segments.mine.reserve_bytes:
            self._segments.grow(min(4 * self.most_values, with_slack(4 * values)))
        self._values, self._groups = values, groups
        self._device.ops().aggregate_rows(
            sums.slots,
            sums.groups,
            sums.values,
            self._replicas.groups,
            self._replicas.counts,
            slots,
            groups,
            self._replicas.dims,
            self.buffer,
            self._device.stream,
        )

    @property
    def buffer(self) -> torch.Tensor:
        """This rank's, as long as the sum."""
        return self._buffer(self._segments.mine)

    def _buffer(self, segment: DeviceSegment) -> torch.Tensor:
        return segment.tensor(0, [self._values], torch.float32)

    def sum(self) -> None:
        """Sum this rank's slice, and add to `read_bytes` the bytes of others that this and
        `gather` read."""
        segments = {peer: self._segments.of(peer) for peer in self._peers}
        if self._device.capture is not None:
            for peer, segment in segments.items():
                self._device.capture.check(partial(self._segments.check_same, peer, segment))
        self._buffers = [self._buffer(segment) for segment in segments.values()]
        if self._over_nodes is not None:
            self._sum_over_nodes(self._over_nodes)
            return
        self._device.ops().sum_slice(
            self._buffers,
            self._groups,
            self._dims,
            self._rank,
            self._buffers[self._rank],
            self.read_bytes,
            self._device.stream,
        )

    def gather(self, total: torch.Tensor) -> None:
        """Copy all slices of the sum to `total`, which may be this rank's buffer: the slices that
        others read there are left as they are."""
        # Kept no longer than needed: ranks may replace them in the next step.
        buffers, groups = self._buffers, self._groups
        self._buffers = []
        del self._groups
        if self._over_nodes is None:
            self._device.ops().gather_slices(buffers, groups, total, self._device.stream)
            return
        for peer, buffer in zip(self._peers, buffers, strict=True):
            if buffer.data_ptr() == total.data_ptr():
                continue
            for of_buffer, _ in self._brought(self._over_nodes, peer):
                total[of_buffer] = buffer[of_buffer]

    def _sum_over_nodes(self, over_nodes: SumOverNodes) -> None:
        """Sum this rank's slice over all nodes, and put what it brings to its node into its own
        buffer, where nobody else reads these slices. Slices are those of the processor, whose
        buffers have no gaps before buckets."""
        rows, begins = self._groups.cpu()
        sizes = (rows.diff() * torch.tensor(self._replicas.dims)).tolist()
        self._buckets = [*zip(begins.tolist(), itertools.accumulate(sizes), sizes, strict=False)]
        size = sum(sizes)
        self._cuts = slice_cuts(size, self._node.ranks)
        if size == 0:
            return
        total, mine = self._device.new(size, torch.float32), self._node.rank
        written = over_nodes.sum(self._sum_node, self._cuts, total)
        written += self._cuts[mine + 1] - self._cuts[mine]
        for of_buffer, of_sum in self._brought(over_nodes, mine):
            self._buffers[self._rank][of_buffer] = total[of_sum]
        self.read_bytes += bytes_read(len(self._peers), size, written)

    def _sum_node(self, first: int, last: int, out: torch.Tensor) -> None:
        """Write this node's sum of some values to `out`."""
        for of_buffer, of_sum in self._places(first, last):
            into = out[of_sum.start - first : of_sum.stop - first]
            parts = [buffer[of_buffer] for buffer in self._buffers]
            self._device.ops().sum_buffers(parts, into, self._device.stream)

    def _brought(self, over_nodes: SumOverNodes, rank: int) -> Iterator[tuple[slice, slice]]:
        """The slices that a rank brings to this node, as `_places` has them."""
        for of in over_nodes.brought(rank):
            yield from self._places(self._cuts[of], self._cuts[of + 1])

    def _places(self, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """Values [first, last) of the sum, bucket by bucket: where they lie in a buffer, which has
        gaps before buckets, and in the sum, which has none."""
        for begin, end, size in self._buckets:
            low, high = max(first, end - size), min(last, end)
            if low < high:
                shift = begin - (end - size)
                yield slice(low + shift, high + shift), slice(low, high)
