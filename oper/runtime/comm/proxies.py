"""Partners: who speaks for whom between nodes, and the messages they send each other.

Ranks of one node share memory; what other nodes need of it travels once a node, and all ranks of
the node carry a part. In each other node a rank has one PARTNER: the one at its own position in
its node, counted round where that node is smaller. The ranks of other nodes whose partner a rank
is are its WARDS: it sends them what its node has for them, and takes in what they have for its
node. So the ranks of nodes of equal size talk in columns, and ranks that are nodes of their own
all talk to each other.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from oper.runtime.comm.node import Node


class Proxies:
    """The partners and wards of this rank, ascending; none where the group is one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        firsts = [node.peers[0]] * node.ranks
        if node.group is not None and node.ranks > len(node.peers):
            own = node.peers[0].to_bytes(8)
            told = node.group.gather(own, "say which node it is of")
            firsts = [int.from_bytes(first) for first in told]
        self.nodes = [
            tuple(r for r in range(node.ranks) if firsts[r] == f) for f in sorted({*firsts})
        ]
        self.partners = tuple(
            partner_in(members, self._position(node.rank))
            for members in self.nodes
            if node.rank not in members
        )
        self.wards = self.wards_of(node.rank)
        self.received_bytes = 0  # over the network, since it was last set to 0

    def wards_of(self, rank: int) -> tuple[int, ...]:
        """The wards of a rank of this node."""
        return tuple(
            r
            for r in range(self._node.ranks)
            if r not in self._node.peers and partner_in(self._node.peers, self._position(r)) == rank
        )

    def exchange(
        self,
        parts: Mapping[int, torch.Tensor],
        sizes: Mapping[int, int],
        dtype: torch.dtype,
        doing: str,
    ) -> dict[int, torch.Tensor]:
        """Send each rank its part, one-dimensional and of one `dtype`, and receive `sizes` elements
        from each rank named there. All ranks of the group call this together; `doing` says in
        errors what they were waited for.
        """
        ranks = range(self._node.ranks)
        incoming_sizes = [sizes.get(r, 0) for r in ranks]
        outgoing = torch.cat([torch.empty(0, dtype=dtype), *(parts[r] for r in sorted(parts))])
        incoming = outgoing.new_empty(sum(incoming_sizes))
        outgoing_sizes = [len(parts[r]) if r in parts else 0 for r in ranks]
        assert self._node.group is not None
        self._node.group.run(
            dist.all_to_all_single,
            incoming,
            outgoing,
            incoming_sizes,
            outgoing_sizes,
            doing=doing,
        )
        self.received_bytes += incoming.nbytes
        received = incoming.split(incoming_sizes)
        return {r: received[r] for r in sizes}

    def _position(self, rank: int) -> int:
        return next(members.index(rank) for members in self.nodes if rank in members)


def partner_in(members: tuple[int, ...], position: int) -> int:
    """The partner, among a node's members, of the rank at a position of another node."""
    return members[position % len(members)]
