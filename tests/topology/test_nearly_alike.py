"""Nearly equal ranks: their mean links, their least capacities, and ranks that differ."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.topology.host_tier import TierTopology, tier_topology
from oper.topology.nearly_alike import NEARLY, as_alike, bounding
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import RelayedTopology, relayed
from oper.topology.topology import Topology

PRESETS = ("dgx-a100", "2x4-a100", "4x2-h100", "cpu:3")


def noisy(topology: Topology, amount: float, seed: int = 0) -> Topology:
    """Return the topology with each link up to the share `amount` slower or faster."""
    random = np.random.default_rng([17, seed])
    factor = 1 + random.uniform(-amount, amount, topology.link_cost.shape)
    return replace(topology, link_cost=topology.link_cost * factor)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("amount", [0.005, 0.05])
def test_the_mean_of_each_kind_of_link_takes_the_place_of_each(preset: str, amount: float) -> None:
    given = noisy(Topology.load(preset), amount)
    alike = as_alike(given)
    assert alike.homogeneous
    assert not given.homogeneous
    for mask in given.masks().values():
        if mask.any():
            np.testing.assert_allclose(alike.link_cost[mask], given.link_cost[mask].mean())
    assert as_alike(alike) is alike


@pytest.mark.parametrize("preset", PRESETS)
def test_ranks_that_are_alike_stay_as_they_are(preset: str) -> None:
    topology = Topology.load(preset)
    assert as_alike(topology) is topology
    with_capacity = topology.with_capacity("1.5")
    assert as_alike(with_capacity) is with_capacity


def test_one_link_far_from_the_others_makes_ranks_differ() -> None:
    topology = Topology.load("2x4-a100")
    cost = topology.link_cost.copy()
    cost[1, 6] *= 1 + 1.2 * NEARLY
    slow = replace(topology, link_cost=cost)
    assert as_alike(slow) is slow


@pytest.mark.parametrize("node_of", [(0, 0, 0, 1), (0, 1, 1, 1, 1)])
def test_uneven_nodes_differ(node_of: tuple[int, ...]) -> None:
    base = Topology.load("2x2-a100")
    ranks = len(node_of)
    costs = np.full((ranks, ranks), 1e-9)
    uneven = Topology("t", node_of, costs, 72e9, base.latency)
    assert as_alike(noisy(uneven, 0.01)).ranks == ranks
    assert not as_alike(noisy(uneven, 0.01)).homogeneous


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        ((100, 104, 98, 100), (98,) * 4),
        ((1.1, 1.05, 1.1, 1.2), (1.05,) * 4),
        ((100, 104, 98, 50), None),
        ((100, 1.0, 100, 100), None),
    ],
)
def test_near_capacities_are_the_least_of_them(
    capacity: tuple[float, ...], expected: tuple[float, ...] | None
) -> None:
    given = replace(Topology.load("2x2-a100"), capacity=capacity)
    alike = as_alike(given)
    if expected is None:
        assert alike is given
    else:
        assert alike.capacity == expected
        assert alike.homogeneous


def test_near_memories_are_the_least_of_them() -> None:
    given = replace(
        Topology.load("2x2-a100"),
        device_memory_bytes=(100, 99, 101, 100),
        host_memory_bytes=(200, 201, 202, 203),
        host_bandwidth=(1.0, 1.25, 1.0, 1.0),
    )
    alike = as_alike(given)
    assert alike.device_memory_bytes == (99,) * 4
    assert alike.host_memory_bytes == (200,) * 4
    assert alike.host_bandwidth is not None
    assert set(alike.host_bandwidth) == {1 / 0.95}
    shared = replace(Topology.load("cpu:2"), device_memory_bytes=(100, 99))
    assert as_alike(shared) is shared  # a plan does not depend on this machine's memory


def test_each_view_of_the_ranks_stays_that_view() -> None:
    given = noisy(Topology.load("2x4-a100"), 0.03)
    relays = relayed(given, distinct=True)
    assert isinstance(as_alike(relays), RelayedTopology)
    pooled = PooledTopology.of(relays, np.array([0.5, 0.7]), 0.2, True, frozenset({"t"}))
    alike = as_alike(pooled)
    assert isinstance(alike, PooledTopology)
    assert isinstance(alike.unpooled, RelayedTopology)
    assert alike.unpooled.homogeneous
    assert alike.vector_ratio.tolist() == [0.5, 0.7]
    assert (alike.least_ratio, alike.training, alike.tables) == (0.2, True, frozenset({"t"}))
    assert isinstance(as_alike(tier_topology(given)), TierTopology)


@given(
    st.sampled_from(PRESETS),
    st.floats(0.001, 0.2),
    st.integers(0, 100),
    st.booleans(),
)
def test_bounds_are_sought_with_no_cost_above_a_links_own(
    preset: str, amount: float, seed: int, pooled: bool
) -> None:
    given = noisy(Topology.load(preset), amount, seed)
    given = replace(given, device_memory_bytes=tuple(range(90, 90 + given.ranks)))
    if pooled:
        ratio = np.random.default_rng(seed).uniform(0.1, 2.0, given.nodes)
        given = PooledTopology.of(given, ratio, float(ratio.min()), bool(seed % 2))
    least = bounding(given)
    assert (least.link_cost <= given.link_cost * (1 + 1e-15)).all()
    assert least.homogeneous or pooled
    assert least.capacity is None
    assert least.device_memory_bytes == (89 + given.ranks,) * given.ranks
    if isinstance(least, PooledTopology) and isinstance(given, PooledTopology):
        assert (least.own_link_cost <= given.own_link_cost).all()
        assert least.unpooled.homogeneous
