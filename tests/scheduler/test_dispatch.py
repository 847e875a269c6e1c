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
@given(problems())
def test_of_equals_one_is_drawn_by_the_seed(problem: tuple[Costs, NDArray[np.int64]]) -> None:
    costs, room = problem
    drawn = assign_in_order(costs, room, (5, 7))
    assert drawn.tolist() == assign_in_order(costs, room, (5, 7)).tolist()
    left = room.copy()
    for cost, found in zip(costs, drawn, strict=True):
        assert left[found] > 0
        assert cost[found] == cost[left > 0].min()
        left[found] -= 1


@EXAMPLES
@given(problems(), st.floats(0, 1))
def test_the_largest_regrets_are_assigned_exactly_and_the_others_in_order(
    problem: tuple[Costs, NDArray[np.int64]], alpha: float
) -> None:
    costs, room = problem
    if costs.shape[1] == 1:
        return
    found = hybrid(costs, room, alpha)
    assert (np.bincount(found, minlength=len(room)) <= room).all()
    ordered = np.sort(costs, axis=1)
    regret = ordered[:, 1] - ordered[:, 0]
    chosen = np.sort(np.argsort(-regret, kind="stable")[: round(alpha * len(costs))])
    copies = np.repeat(np.arange(len(room)), room)
    rows, columns = linear_sum_assignment(costs[chosen][:, copies])
    least = costs[chosen][rows, copies[columns]].sum()
    assert total(costs[chosen], found[chosen]) == pytest.approx(least, rel=1e-9, abs=1e-12)
    left = room - np.bincount(found[chosen], minlength=len(room))
    others = np.setdiff1d(np.arange(len(costs)), chosen)
    assert found[others].tolist() == assign_in_order(costs[others], left).tolist()


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


EVERY = (
    "random",
    "in-order",
    "laia",
    "laia@0.3",
    "esd:0",
    "esd:0.25",
    "esd",
    "esd:0@0.5",
    "grouped:1",
    "grouped",
    "grouped:1@0.6",
    "grouped@0",
)


@pytest.mark.parametrize("text", EVERY)
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
    assert caches.train(batch, assignment)["miss_pull"].sum() == 4 * workers


class Sum:
    """What a batch transmits by who trains which rows, from the definition in grouping.h."""

    def __init__(self, rows: NDArray[np.int64], owner: dict[int, int], links: Costs) -> None:
        self.rows, self.owner, self.links = rows, owner, links
        read = np.bincount(np.concatenate([np.unique(of_sample) for of_sample in rows]))
        self.counted = set(np.flatnonzero(read <= 3 * len(links)).tolist())

    def of(self, assignment: list[int | None]) -> float:
        """Of the samples that are somewhere; rows have one byte, and an owner's row is nowhere
        else, nor in the tier."""
        trainers: dict[int, set[int]] = {}
        for rows, worker in zip(self.rows, assignment, strict=True):
            for row in self.counted.intersection(rows.tolist() if worker is not None else ()):
                assert worker is not None
                trainers.setdefault(row, set()).add(worker)
        seconds = 0.0
        for row, of_row in trainers.items():
            owner = self.owner.get(row)
            seconds += sum(self.links[w] for w in of_row if w != owner)
            seconds += self.links[owner] if owner is not None and of_row != {owner} else 0
            seconds += sum(self.links[w] for w in of_row) if len(of_row) > 1 else 0
        return seconds

    def added(self, assignment: list[int | None], sample: int) -> list[float]:
        """What a sample that is nowhere adds on each worker."""
        before = self.of(assignment)
        places = [list(assignment) for _ in self.links]
        for worker, place in enumerate(places):
            place[sample] = worker
        return [self.of(place) - before for place in places]


@EXAMPLES
@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**32))
def test_each_sample_goes_where_the_batch_then_transmits_least(
    workers: int, m: int, seed: int
) -> None:
    """Sample after sample, in two rounds, of those that have room; links are equal."""
    random = np.random.default_rng(seed)
    caches = Caches(workers, [99], [1], [1], "lru", Synchronisation.parse("on-demand"))
    history = (30 * random.random((workers, 3)) ** 2).astype(np.int64)
    caches.train(caches.look_up(history.ravel(), 3 * np.arange(workers + 1)), np.arange(workers))
    alone = [row for row in np.unique(history) if (history == row).any(axis=1).sum() == 1]
    owner = {int(row): int((history == row).any(axis=1).argmax()) for row in alone}
    links = np.ones(workers)
    rows = (30 * random.random((workers * m, 3)) ** 2).astype(np.int64)
    batch = caches.look_up(rows.ravel(), 3 * np.arange(len(rows) + 1))
    room = np.full(workers, m)
    room[0] += int(random.integers(0, 3))
    batch_sum = Sum(rows, owner, links)
    before: list[int | None] = [None] * len(rows)
    for rounds in (1, 2):
        found = caches.group(batch, room, links, rounds).tolist()
        assert (np.bincount(found, minlength=workers) <= room).all()
        left = room.copy()
        now = list(before)
        for sample, worker in enumerate(found):
            now[sample] = None
            added = np.array(batch_sum.added(now, sample))
            assert left[worker] > 0
            assert added[worker] <= added[left > 0].min() + 0.01  # 1e-3 of a row decides ties
            now[sample] = worker
            left[worker] -= 1
        before = list(now)
    # Rounds of exchanges, from the fifth on, do not raise the sum.
    sums = [batch_sum.of(caches.group(batch, room, links, n).tolist()) for n in range(4, 8)]
    assert (np.diff(sums) <= 1e-6).all()


@pytest.mark.parametrize("slow", [1.0, 10.0])
def test_grouping_transmits_less_than_the_exact_scores(slow: float) -> None:
    """Against ESD from the same states, in link time; more rounds do not make it worse."""
    random = np.random.default_rng(0)
    seconds = np.repeat([1.0, slow], 4)
    policies = ("esd", "grouped:1", "grouped:2", "grouped")
    sums = np.zeros(len(policies))
    for _ in range(10):
        every = [
            Caches(8, [999], [8], [8], "lru", Synchronisation.parse("on-demand")) for _ in policies
        ]
        for number in range(4):
            addresses = (900 * random.random(512 * 5) ** 2).astype(np.int64)
            batches = [caches.look_up(addresses, 5 * np.arange(513)) for caches in every]
            chosen = [
                Dispatcher(Policy.parse(text), seconds).assign(caches, addresses, batch, number)
                for text, caches, batch in zip(policies, every, batches, strict=True)
            ]
            for n, (caches, batch) in enumerate(zip(every, batches, strict=True)):
                # The states must be the same.
                moved = caches.train(batch, chosen[n if number == 3 else 0])
                if number == 3:
                    sums[n] += (moved["pull_bytes"] + moved["push_bytes"]) @ seconds
    assert (np.diff(sums) < 0).all()
    assert sums[-1] < 0.97 * sums[0]


@EXAMPLES
@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 6), st.integers(0, 2**32))
def test_a_grouped_batch_is_as_many_samples_of_each_worker(
    workers: int, m: int, rounds: int, seed: int
) -> None:
    """With any links, bags of any size, and room that is tight or not."""
    random = np.random.default_rng(seed)
    caches = Caches(workers, [500], [8], [8], "lru", Synchronisation.parse("on-demand"))
    links = 10 ** random.uniform(-20, 20, workers)
    for spare in (0, 1):
        lengths = random.integers(0, 5, workers * m)
        rows = (200 * random.random(lengths.sum()) ** 3).astype(np.int64)
        batch = caches.look_up(rows, np.append(0, np.cumsum(lengths)))
        room = random.permutation(capacities(workers * m + spare * workers, workers))
        found = caches.group(batch, room, links, rounds)
        assert len(found) == workers * m
        assert (np.bincount(found, minlength=workers) <= room).all()
        assert found.tolist() == caches.group(batch, room, links, rounds).tolist()
        caches.train(batch, found)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_links_by_which_nothing_can_be_grouped(bad: float) -> None:
    caches = some_caches()
    batch = caches.look_up(np.arange(8), 2 * np.arange(5))
    with pytest.raises(ValueError, match="seconds_per_byte"):
        caches.group(batch, np.full(4, 1), np.array([1.0, bad, 1.0, 1.0]))
    with pytest.raises(ValueError, match="room"):
        caches.group(batch, np.array([1, 1, 1, 0]), np.ones(4))


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
    "text",
    [
        "",
        "laia:0",
        "laia:x",
        "in-order:1",
        "esd:",
        "esd:2",
        "esd:-0.1",
        "esd:nan",
        "greedy",
        "grouped:0",
        "grouped:1025",
        "grouped:0.5",
        "random@0.5",
        "laia@2",
        "laia@",
        "laia@nan",
        "@0.5",
    ],
)
def test_policies_that_are_none(text: str) -> None:
    with pytest.raises(OperError, match=r"`policy`|policy="):
        Policy.parse(text)
