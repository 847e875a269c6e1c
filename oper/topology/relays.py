"""The ranks as distinct fetches between nodes see them: a row crosses to a node once.

A row that several ranks of a node need, and that lies in another, is read by one of them, its
relay there: the rank at the owner's position in its node (`Topology.proxy`). The relay p of node n
asks the owner j once for each distinct row that any rank of n needs, and the other ranks of n read
it from p. In training the ranks' summed gradients of the row go to p, which adds them up and sends
one to j. In a node rows are read from their holders there.

So there are two weights of a row: D, the chance that one rank touches it, and D of the node, the
chance that any of its ranks does (oper/cost/expected_reads.py). Who pays is in
oper/cost/read_charges.py.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from oper.base.arrays import Ints
from oper.topology.topology import Topology
from oper.topology.transports import COLLECTIVE


@dataclass(frozen=True, eq=False)
class RelayedTopology(Topology):
    """A topology on several nodes, some of several ranks, in which relays read rows of others."""

    @property
    def relay(self) -> Ints:
        """The rank that reads a row from its source for the reader, [reader, source]: in the node
        of the source the reader itself."""
        own = np.arange(self.ranks)[:, None]
        return np.where(self.masks()["other_node"], self.proxy.T, own)

    @property
    def sizes(self) -> Ints:
        """The ranks of each rank's node, [M]."""
        node_of = np.array(self.node_of)
        return np.bincount(node_of)[node_of]

    @property
    def most_peers(self) -> int:
        """The ranks of other nodes that a rank exchanges rows with, at the most: those it is the
        relay for and those that are its own; one of each other node, where all have one size."""
        asks = self.masks()["other_node"] & (self.relay == np.arange(self.ranks)[:, None])
        return int((asks | asks.T).sum(axis=1).max())

    @property
    def direct(self) -> Topology:
        """The topology without relays."""
        return Topology(**self.content)


@lru_cache(maxsize=4)
def relayed(topology: Topology, distinct: bool) -> Topology:
    """The topology as the rows of a workload see it: with relays where fetches are `distinct` and
    ranks of several nodes, not all alone on theirs, send each other rows; the same object while few
    topologies are in use.

    Topologies of pooled tables and of the hosts' memory stay as they are.
    """
    several = 1 < topology.nodes < topology.ranks
    if not (distinct and several and topology.known_transport == COLLECTIVE):
        return topology
    return RelayedTopology(**topology.content) if type(topology) is Topology else topology


def relayed_sizes(topology: Topology) -> tuple[int, ...]:
    """The sizes of nodes in which relays read rows for others, ascending."""
    if not isinstance(topology, RelayedTopology):
        return ()
    return tuple(np.unique(topology.sizes[topology.sizes > 1]).tolist())


def without_relays(topology: Topology) -> Topology:
    """The topology without relays, if it has any."""
    return topology.direct if isinstance(topology, RelayedTopology) else topology
