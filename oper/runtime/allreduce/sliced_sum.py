"""The sum over all ranks of buffers of equal size, bit-equal on all of them."""

import itertools
from collections.abc import Callable, Sequence

import torch

from oper.cost.allreduce import NodeSum
from oper.cost.step_memory import LINE_VALUES
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment
from oper.runtime.memory.device import Cpu, Device

_ACTION = "sum replicas"


class SumOverNodes:
    """Sums of slices over all nodes, given each node's own sums. Nodes add them up in the way that
    the plan's cost assumes (oper/cost/allreduce.py):

        at_once     the slice's rank receives one sum from each node, adds these in the order of the
                    nodes, and sends the result back to one rank in each
        in_rounds   a rank talks to one other in each of 2·⌈log2 N⌉ rounds, by Träff's circulant
                    algorithm (arXiv 2410.14234): with N nodes as many bytes, for any N
    """

    def __init__(self, node: Node, proxies: Proxies, node_sum: NodeSum, device: Device) -> None:
        self._rank, self._proxies, self._device = node.rank, proxies, device
        self._in_rounds = node_sum == "in_rounds" and len(proxies.same_position) > 0

    def sum(self, of_node: "SumOfNode", cuts: Sequence[int], total: torch.Tensor) -> int:
        """Write to `total` the slices that this rank brings to its node: its own, which it sums,
        and the slices of the ranks of other nodes with which it exchanges. Slice r is cuts[r] to
        cuts[r + 1]. Return the number of values in the slices of other nodes."""
        over_nodes = self._sum_in_rounds if self._in_rounds else self._sum_at_once
        return over_nodes(of_node, cuts, total)

    def brought(self, rank: int) -> Sequence[int]:
        """Return the ranks whose slices a rank of this node brings."""
        if not self._in_rounds:
            return (rank, *self._proxies.clients_of(rank))
        position = next(m.index(rank) for m in self._proxies.nodes if rank in m)
        return tuple(members[position] for members in self._proxies.nodes)

    def _sum_at_once(self, of_node: "SumOfNode", cuts: Sequence[int], total: torch.Tensor) -> int:
        proxies, clients = self._proxies.proxies, self._proxies.clients
        mine, dtype = total[cuts[self._rank] : cuts[self._rank + 1]], total.dtype
        sizes = {r: cuts[r + 1] - cuts[r] for r in clients}
        sums = {r: self._device.new(n, dtype) for r, n in sizes.items()}
        for r, out in sums.items():
            of_node(cuts[r], cuts[r + 1], out)
        received = self._proxies.exchange(sums, dict.fromkeys(proxies, len(mine)), dtype, _ACTION)
        received[self._rank] = own = self._device.new(len(mine), dtype)
        of_node(cuts[self._rank], cuts[self._rank + 1], own)
        in_order = [
            received[r] for members in self._proxies.nodes for r in members if r in received
        ]
        self._device.ops().sum_buffers(in_order, mine, self._device.stream)
        received = self._proxies.exchange(dict.fromkeys(proxies, mine), sizes, dtype, _ACTION)
        for r, part in received.items():
            total[cuts[r] : cuts[r + 1]] = part
        return sum(sizes.values())

    def _sum_in_rounds(self, of_node: "SumOfNode", cuts: Sequence[int], total: torch.Tensor) -> int:
        """Sum as `_sum_at_once` does, exchanging with one other rank at a time.

        With N nodes, slice k is here the slice of the rank k nodes further on. A rank sends the
        node sums of the farther half of its slices to the rank that is as far away as the first of
        them, which adds them to its own nearer half, until each rank has its whole own slice; then
        the slices go back the same way.
        """
        ranks = self._proxies.same_position
        ends = [0, *itertools.accumulate(cuts[r + 1] - cuts[r] for r in ranks)]
        slices = self._device.new(ends[-1], total.dtype)
        for k, rank in enumerate(ranks):
            of_node(cuts[rank], cuts[rank + 1], slices[ends[k] : ends[k + 1]])
        halves = _halvings(len(ranks))
        for end, begin in halves:
            theirs = self._swap(slices[ends[begin] : ends[end]], begin, ends[end - begin])
            slices[: len(theirs)] += theirs
        for end, begin in reversed(halves):
            sent = slices[: ends[end - begin]]
            slices[ends[begin] : ends[end]] = self._swap(sent, -begin, ends[end] - ends[begin])
        for k, rank in enumerate(ranks):
            total[cuts[rank] : cuts[rank + 1]] = slices[ends[k] : ends[k + 1]]
        return ends[-1] - ends[1]

    def _swap(self, sent: torch.Tensor, distance: int, size: int) -> torch.Tensor:
        """Send values to the rank `distance` nodes further on, and return `size` values from the
        rank as far back."""
        ranks = self._proxies.same_position
        to, source = ranks[distance], ranks[-distance]
        return self._proxies.exchange({to: sent}, {source: size}, sent.dtype, _ACTION)[source]


# Writes this node's sum of values [first, last) of all buffers.
SumOfNode = Callable[[int, int, torch.Tensor], None]


class SlicedSum:
    """The sum over all ranks of buffers of equal size, bit-equal on all of them.

    The buffer is cut into one slice a rank. Over shared memory a rank adds up its slice of all
    ranks' buffers, in the order of ranks, into one buffer that all ranks of the node read. That
    moves as many bytes as a ring AllReduce, 2(P - 1)/P of the buffer for each of P ranks, in one
    hop instead of 2(P - 1). Between nodes, SumOverNodes.

    Call `buffer(n)` and write there; when all ranks of the node have, `sum(n)`; when all have,
    `total(n)`. Buffers are float32, of up to `most` elements, after `header_bytes` that are the
    caller's own.
    """

    def __init__(
        self, node: Node, proxies: Proxies, header_bytes: int, most: int, node_sum: NodeSum
    ) -> None:
        self._node, self._most, self._device = node, most, Cpu()
        self._start = -(-header_bytes // (4 * LINE_VALUES)) * 4 * LINE_VALUES
        own = Segment.create(self._start, self._start + 4 * most, "replicas")
        self._segments = node.share(own)
        self._total_segment = node.share_first(Segment.create(0, 4 * most, "replicas-sum"))
        self._over_nodes = None
        if proxies.proxies:
            self._over_nodes = SumOverNodes(node, proxies, node_sum, self._device)
        self._capacity = 0
        self._buffers: list[torch.Tensor] = []
        self._total = torch.empty(0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that this rank allocated and all ranks use."""
        total = self._total_segment.bytes if self._node.rank == self._node.peers[0] else 0
        return self._segments[self._node.rank].bytes + total

    def headers(self, shape: list[int], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """Return the header of every rank of the node."""
        return {peer: s.tensor(0, shape, dtype) for peer, s in self._segments.items()}

    def buffer(self, size: int) -> torch.Tensor:
        """Return the buffer for this rank's `size` elements, the same number on all ranks."""
        if size > self._capacity:
            # Every rank of the node computes the same capacity, and touches memory that others
            # have grown only after their signal.
            self._capacity = min(size + size // 4, self._most)
            self._segments[self._node.rank].grow(self._start + 4 * self._capacity)
            if self._node.rank == self._node.peers[0]:
                self._total_segment.grow(4 * self._capacity)
            self._buffers = []
        return self._segments[self._node.rank].tensor(self._start, (size,), torch.float32)

    def sum(self, size: int) -> int:
        """Sum this rank's slice. Return the bytes written by other ranks of the node that this rank
        reads in this step, `total` included."""
        if not self._buffers:
            shape = (self._capacity,)
            self._buffers = [
                s.tensor(self._start, shape, torch.float32) for s in self._segments.values()
            ]
            self._total = self._total_segment.tensor(0, shape, torch.float32)
        if size == 0:
            return 0
        cuts, rank = slice_cuts(size, self._node.ranks), self._node.rank
        written = cuts[rank + 1] - cuts[rank]
        if self._over_nodes is None:
            self._sum_node(cuts[rank], cuts[rank + 1], self._total[cuts[rank] : cuts[rank + 1]])
        else:
            written += self._over_nodes.sum(self._sum_node, cuts, self._total)
        return bytes_read(len(self._buffers), size, written)

    def total(self, size: int) -> torch.Tensor:
        """Return the sum, valid until the next one is written."""
        return self._total[:size]

    def _sum_node(self, first: int, last: int, out: torch.Tensor) -> None:
        """Write this node's sum of values [first, last) to `out`."""
        parts = [buffer[first:last] for buffer in self._buffers]
        self._device.ops().sum_buffers(parts, out, self._device.stream)


def slice_cuts(size: int, ranks: int) -> list[int]:
    """Return the starts of the ranks' slices of `size` values, and the end of the last slice.
    Slices begin at cache lines: otherwise two ranks would write to one line."""
    step = -(-size // (LINE_VALUES * ranks)) * LINE_VALUES
    return [min(step * r, size) for r in range(ranks + 1)]


def bytes_read(peers: int, size: int, written: int) -> int:
    """Return the bytes written by other ranks of its node that a rank reads, if the rank itself
    writes `written` of the sum's `size` values."""
    return 4 * ((peers - 1) * written + size - written)


def _halvings(nodes: int) -> list[tuple[int, int]]:
    """Return the size before and after each halving of `nodes` slices down to one; the nearer half
    is kept, the larger if they differ."""
    halvings = []
    while nodes > 1:
        halvings.append((nodes, -(-nodes // 2)))
        nodes = halvings[-1][1]
    return halvings
