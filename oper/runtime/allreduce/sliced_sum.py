"""The sum over all ranks of buffers of equal size, bit-equal on all of them."""

import itertools

import torch

from oper.base import native
from oper.cost.allreduce import NodeSum
from oper.cost.step_memory import LINE_VALUES
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment

_ACTION = "sum replicas"


class SlicedSum:
    """The sum over all ranks of buffers of equal size, bit-equal on all of them.

    The buffer is cut into one slice a rank. Over shared memory a rank adds up its slice of all
    ranks' buffers, in the order of ranks, into one buffer that all ranks of the node read. That
    moves as many bytes as a ring AllReduce, 2(P - 1)/P of the buffer for each of P ranks, in one
    hop instead of 2(P - 1). Between nodes (proxies.py), as the plan's cost has it (oper/cost/
    allreduce.py):

        at_once     the slice's rank receives one sum from each node, adds these in the order of the
                    nodes, and sends the result back to one rank in each
        in_rounds   a rank talks to one other in each of 2·⌈log2 N⌉ rounds, by Träff's circulant
                    algorithm (arXiv 2410.14234): with N nodes as many bytes, for any N

    Call `buffer(n)` and write there; when all ranks of the node have, `sum(n)`; when all have,
    `total(n)`. Buffers are float32, of up to `most` elements, after `header_bytes` that are the
    caller's own.
    """

    def __init__(
        self, node: Node, proxies: Proxies, header_bytes: int, most: int, node_sum: NodeSum
    ) -> None:
        self._node, self._proxies, self._most = node, proxies, most
        self._start = -(-header_bytes // (4 * LINE_VALUES)) * 4 * LINE_VALUES
        own = Segment.create(self._start, self._start + 4 * most, "replicas")
        self._segments = node.share(own)
        self._total_segment = node.share_first(Segment.create(0, 4 * most, "replicas-sum"))
        self._in_rounds = node_sum == "in_rounds" and len(proxies.same_position) > 0
        self._capacity = 0
        self._buffers: list[torch.Tensor] = []
        self._total = torch.empty(0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the shared memory that this rank brought and all use."""
        total = self._total_segment.bytes if self._node.rank == self._node.peers[0] else 0
        return self._segments[self._node.rank].bytes + total

    def headers(self, shape: list[int], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """The header of every rank of the node."""
        return {peer: s.tensor(0, shape, dtype) for peer, s in self._segments.items()}

    def buffer(self, size: int) -> torch.Tensor:
        """Where this rank writes its `size` elements, the same number on all ranks."""
        if size > self._capacity:
            # Every rank of the node computes the same capacity, and touches what others have grown
            # after they have signalled that.
            self._capacity = min(size + size // 4, self._most)
            self._segments[self._node.rank].grow(self._start + 4 * self._capacity)
            if self._node.rank == self._node.peers[0]:
                self._total_segment.grow(4 * self._capacity)
            self._buffers = []
        return self._segments[self._node.rank].tensor(self._start, (size,), torch.float32)

    def sum(self, size: int) -> int:
        """Sum this rank's slice. Returns the bytes read here, by the time the total is, that others
        of the node wrote."""
        if not self._buffers:
            shape = (self._capacity,)
            self._buffers = [
                s.tensor(self._start, shape, torch.float32) for s in self._segments.values()
            ]
            self._total = self._total_segment.tensor(0, shape, torch.float32)
        if size == 0:
            return 0
        # Slices begin at lines: else two ranks would write to one.
        step = -(-size // (LINE_VALUES * self._node.ranks)) * LINE_VALUES
        cuts = [min(step * r, size) for r in range(self._node.ranks + 1)]
        mine = self._total[cuts[self._node.rank] : cuts[self._node.rank + 1]]
        written = len(mine)
        if not self._proxies.proxies:
            self._sum_node(cuts, self._node.rank, mine)
        else:
            over_nodes = self._sum_in_rounds if self._in_rounds else self._sum_at_once
            written += over_nodes(cuts, mine)
        others = len(self._buffers) - 1
        return 4 * (others * written + size - written)

    def total(self, size: int) -> torch.Tensor:
        """The sum, until the next one is written."""
        return self._total[:size]

    def _sum_node(self, cuts: list[int], rank: int, out: torch.Tensor) -> None:
        """This node's sum of the slice of a rank."""
        first, last = cuts[rank], cuts[rank + 1]
        native.ops().sum_buffers([buffer[first:last] for buffer in self._buffers], out)

    def _sum_at_once(self, cuts: list[int], mine: torch.Tensor) -> int:
        """Sum this rank's slice over all nodes, and its clients' slices over this node; returns the
        size of the latter."""
        proxies, clients = self._proxies.proxies, self._proxies.clients
        sizes = {r: cuts[r + 1] - cuts[r] for r in clients}
        sums = {r: torch.empty(n) for r, n in sizes.items()}
        for r, out in sums.items():
            self._sum_node(cuts, r, out)
        received = self._proxies.exchange(
            sums, dict.fromkeys(proxies, len(mine)), mine.dtype, _ACTION
        )
        received[self._node.rank] = torch.empty(len(mine))
        self._sum_node(cuts, self._node.rank, received[self._node.rank])
        in_order = [
            received[r] for members in self._proxies.nodes for r in members if r in received
        ]
        native.ops().sum_buffers(in_order, mine)
        received = self._proxies.exchange(dict.fromkeys(proxies, mine), sizes, mine.dtype, _ACTION)
        for r, part in received.items():
            self._total[cuts[r] : cuts[r + 1]] = part
        return sum(sizes.values())

    def _sum_in_rounds(self, cuts: list[int], mine: torch.Tensor) -> int:
        """What `_sum_at_once` does, with one other rank at a time.

        With N nodes, slice k is here that of the rank k nodes further on. A rank sends the node
        sums of the farther half of its slices to the rank as far away as the first of them, which
        adds them to its own nearer half, until each has all of its own slice; then the same way
        back.
        """
        ranks = self._proxies.same_position
        ends = [0, *itertools.accumulate(cuts[r + 1] - cuts[r] for r in ranks)]
        slices = torch.empty(ends[-1])
        for k, rank in enumerate(ranks):
            self._sum_node(cuts, rank, slices[ends[k] : ends[k + 1]])
        halves = _halvings(len(ranks))
        for end, begin in halves:
            theirs = self._swap(slices[ends[begin] : ends[end]], begin, ends[end - begin])
            slices[: len(theirs)] += theirs
        for end, begin in reversed(halves):
            sent = slices[: ends[end - begin]]
            slices[ends[begin] : ends[end]] = self._swap(sent, -begin, ends[end] - ends[begin])
        mine.copy_(slices[: len(mine)])
        for k, rank in enumerate(ranks):
            self._total[cuts[rank] : cuts[rank + 1]] = slices[ends[k] : ends[k + 1]]
        return ends[-1] - len(mine)

    def _swap(self, sent: torch.Tensor, distance: int, size: int) -> torch.Tensor:
        """Send values to the rank so many nodes further on, and receive `size` of the one as far
        back."""
        ranks = self._proxies.same_position
        to, source = ranks[distance], ranks[-distance]
        return self._proxies.exchange({to: sent}, {source: size}, sent.dtype, _ACTION)[source]


def _halvings(nodes: int) -> list[tuple[int, int]]:
    """From so many slices to one, each time keeping the nearer half, of the larger size: how many
    there are, and how many are kept."""
    found = []
    while nodes > 1:
        found.append((nodes, -(-nodes // 2)))
        nodes = found[-1][1]
    return found
