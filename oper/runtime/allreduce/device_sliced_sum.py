"""The sum over all ranks of buffers of equal size on the ranks' devices, bit-equal on all of them.

The sums have the bits of the processor's (sliced_sum.py). Buffers differ: they have a gap before
each bucket, whose gradients begin at a line, and only the devices know the number of gradients. No
rank has the whole sum for others to read: a rank sums its slice in its own buffer, in which nobody
else reads that slice, and all ranks gather the slices once they have `reduced`, so that all links
carry the same bytes.

Memory of a rank that the others read:

    float32  [values]  its gradients of replicas, and its slice of the sum; replaced when it must
                       grow (gradient_segments.py)
"""

import itertools
from collections.abc import Iterator

import torch

from oper.cost.step_memory import LINE_VALUES, most_values, with_slack
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.allreduce.sliced_sum import SumOverNodes, bytes_read, slice_cuts
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, DeviceSegment
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.gradient_segments import GradientSegments
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
        self.segments = GradientSegments(node, device, LINE_BYTES)
        self._over_nodes = None
        if proxies.proxies:
            self._over_nodes = SumOverNodes(node, proxies, replicas.node_sum, device)
        # The host must know of a step's sum over nodes: the place at which each bucket begins in a
        # buffer, the place at which it ends in the sum, and its size; and the slices' first places.
        self._buckets: list[tuple[int, int, int]] = []
        self._cuts: list[int] = []
        self._values = 0  # in this step's sum
        self._groups: torch.Tensor
        self._buffers: list[torch.Tensor] = []
        self.read_bytes = torch.zeros(1, dtype=torch.int64, device=device.torch_device)

    @property
    def most_rows(self) -> int:
        """The number of replicas whose gradients fit into the buffers of all ranks."""
        dims = self._replicas.dims
        values = min(segment.reserve_bytes for segment in self.segments.known) // 4
        return (values - most_values(0, dims)) // max(dims)

    def begin(self, read_bytes: int = 0) -> None:
        """Begin a step that has read so many bytes that others wrote."""
        self.read_bytes = self._dims.new_full((1,), read_bytes)

    def write(
        self, sums: RowGradients, slots: torch.Tensor, groups: torch.Tensor, values: int
    ) -> None:
        """Write this rank's gradients of these replicas, one group per bucket, to its buffer, which
        has `values` values on all ranks."""
        if 4 * values > self.segments.bytes:
            self.segments.grow(min(4 * self.most_values, with_slack(4 * values)))
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
        """The buffer of this rank, as long as the sum."""
        return self._buffer(self.segments.mine)

    def _buffer(self, segment: DeviceSegment) -> torch.Tensor:
        return segment.tensor(0, [self._values], torch.float32)

    def sum(self) -> None:
        """Sum this rank's slice, and add the bytes of other ranks that `sum` and `gather` read to
        `read_bytes`."""
        self._buffers = [self._buffer(self.segments.of_step(peer)) for peer in self._peers]
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
        others read in it stay as they are."""
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
        """Sum this rank's slice over all nodes, and copy the slices that it brings to its node into
        its own buffer, in which nobody else reads them. Slices have the processor's places, whose
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
        """Return the slices that a rank brings to this node, as `_places` does."""
        for of in over_nodes.brought(rank):
            yield from self._places(self._cuts[of], self._cuts[of + 1])

    def _places(self, first: int, last: int) -> Iterator[tuple[slice, slice]]:
        """Return the places of values [first, last) of the sum, bucket by bucket: in a buffer,
        which has gaps before buckets, and in the sum, which has none."""
        for begin, end, size in self._buckets:
            low, high = max(first, end - size), min(last, end)
            if low < high:
                shift = begin - (end - size)
                yield slice(low + shift, high + shift), slice(low, high)
