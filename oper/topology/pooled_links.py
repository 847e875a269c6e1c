"""The ranks as rows of pooled tables see them: rows of other nodes are added up there.

A rank's proxy in another node, the rank at the same position there, reads the rows of a bag that
lie in its node, adds them up, and sends one vector of float32; in training one comes back, from
which the gradients of those rows are made. With r the bytes of vectors for each byte of the rows
that they are sums of (oper/cost/vectors_per_bag.py) and L the link costs, a byte that rank i reads
from rank j of another node takes

    reads       L[i][j] · r      the vector; in training twice, as its gradient comes back
                + L[p][j]        the read of i's proxy p, which the proxy pays (read_charges.py)
    gradients   L[p][j]          from the proxy, which has the gradients of j's rows, to j

and in a node what it takes there without pooling. r is of j's node: how many rows of a bag are
there depends on where the tables' rows are. In `link_cost`, by which placements are sought, the
proxy's read is its mean over the ranks of j's node, of which j itself has no link to pass; in
shared memory j's own read is one of the proxies' too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.topology.links import SHARED
from oper.topology.number_ranges import LINK_COST
from oper.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class PooledTopology(Topology):
    """A topology with the link costs of pooled tables' rows.

    own_link_cost: those without pooling, s/byte [M, M]. gradient_link_cost: from reader to owner,
    the same. vector_ratio: bytes of vectors for a byte of rows of each node, as others read them,
    [N]. least_ratio: the same, at the least, wherever rows are. training: whether vectors go both
    ways.
    """

    own_link_cost: Floats = field(kw_only=True)
    gradient_link_cost: Floats = field(kw_only=True)
    vector_ratio: Floats = field(kw_only=True)
    least_ratio: float = field(kw_only=True)
    training: bool = field(kw_only=True)

    @staticmethod
    def of(
        topology: Topology, ratio: Floats | float, least_ratio: float, training: bool
    ) -> "PooledTopology":
        """The topology of pooled tables' rows, with so many bytes of vectors for a byte of them, of
        each node [N] or of all."""
        ratios = np.broadcast_to(np.asarray(ratio, dtype=np.float64), topology.nodes)
        near, near_gradient = _near(topology)
        own, other = topology.link_cost, topology.masks()["other_node"]
        far = own * ratios[np.array(topology.node_of)] * (2 if training else 1)
        # Where ranks are nodes, vectors are all that a link takes; and none costs nothing.
        between = np.maximum(far + near, LINK_COST.least)
        content: dict[str, Any] = vars(topology) | {"link_cost": np.where(other, between, own)}
        return PooledTopology(
            **content,
            own_link_cost=own,
            gradient_link_cost=np.where(other, near_gradient, own),
            vector_ratio=ratios,
            least_ratio=least_ratio,
            training=training,
        )

    @property
    def vector_link_cost(self) -> Floats:
        """What the vectors for a byte of rows take on each link between nodes, s/byte [M, M]; in a
        node what the byte itself takes."""
        ratios = self.vector_ratio[np.array(self.node_of)] * (2 if self.training else 1)
        return np.where(self.masks()["other_node"], self.own_link_cost * ratios, self.own_link_cost)

    @cached_property
    def proxy(self) -> Ints:
        """The rank that reads for each in the source's node, [reader, source]."""
        return proxy_ranks(self.node_of)

    @property
    def unpooled(self) -> Topology:
        """The topology without pooling."""
        content = {f.name: getattr(self, f.name) for f in fields(Topology)}
        return Topology(**content | {"link_cost": self.own_link_cost})

    def on(self, topology: Topology) -> "PooledTopology":
        """A topology without pooling, such as `unpooled` with other memory, with these vectors."""
        return PooledTopology.of(topology, self.vector_ratio, self.least_ratio, self.training)

    @property
    def bounding(self) -> "PooledTopology":
        """The topology with the least costs that any placement of rows can have."""
        return PooledTopology.of(self.unpooled, self.least_ratio, self.least_ratio, self.training)


def proxy_ranks(node_of: Sequence[int]) -> Ints:
    """The rank of each source's node that is at the same position there as each reader in its own,
    and the reader itself in its own node, [reader, source]."""
    node = np.array(node_of)
    ranks = np.argsort(node, kind="stable")
    size = np.bincount(node)
    first = np.cumsum(size) - size
    position = np.empty(len(node), dtype=np.int64)
    position[ranks] = np.arange(len(node)) - first[node[ranks]]
    proxy: Ints = ranks[first[node] + position[:, None] % size[node]]
    return proxy


def _near(topology: Topology) -> tuple[Floats, Floats]:
    """near and near' of each rank, [M] each."""
    same_node, node_of = topology.masks()["same_node"], np.array(topology.node_of)
    size = np.bincount(node_of)[node_of]
    mates = np.where(same_node, topology.link_cost, 0.0).sum(axis=0) / size
    shared = np.array([topology.memory[node] == SHARED for node in node_of])
    return mates + np.where(shared, topology.link_cost.diagonal() / size, 0.0), mates
