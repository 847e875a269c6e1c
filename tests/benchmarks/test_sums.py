"""The AllReduce in the simulator, by hand."""

from dataclasses import replace

import pytest

from benchmarks.planning.simulator.machine import h100
from benchmarks.planning.simulator.sums import (
    gather_seconds,
    ring_seconds,
    sum_seconds,
    switch_seconds,
    two_level_seconds,
)
from tests.support.simulator import PLAIN

SLOW = replace(PLAIN, near_hop=1.0, far_hop=3.0, message=0.5)


def test_ring() -> None:
    """Four ranks: 6 hops, each of a quarter of 200 bytes, over two adapters of 10 bytes/s."""
    assert ring_seconds(SLOW, 200) == pytest.approx((6 * 3.5, 6 * 50 / 20))
    one_node = replace(SLOW, nodes=1, ranks_per_node=4)
    assert ring_seconds(one_node, 200) == pytest.approx((6 * 1.0, 6 * 50 / 100))


def test_two_levels() -> None:
    """Half of 200 bytes by the links, twice; then slices of 100 bytes, of which half goes each way
    between two nodes by an adapter of 10 bytes/s."""
    assert two_level_seconds(SLOW, 200) == pytest.approx((2 * 1 + 2 * 3.5, 2 * 1 + 2 * 5))
    shared = replace(SLOW, adapters_per_node=1)
    assert two_level_seconds(shared, 200).moving == pytest.approx(2 * 1 + 2 * 10)
    # Four nodes: two steps each way, of 1/2 and 1/4. Three: one step, and a whole slice each way.
    four, three = replace(SLOW, nodes=4), replace(SLOW, nodes=3)
    assert two_level_seconds(four, 200) == pytest.approx((2 + 4 * 3.5, 2 + 2 * 0.75 * 10))
    assert two_level_seconds(three, 200) == pytest.approx((2 + 4 * 3.5, 2 + (1 + 2) * 10))


def test_switch() -> None:
    """Eight H100 in one switch: two hops, and 2 · 7/8 of the bytes at its bus bandwidth."""
    machine = h100(1)
    found = switch_seconds(machine, 480e9)
    assert found == pytest.approx((2 * machine.near_hop, 2 * 7 / 8))
    assert sum_seconds(machine, 480e9) == found
    assert switch_seconds(h100(2), 1).total == float("inf")


def test_the_first_to_be_done() -> None:
    """Few bytes go by the fewest hops."""
    many = h100(16)
    assert sum_seconds(many, 0) == two_level_seconds(many, 0)


def test_gather() -> None:
    """Each rank gets 100 bytes from one of the other node at 10 bytes/s, and then two ranks' from
    its neighbour at 100 bytes/s."""
    assert gather_seconds(SLOW, 100) == pytest.approx((3 + 0.5 + 1, 10 + 2))
