"""The bitmap method on devices (OPER §5.3).

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

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from oper.base.errors import OperError
from oper.cost.step_memory import LINE_VALUES, most_values, with_slack
from oper.runtime.allreduce.methods import Replicas
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.allreduce.sliced_sum import SumOverNodes, bytes_read, slice_cuts
from oper.runtime.comm.growing_segments import GrowingSegments
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, DeviceSegment, Segment, aligned
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.gradient_mailbox import GRADIENTS
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.memory.step_room import device_segment
from oper.runtime.tables.row_gradients import RowGradients


class DeviceBitmap:
    """A gradient of every replica that any rank touched, on the ranks' devices."""

    def __init__(self, node: Node, proxies: Proxies, device: Cuda, replicas: Replicas) -> None:
        on = device.torch_device
        self._device, self._rank = device, node.peers.index(node.rank)
        self._replicas = replace(replicas, slots=[slots.to(on) for slots in replicas.slots])
        self._dims = torch.tensor(replicas.dims, device=on)
        words = sum(-(-count // 64) for count in replicas.counts)
        sizes = (n * dim for n, dim in zip(replicas.counts, replicas.dims, strict=True))
        values = sum(-(-size // LINE_VALUES) * LINE_VALUES for size in sizes)
        self._most_values = values
        bitmaps = node.share(device.segment(aligned(8 * words), aligned(8 * words)))
        self._bitmaps = [s.tensor(0, [words], torch.int64) for s in bitmaps.values()]
        self._bitmap_bytes = bitmaps[node.rank].reserve_bytes
        self._segments = GrowingSegments(
            node, partial(device_segment, device, GRADIENTS), LINE_BYTES
        )
        self._peers, self._node, self._proxies = node.peers, node, proxies
        self._over_nodes = None
        if proxies.proxies:
            self._over_nodes = SumOverNodes(node, proxies, replicas.node_sum, device)
        # Of this step's sum over nodes, which the host must know: where each bucket begins in a
        # buffer, where it ends in the sum, and its size; and where slices begin.
        self._buckets: list[tuple[int, int, int]] = []
        self._cuts: list[int] = []
        size = LINE_BYTES * len(node.peers)
        lines = node.share_first(Segment.create(size, size, "accesses"))
        shape = [len(node.peers), LINE_BYTES // 8]
        self._accesses = lines.tensor(0, shape, torch.int64).numpy()[:, 0]
        self._most_accesses = 0  # of all ranks in a step so far
        self._values = 0  # in this step's sum
        self._buffers: list[torch.Tensor] = []
        self.read_bytes = torch.zeros(1, dtype=torch.int64, device=on)
        self._united: tuple[torch.Tensor, torch.Tensor]  # slots and groups of touched replicas

    @property
    def shared_bytes(self) -> int:
        return self._bitmap_bytes + self._segments.mine.reserve_bytes

    @property
    def segments(self) -> list[DeviceSegment]:
        """The memory of all ranks that gradients are written to now."""
        return self._segments.known

    def mark(self, rows: SortedRows) -> None:
        self._say_accesses(len(rows.slots))
        if self._device.capture is not None:
            self._device.capture.check(partial(self._say_accesses, len(rows.slots)))
        bitmaps = sum(bitmap.nbytes for bitmap in self._bitmaps)
        self.read_bytes = self._dims.new_full((1,), bitmaps)
        self._device.ops().mark_replicas(
            rows.slots,
            rows.before,
            self._replicas.groups,
            self._replicas.slots,
            self._replicas.counts,
            self._bitmaps[self._rank],
            self._device.stream,
        )

    def _say_accesses(self, number: int) -> None:
        self._accesses[self._rank] = number

    def write(self, sums: RowGradients) -> None:
        replicas, ops, stream = self._replicas, self._device.ops(), self._device.stream
        bitmaps, accesses = self._over_all_nodes()
        most_rows = min(sum(replicas.counts), accesses)
        size = min(4 * self._most_values, aligned(4 * most_values(most_rows, replicas.dims)))
        if size > self._segments.mine.reserve_bytes:
            self._segments.grow(min(4 * self._most_values, with_slack(size)))
        self._values = size // 4
        self._united = ops.unite_replicas(
            bitmaps,
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

    def _over_all_nodes(self) -> tuple[list[torch.Tensor], int]:
        """Bitmaps in which every touched replica is marked, and how many accesses all ranks
        have."""
        accesses = int(self._accesses.sum())
        self._most_accesses = max(self._most_accesses, accesses)
        if self._device.capture is not None:
            accesses = max(self._most_accesses, self._most_rows)
            self._device.capture.check(partial(self._check_accesses, accesses))
        if self._over_nodes is None:
            return self._bitmaps, accesses
        action, proxies = "unite touched replicas", self._proxies
        known = proxies.received_bytes  # counts are not charged
        counts = proxies.exchange_into(
            torch.empty(len(proxies.proxies), dtype=torch.int64),
            dict.fromkeys(proxies.clients, torch.tensor([accesses])),
            dict.fromkeys(proxies.proxies, 1),
            action,
        )
        proxies.received_bytes = known
        of_node = functools.reduce(torch.bitwise_or, self._bitmaps)
        received = proxies.exchange(
            dict.fromkeys(proxies.clients, of_node),
            dict.fromkeys(proxies.proxies, len(of_node)),
            torch.int64,
            action,
        )
        return [of_node, *received.values()], accesses + sum(int(n) for n in counts.values())

    @property
    def _most_rows(self) -> int:
        """How many replicas all ranks have room for the gradients of."""
        dims = self._replicas.dims
        values = min(segment.reserve_bytes for segment in self.segments) // 4
        return (values - most_values(0, dims)) // max(dims)

    def _check_accesses(self, most: int) -> None:
        """OperError where all ranks' batches have more accesses than a captured step is for, and
        may touch more replicas."""
        accesses = int(self._accesses.sum())
        if min(accesses, sum(self._replicas.counts)) > most:
            raise OperError(
                f"the batches of this node's ranks have {accesses:,} accesses, and this rank's "
                f"step was captured for {most:,}: give the step of oper.graph_step the largest "
                "batches first, on all ranks"
            )

    def reduce(self) -> None:
        segments = {peer: self._segments.of(peer) for peer in self._peers}
        if self._device.capture is not None:
            for peer, segment in segments.items():
                self._device.capture.check(partial(self._segments.check_same, peer, segment))
        self._buffers = [self._buffer(segment) for segment in segments.values()]
        if self._over_nodes is not None:
            self._reduce_over_nodes(self._over_nodes)
            return
        self._device.ops().sum_slice(
            self._buffers,
            self._united[1],
            self._dims,
            self._rank,
            self._buffers[self._rank],
            self.read_bytes,
            self._device.stream,
        )

    def _reduce_over_nodes(self, over_nodes: SumOverNodes) -> None:
        """Sum this rank's slice over all nodes, and put what it brings to its node into its own
        buffer, where nobody else reads these slices. Slices are those of the processor, whose
        buffers have no gaps before buckets."""
        rows, begins = self._united[1].cpu()
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
        """This node's sum of some values."""
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

    def read(self) -> RowGradients:
        # Kept no longer than needed: the next step makes new ones, and ranks new buffers.
        (slots, groups), buffers = self._united, self._buffers
        del self._united
        self._buffers = []
        total = torch.empty(self._values, device=self._device.torch_device)
        if self._over_nodes is None:
            self._device.ops().gather_slices(buffers, groups, total, self._device.stream)
            return RowGradients(slots, groups, total)
        for peer, buffer in zip(self._peers, buffers, strict=True):
            for of_buffer, _ in self._brought(self._over_nodes, peer):
                total[of_buffer] = buffer[of_buffer]
        return RowGradients(slots, groups, total)

    def _buffer(self, segment: DeviceSegment) -> torch.Tensor:
        """A rank's gradients in this step, as long as the sum."""
        return segment.tensor(0, [self._values], torch.float32)
