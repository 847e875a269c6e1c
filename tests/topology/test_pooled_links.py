"""Link costs of pooled tables' rows, against what each rank and its proxies do, written out."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.read_charges import Charges
from oper.topology.latency import DEVICES
from oper.topology.links import LINKED, SHARED, NodeMemory
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology

LOCAL, NEAR, FAR = 1.0, 5.0, 70.0


def clusters(nodes: int, per_node: int, memory: NodeMemory) -> Topology:
    """Nodes of equal size with links of one cost of each kind."""
    node_of = [rank // per_node for rank in range(nodes * per_node)]
    same = np.equal.outer(node_of, node_of)
    cost = np.where(same, NEAR, FAR)
    np.fill_diagonal(cost, LOCAL)
    return Topology("t", tuple(node_of), cost, 1.0, DEVICES, memory=(memory,) * nodes)


@given(
    nodes=st.integers(2, 4),
    per_node=st.integers(1, 4),
    memory=st.sampled_from([LINKED, SHARED]),
    ratio=st.floats(0.01, 1.0),
    training=st.booleans(),
)
def test_what_a_byte_costs_is_what_ranks_and_proxies_do(
    nodes: int, per_node: int, memory: NodeMemory, ratio: float, training: bool
) -> None:
    """All ranks read a byte of a row of each rank: what each pays, and its proxies for it."""
    topology = clusters(nodes, per_node, memory)
    M = topology.ranks
    reads, memories, gradients = np.zeros((3, M))
    for owner in range(M):
        for reader in range(M):
            node = owner // per_node
            near = reader // per_node == node
            proxy = reader if near else node * per_node + reader % per_node
            memories[owner] += LOCAL * (proxy == owner or memory == LINKED)
            reads[proxy] += NEAR * (proxy != owner)
            if not near:
                reads[reader] += FAR * ratio * (1 + training)
            gradients[owner] += LOCAL
            gradients[proxy] += NEAR * (proxy != owner)
    pooled = PooledTopology.of(topology, ratio, ratio / 2, training)
    traffic = np.ones((M, M))

    def paid(charges: Charges) -> np.ndarray:
        memories, links = charges.lookup_and_link_seconds(charges.through(traffic))
        return charges.paid_for_memory(memories) + charges.paid_for_links(links)

    np.testing.assert_allclose(paid(Charges.of(pooled)), reads)
    np.testing.assert_allclose(paid(Charges.of_memory(pooled)), memories)
    np.testing.assert_allclose(paid(Charges.of_gradients(pooled)), gradients)
    assert np.array_equal(pooled.unpooled.link_cost, topology.link_cost)
    assert type(pooled.unpooled) is Topology
    assert (pooled.bounding.vector_ratio == ratio / 2).all()
    assert (pooled.bounding.link_cost <= pooled.link_cost).all()


def test_capacities_of_a_pooled_topology_are_those_of_the_topology() -> None:
    pooled = PooledTopology.of(clusters(2, 2, LINKED), 0.1, 0.1, training=True)
    assert replace(pooled, capacity=3.0).unpooled.capacity == 3.0
    assert pooled.homogeneous
    with pytest.raises(AttributeError):
        _ = pooled.unpooled.vector_ratio  # type: ignore[attr-defined]
