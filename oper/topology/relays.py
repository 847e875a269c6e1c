"""Relays of distinct fetches between nodes: a row crosses to a node once.

If several ranks of a node need a row of another node, one of them reads it, the row's relay: the
rank at the owner's position in the readers' node (`Topology.proxy`). The relay p of node n requests
each distinct row that any rank of n needs once from the owner j, and the other ranks of n read it
from p. In training the ranks' summed gradients of the row go to p, which adds them up and sends one
to j. Inside a node rows are read from their holders.

So a row has two weights: D, the chance that one rank touches it, and D of the node, the chance that
any of its ranks does (oper/cost/expected_reads.py). The payers are in oper/cost/read_charges.py.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from oper.base.arrays import Ints
from oper.topology.topology import Topology
from oper.topology.transports import COLLECTIVE


@dataclass(frozen=True, eq=False)
class RelayedTopology(Topology):
    """Topology on several nodes, some of several ranks, in which relays read rows of other
    nodes."""

    @property
    def relay(self) -> Ints:
        """Rank that reads a row from its source for the reader, [reader, source]: in the source's
        node the reader itself."""
        own = np.arange(self.ranks)[:, None]
        return np.where(self.masks()["other_node"], self.proxy.T, own)

    @property
    def sizes(self) -> Ints:
        """Number of ranks of each rank's node, [M]."""
        node_of = np.array(self.node_of)
        return np.bincount(node_of)[node_of]

    @property
    def most_peers(self) -> int:
        """Largest number of ranks of other nodes with which a rank exchanges rows: those from which
        it reads as a relay, and the relays that read from it. It is one per other node if all nodes
        have one size."""
        asks = self.masks()["other_node"] & (self.relay == np.arange(self.ranks)[:, None])
        return int((asks | asks.T).sum(axis=1).max())

    @property
    def direct(self) -> Topology:
        """Topology without relays."""
        return Topology(**self.content)


@lru_cache(maxsize=4)
def relayed(topology: Topology, distinct: bool) -> Topology:
    """Return the topology of a workload's rows: with relays if fetches are `distinct`, and the
    ranks of several nodes, some of several ranks, send each other rows; the same object while few
    topologies are in use.

    Topologies of pooled tables and of the hosts' memory are returned unchanged.
    """
    several = 1 < topology.nodes < topology.ranks
    if not (distinct and several and topology.known_transport == COLLECTIVE):
        return topology
    return RelayedTopology(**topology.content) if type(topology) is Topology else topology


def relayed_sizes(topology: Topology) -> tuple[int, ...]:
    """Return the sizes of nodes in which relays read rows for others, ascending."""
    if not isinstance(topology, RelayedTopology):
        return ()
    return tuple(np.unique(topology.sizes[topology.sizes > 1]).tolist())


def without_relays(topology: Topology) -> Topology:
    """Return the topology without its relays, if it has any."""
    return topology.direct if isinstance(topology, RelayedTopology) else topology
