"""The sum over all ranks of buffers of equal size, bit-equal on all of them (OPER §5.3).

The buffer is cut into one slice a rank. Over shared memory a rank adds up its slice of all ranks'
buffers, in the order of ranks, into one buffer that all ranks of the node read. That moves as many
bytes as a ring AllReduce, 2(P - 1)/P of the buffer for each of P ranks, in one hop instead of
2(P - 1). Between nodes (node_representatives.py) the slice's rank receives one sum from each node,
adds these in the order of the nodes, and sends the result back to one rank in each.

Call `buffer(n)` and write there; when all ranks of the node have, `sum(n)`; when all have,
`total(n)`.
"""

import torch

from oper.base import native
from oper.runtime.allreduce.node_representatives import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment

_LINE = 16  # floats: slices begin at cache lines, which two ranks would otherwise both write


class SlicedSum:
    """Float32 buffers of up to `most` elements, after `header_bytes` that are the caller's own."""

    def __init__(self, node: Node, proxies: Proxies, header_bytes: int, most: int) -> None:
        self._node, self._proxies, self._most = node, proxies, most
        self._start = -(-header_bytes // (4 * _LINE)) * 4 * _LINE
        own = Segment.create(self._start, self._start + 4 * most, "replicas")
        self._segments = node.share(own)
        # Each rank brings a segment, and all use the first one's; untouched, the others are free.
        self._total_segment = node.share(Segment.create(0, 4 * most, "replicas-sum"))[node.peers[0]]
        self._capacity = 0
        self._buffers: list[torch.Tensor] = []
        self._total = torch.empty(0)

    @property
    def shared_bytes(self) -> int:
        """Of the shared memory that this rank brought and all use."""
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
        step = -(-size // (_LINE * self._node.ranks)) * _LINE
        cuts = [min(step * r, size) for r in range(self._node.ranks + 1)]
        mine = self._total[cuts[self._node.rank] : cuts[self._node.rank + 1]]
        written = len(mine)
        if not self._proxies.proxies:
            self._sum_node(cuts, self._node.rank, mine)
        else:
            written += self._sum_nodes(cuts, mine)
        others = len(self._buffers) - 1
        return 4 * (others * written + size - written)

    def total(self, size: int) -> torch.Tensor:
        """The sum, until the next one is written."""
        return self._total[:size]

    def _sum_node(self, cuts: list[int], rank: int, out: torch.Tensor) -> None:
        """This node's sum of the slice of a rank."""
        first, last = cuts[rank], cuts[rank + 1]
        native.ops().sum_buffers([buffer[first:last] for buffer in self._buffers], out)

    def _sum_nodes(self, cuts: list[int], mine: torch.Tensor) -> int:
        """The same over all nodes, and the clients' slices; returns the size of these."""
        proxies, clients, action = self._proxies.proxies, self._proxies.clients, "sum replicas"
        sizes = {r: cuts[r + 1] - cuts[r] for r in clients}
        sums = {r: torch.empty(n) for r, n in sizes.items()}
        for r, out in sums.items():
            self._sum_node(cuts, r, out)
        received = self._proxies.exchange(
            sums, dict.fromkeys(proxies, len(mine)), mine.dtype, action
        )
        received[self._node.rank] = torch.empty(len(mine))
        self._sum_node(cuts, self._node.rank, received[self._node.rank])
        in_order = [
            received[r] for members in self._proxies.nodes for r in members if r in received
        ]
        native.ops().sum_buffers(in_order, mine)
        received = self._proxies.exchange(dict.fromkeys(proxies, mine), sizes, mine.dtype, action)
        for r, part in received.items():
            self._total[cuts[r] : cuts[r + 1]] = part
        return sum(sizes.values())
