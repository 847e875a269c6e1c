"""Topology of pooled tables, whose rows in other nodes are added up there.

A rank's proxy in another node, the rank at the same position there, reads the rows of a bag that
lie in its node, adds them up, and sends one vector of float32; in training one vector comes back,
from which the proxy makes the gradients of those rows. With r the bytes of vectors per byte of the
rows that they sum (oper/cost/vectors_per_bag.py) and L the link costs, a byte that rank i reads
from rank j of another node takes

    reads       L[i][j] · r      the vector; in training twice, because its gradient comes back
                + L[p][j]        the read of i's proxy p, which the proxy pays (read_charges.py)
    gradients   L[p][j]          from the proxy, which has the gradients of j's rows, to j

and inside a node the same as without pooling. r belongs to j's node: the number of rows of a bag
there depends on the places of the tables' rows. A memory reads each row that a rank touches once
per batch, whatever its number of accesses: repeats come from a cache. Links carry every access.
Rows of tables that are not pooled have the links without pooling (`unpooled`).

In `link_cost`, by which placements are sought, the proxy's read is the mean over the ranks of j's
node, of which j itself needs no link; in shared memory j's own read is one of the proxies' reads
too.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from oper.base.arrays import Floats
from oper.topology.links import SHARED
from oper.topology.number_ranges import LINK_COST
from oper.topology.relays import RelayedTopology, relayed
from oper.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class PooledTopology(Topology):
    """Topology with the link costs of pooled tables' rows.

    own_link_cost: link costs without pooling, s/byte [M, M]. vector_ratio: bytes of vectors per
    byte of rows of each node, as read from other nodes, [N]. least_ratio: its lower bound over all
    placements of the rows. training: vectors go both ways. tables: the names of the pooled tables;
    None: all. relays: relays read the rows of the other tables between nodes (relays.py).
    """

    own_link_cost: Floats = field(kw_only=True)
    vector_ratio: Floats = field(kw_only=True)
    least_ratio: float = field(kw_only=True)
    training: bool = field(kw_only=True)
    tables: frozenset[str] | None = field(kw_only=True, default=None)
    relays: bool = field(kw_only=True, default=False)

    @staticmethod
    def of(
        topology: Topology,
        ratio: Floats | float,
        least_ratio: float,
        training: bool,
        tables: frozenset[str] | None = None,
    ) -> "PooledTopology":
        """Return the topology with pooled `tables` (None: all), with `ratio` bytes of vectors per
        byte of their rows, per node [N] or for all."""
        ratios = np.broadcast_to(np.asarray(ratio, dtype=np.float64), topology.nodes)
        near = _near(topology)
        own, other = topology.link_cost, topology.masks()["other_node"]
        far = own * ratios[np.array(topology.node_of)] * (2 if training else 1)
        # If each rank is a node, links carry vectors alone; and no link is free.
        between = np.maximum(far + near, LINK_COST.least)
        costs = {"link_cost": np.where(other, between, own)}
        return PooledTopology(
            **topology.content | costs,
            own_link_cost=own,
            vector_ratio=ratios,
            least_ratio=least_ratio,
            training=training,
            tables=tables,
            relays=isinstance(topology, RelayedTopology),
        )

    def with_ratio(self, ratio: Floats | float, least_ratio: float) -> "PooledTopology":
        """Return this topology with other bytes of vectors per byte of rows."""
        return PooledTopology.of(self.unpooled, ratio, least_ratio, self.training, self.tables)

    @property
    def vector_link_cost(self) -> Floats:
        """Seconds of the vectors for a byte of rows on each link between nodes, [M, M]; inside a
        node, of the byte itself."""
        ratios = self.vector_ratio[np.array(self.node_of)] * (2 if self.training else 1)
        return np.where(self.masks()["other_node"], self.own_link_cost * ratios, self.own_link_cost)

    @cached_property
    def unpooled(self) -> Topology:
        """Topology without pooling."""
        return relayed(Topology(**self.content | {"link_cost": self.own_link_cost}), self.relays)

    def on(self, topology: Topology) -> "PooledTopology":
        """Return `topology`, which is without pooling, such as `unpooled` with other memory, with
        these vectors."""
        return PooledTopology.of(
            relayed(topology, self.relays),
            self.vector_ratio,
            self.least_ratio,
            self.training,
            self.tables,
        )

    @property
    def bounding(self) -> "PooledTopology":
        """Topology with the least costs that any placement of rows can have."""
        return self.with_ratio(self.least_ratio, self.least_ratio)


def without_pooling(topology: Topology) -> Topology:
    """Return the topology of tables that are not pooled."""
    return topology.unpooled if isinstance(topology, PooledTopology) else topology


def _near(topology: Topology) -> Floats:
    """Return the seconds per byte of a proxy's read from each rank, the mean over proxies, [M]."""
    same_node, node_of = topology.masks()["same_node"], np.array(topology.node_of)
    size = np.bincount(node_of)[node_of]
    by_link = np.where(same_node, topology.link_cost, 0.0).sum(axis=0) / size
    shared = np.array([topology.memory[node] == SHARED for node in node_of])
    near: Floats = by_link + np.where(shared, topology.link_cost.diagonal() / size, 0.0)
    return near
