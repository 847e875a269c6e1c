"""Proxies: the pairs of ranks of different nodes that exchange data, and the exchange.

Ranks of one node share memory; data for other nodes is sent once for the whole node, and the ranks
of the node divide that work. In each other node a rank has one PROXY: the rank at its own position
among the ranks of that node, modulo their number. The CLIENTS of a rank are the ranks of other
nodes whose proxy it is: it sends them its node's data for them, and receives their data for its
node. So rank i of a node talks to rank i of each other node of equal size, and ranks that are nodes
of their own all talk to each other.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from oper.runtime.comm.node import Node
from oper.runtime.memory.device import Cpu, Device


class Proxies:
    """The proxies of this rank, in the order of their nodes, and its clients, ascending; none if
    the group is one node."""

    def __init__(self, node: Node, device: Device | None = None) -> None:
        """`device`: the place of received data, the CPU unless given."""
        self._node, self._device = node, device or Cpu()
        self.rank = node.rank
        firsts = [node.peers[0]] * node.ranks
        if node.group is not None and node.ranks > len(node.peers):
            own = node.peers[0].to_bytes(8)
            gathered = node.group.gather(own, "say which node it is of")
            firsts = [int.from_bytes(first) for first in gathered]
        self.nodes = [
            tuple(r for r in range(node.ranks) if firsts[r] == f) for f in sorted({*firsts})
        ]
        self.proxies = tuple(
            proxy_in(members, self._position(node.rank))
            for members in self.nodes
            if node.rank not in members
        )
        self.clients = self.clients_of(node.rank)
        # If nodes are of equal size, this rank and those at its position in the nodes after its
        # own, in a circle; else none.
        self.same_position: tuple[int, ...] = ()
        if len({len(members) for members in self.nodes}) == 1:
            here = next(n for n, members in enumerate(self.nodes) if node.rank in members)
            circle = self.nodes[here:] + self.nodes[:here]
            self.same_position = tuple(m[self._position(node.rank)] for m in circle)
        self.received_bytes = 0  # over the network, since it was last set to 0

    def clients_of(self, rank: int) -> tuple[int, ...]:
        """Return the clients of a rank of this node."""
        return tuple(
            r
            for r in range(self._node.ranks)
            if r not in self._node.peers and proxy_in(self._node.peers, self._position(r)) == rank
        )

    def exchange(
        self,
        parts: Mapping[int, torch.Tensor],
        sizes: Mapping[int, int],
        dtype: torch.dtype,
        action: str,
    ) -> dict[int, torch.Tensor]:
        """Send each rank its part, one-dimensional and of one `dtype`, and receive `sizes` elements
        from each rank named there. All ranks of the group call this together; `action` completes
        "rank 0 waited for rank 2 to …" in errors."""
        incoming = self._device.new(sum(sizes.values()), dtype)
        return self.exchange_into(incoming, parts, sizes, action)

    def exchange_into(
        self,
        incoming: torch.Tensor,
        parts: Mapping[int, torch.Tensor],
        sizes: Mapping[int, int],
        action: str,
    ) -> dict[int, torch.Tensor]:
        """Exchange as `exchange` does, but receive into `incoming`, in the order of ranks."""
        whole = [parts[r] for r in sorted(parts)]
        if len(whole) != 1:
            whole = [torch.cat([incoming[:0], *whole])]
        outgoing_sizes = {rank: len(part) for rank, part in parts.items()}
        return self.start(whole[0], outgoing_sizes, incoming, sizes, action)()

    def start(
        self,
        outgoing: torch.Tensor,
        outgoing_sizes: Mapping[int, int],
        incoming: torch.Tensor,
        sizes: Mapping[int, int],
        action: str,
    ) -> Callable[[], dict[int, torch.Tensor]]:
        """Begin an `exchange` of parts that lie one after the other in `outgoing`, in the order of
        ranks; received parts come into `incoming` in the same order. Return a function that waits
        for them and returns them by rank; it must be called."""
        ranks = range(self._node.ranks)
        incoming_sizes = [sizes.get(r, 0) for r in ranks]
        assert self._node.group is not None
        finish = self._node.group.start(
            dist.all_to_all_single,
            incoming,
            outgoing,
            incoming_sizes,
            [outgoing_sizes.get(r, 0) for r in ranks],
            action=action,
        )
        self.received_bytes += incoming.nbytes

        def received() -> dict[int, torch.Tensor]:
            finish()
            of_ranks = incoming.split(incoming_sizes)
            return {r: of_ranks[r] for r in sizes}

        return received

    def _position(self, rank: int) -> int:
        return next(members.index(rank) for members in self.nodes if rank in members)


def proxy_in(members: tuple[int, ...], position: int) -> int:
    """Return the proxy, among a node's members, of the rank at a position of another node."""
    return members[position % len(members)]
