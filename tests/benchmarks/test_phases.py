"""Phases on tiny machines, by times found by hand."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.phases import Phase
from tests.support.simulator import PLAIN

ZEROS = np.zeros(4)


def between(*flows: tuple[int, int, float]) -> np.ndarray:
    """Bytes between four ranks."""
    moved = np.zeros((4, 4))
    for source, target, size in flows:
        moved[source, target] = size
    return moved


def seconds(machine: Machine, moved: np.ndarray) -> float:
    fair = Phase("x", moved, ZEROS, ZEROS).on(machine).fair
    assert fair is not None
    return fair


def test_links_of_a_node() -> None:
    """Rank 0 sends 50 bytes at 100 bytes/s."""
    assert seconds(PLAIN, between((0, 1, 50))) == pytest.approx(0.5)


def test_adapters() -> None:
    """Ranks 0 and 1 send 50 bytes to the other node at 10 bytes/s each, or 10 for both."""
    moved = between((0, 2, 50), (1, 3, 50))
    assert seconds(PLAIN, moved) == pytest.approx(5)
    assert seconds(replace(PLAIN, adapters_per_node=1), moved) == pytest.approx(10)
    # The adapter's other direction is free.
    both_ways = between((0, 2, 50), (1, 3, 50), (2, 0, 50), (3, 1, 50))
    assert seconds(PLAIN, both_ways) == pytest.approx(5)


def test_two_send_to_one() -> None:
    """100 bytes come to rank 2 by one adapter."""
    assert seconds(PLAIN, between((0, 2, 50), (1, 2, 50))) == pytest.approx(10)


def test_bisection() -> None:
    """8 bytes/s between the halves, both ways apart."""
    narrow = replace(PLAIN, bisection_bandwidth=8.0)
    moved = between((0, 2, 40), (1, 3, 40), (2, 0, 16))
    assert seconds(narrow, moved) == pytest.approx(10)
    assert seconds(narrow, between((0, 2, 40), (2, 0, 40))) == pytest.approx(5)


def test_memory_and_cache() -> None:
    """3,000 bytes at 1,000 bytes/s take longer than 8,000 of the cache at 4,000; with 1,000 bytes
    that land there, 4 s."""
    memory = np.array([0, 3000.0, 0, 0])
    phase = Phase("x", between(), memory, np.array([8000.0, 0, 0, 0]))
    assert phase.on(PLAIN).fair == pytest.approx(3)
    fast = replace(PLAIN, link_bandwidth=1e9)
    moved = between((0, 1, 1000))
    assert Phase("x", moved, memory, ZEROS).on(fast).fair == pytest.approx(4)
    assert Phase("x", moved, memory, ZEROS, lands=False).on(fast).fair == pytest.approx(3)


def test_shared_memory() -> None:
    """The reader's bandwidth is what counts: rank 1 reads 1,000 bytes of rank 0, and 500 of its
    own."""
    shared = replace(PLAIN, link_bandwidth=None)
    memory = np.array([1400.0, 500, 0, 0])
    for lands in (False, True):  # a copy is written within the bandwidth it is read by
        phase = Phase("x", between((0, 1, 1000)), memory, ZEROS, lands=lands)
        assert phase.on(shared).fair == pytest.approx(1.5)


def test_latency() -> None:
    """Two kernels, and two rounds of a hop and of messages to two ranks of the other node."""
    slow = replace(PLAIN, near_hop=1.0, far_hop=3.0, message=0.5, kernel=0.25)
    far = between((0, 2, 1), (0, 3, 1), (1, 0, 1))
    found = Phase("x", far, ZEROS, ZEROS, rounds=2, kernels=2).on(slow)
    assert found.latency == pytest.approx(2 * 0.25 + 2 * (3 + 2 * 0.5))
    near = Phase("x", between((1, 0, 1)), ZEROS, ZEROS).on(slow)
    assert near.latency == pytest.approx(0.25 + 1)
    own = Phase("x", between(), np.ones(4), ZEROS).on(slow)
    assert own.latency == pytest.approx(0.25)
    assert Phase("x", between(), ZEROS, ZEROS).on(slow).seconds == 0
