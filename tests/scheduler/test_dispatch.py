"""Assignments against scipy's, the bounds of the papers, and by every rank alike."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from oper.base.errors import OperError
from oper.scheduler.cache import Caches
from oper.scheduler.cache_settings import Synchronisation
from oper.scheduler.dispatch import (
    Dispatcher,
    Policy,
    assign_exactly,
    assign_in_order,
    capacities,
    hybrid,
)
from tests.support.examples import examples

EXAMPLES = examples(100)
Costs = NDArray[np.float64]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Costs, NDArray[np.int64]]:
    """Costs [samples, M] with room; whole numbers, with many ties, or not."""
    workers, m = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples = int(random.integers(0, workers * m + 1))
    costs = draw(st.sampled_from([1e-9, 1.0, 1e6])) * random.random((samples, workers))
    if draw(st.booleans()):
        costs = np.floor(4 * random.random((samples, workers)))
    room = random.multinomial(max(samples, 1) + int(random.integers(0, 5)), [1 / workers] * workers)
    return costs, room.astype(np.int64)


def total(costs: Costs, assignment: NDArray[np.int64]) -> float:
    return float(costs[np.arange(len(costs)), assignment].sum())


@EXAMPLES
@given(problems())
def test_the_exact_assignment_is_the_cheapest(problem: tuple[Costs, NDArray[np.int64]]) -> None:
    costs, room = problem
    assignment = assign_exactly(costs, room)
    assert (np.bincount(assignment, minlength=len(room)) <= room).all()
    copies = np.repeat(np.arange(len(room)), room)
    rows, columns = linear_sum_assignment(costs[:, copies])
    least = costs[rows, copies[columns]].sum()
    assert total(costs, assignment) == pytest.approx(least, rel=1e-9)


@EXAMPLES
@given(problems())
def test_in_order_goes_to_the_cheapest_with_room(
    problem: tuple[Costs, NDArray[np.int64]],
) -> None:
    costs, room = problem
    left = room.copy()
    for cost, found in zip(costs, assign_in_order(costs, room), strict=True):
        assert left[found] > 0
        assert cost[found] == cost[left > 0].min()
        left[found] -= 1


@EXAMPLES
@given(problems(), st.floats(0, 1))
def test_theorem_1_and_the_order_of_policies(
    problem: tuple[Costs, NDArray[np.int64]], alpha: float
) -> None:
    costs, _ = problem
    workers = costs.shape[1]
    m = -(-len(costs) // workers)
    room = np.full(workers, m)
    greedy, exact = assign_in_order(costs, room), assign_exactly(costs, room)
    mixed = hybrid(costs, room, alpha)
    assert (np.bincount(mixed, minlength=workers) <= room).all()
    ordered = np.sort(costs, axis=1)
    for i, (cost, worker) in enumerate(zip(costs, greedy, strict=True)):
        q = i // m  # of sample i + 1: q workers at most are full
        assert cost[worker] - ordered[i, 0] <= ordered[i, q] - ordered[i, 0] + 1e-12
    slack = 1e-9 * (1 + np.abs(costs).sum())
    assert total(costs, exact) <= min(total(costs, greedy), total(costs, mixed)) + slack


def some_caches() -> Caches:
    return Caches(4, [50], [8], [8], "lru", Synchronisation.parse("on-demand"))


@pytest.mark.parametrize("text", ["random", "in-order", "laia", "esd:0", "esd:0.25", "grouped"])
def test_every_rank_assigns_alike_and_as_many_to_each_worker(text: str) -> None:
    seconds = np.array([1.0, 1.0, 10.0, 10.0])
    ranks = [(some_caches(), Dispatcher(Policy.parse(text), seconds, seed=3)) for _ in range(2)]
    random = np.random.default_rng(0)
    for number in range(12):
        samples = 18 if number < 11 else 7  # a ragged end
        addresses = (60 * random.random(5 * samples) ** 2).astype(np.int64)
        offsets = np.arange(samples + 1) * 5
        found = []
        for caches, dispatcher in ranks:
            batch = caches.look_up(addresses, offsets)
            assignment = dispatcher.assign(caches, addresses, batch, number)
            caches.train(batch, assignment)
            found.append(assignment.tolist())
        assert found[0] == found[1]
        assert np.bincount(found[0], minlength=4).tolist() == capacities(samples, 4).tolist()


@pytest.mark.parametrize("workers", [2, 8, 9])
def test_samples_that_share_rows_meet(workers: int) -> None:
    """Pairs of samples read the same rows, scattered over the batch."""
    caches = Caches(workers, [99], [8], [8], "lru", Synchronisation.parse("on-demand"))
    pair_of = np.random.default_rng(1).permutation(np.repeat(np.arange(2 * workers), 2))
    addresses = np.stack([pair_of, pair_of + 50], axis=1).ravel()
    batch = caches.look_up(addresses, 2 * np.arange(len(pair_of) + 1))
    assignment = Dispatcher(Policy("grouped"), np.ones(workers)).assign(caches, addresses, batch, 0)
    assert caches.train(batch, assignment)["miss_pull"].tolist() == [4] * workers


def test_grouping_moves_what_the_state_model_says_or_less() -> None:
    """Against the same assignment without it, from the same states, pulls and pushes are fewer."""
    random = np.random.default_rng(0)
    seconds = np.array([1.0, 1.0, 1.0, 1.0, 10.0, 10.0, 10.0, 10.0])
    fewer = []
    for _ in range(30):
        pair = [Caches(8, [99], [8], [8], "lru", Synchronisation.parse("on-demand")) for _ in "ab"]
        moved = []
        for number in range(4):
            addresses = (200 * random.random(64 * 5) ** 2).astype(np.int64)
            batches = [c.look_up(addresses, 5 * np.arange(65)) for c in pair]
            plain = Dispatcher(Policy("esd"), seconds).assign(
                pair[0], addresses, batches[0], number
            )
            other = Dispatcher(Policy("grouped"), seconds).assign(
                pair[1], addresses, batches[1], number
            )
            if number < 3:
                other = plain  # the states must be the same
            moved = [c.train(b, a) for c, b, a in zip(pair, batches, (plain, other), strict=True)]
        sums = [m["pull_bytes"] @ seconds + m["push_bytes"] @ seconds for m in moved]
        fewer.append(sums[1] / sums[0])
    assert max(fewer) <= 1
    assert np.mean(fewer) < 0.97


def test_laia_sends_samples_to_their_rows_and_ties_anywhere() -> None:
    caches = some_caches()
    first = np.arange(4)
    caches.train(caches.look_up(first, np.arange(5)), first)  # row w on worker w
    batch = caches.look_up(first[::-1].copy(), np.arange(5))
    laia = Dispatcher(Policy("laia"), np.ones(4))
    assert laia.assign(caches, first, batch, 1).tolist() == [3, 2, 1, 0]
    caches.train(batch, np.array([3, 2, 1, 0]))
    unknown = caches.look_up(np.arange(10, 14), np.arange(5))
    tied = {tuple(laia.assign(caches, first, unknown, number)) for number in range(200)}
    assert len(tied) == 24  # all orders come up


@pytest.mark.parametrize(
    "text", ["", "laia:0", "laia:x", "in-order:1", "esd:", "esd:2", "esd:-0.1", "esd:nan", "greedy"]
)
def test_policies_that_are_none(text: str) -> None:
    with pytest.raises(OperError, match="--policy"):
        Policy.parse(text)
