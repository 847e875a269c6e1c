"""The lower bound against all holder sets, the whole linear program, and placements."""

from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from scipy.optimize import linprog

from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.cost.allreduce import Method
from oper.cost.holder_sets import (
    HolderSets,
    cheapest_holder_sets,
    everywhere_set,
    single_owner_sets,
)
from oper.cost.objective import evaluate
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.planner.bounds.lagrangian_bound import (
    homogeneous_prices,
    hot_row,
    lagrangian,
    lower_bound,
    usable_methods,
)
from oper.planner.lp import pricing
from oper.planner.lp.pricing import (
    DualPrices,
    cheapest,
    everywhere_price,
    pricing_items,
)
from oper.planner.lp.restricted_master import FractionalPlacement, Objective, solve_items
from oper.planner.problem.problem import ClassProblem
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.planner.instances import (
    make_classes,
    make_problem,
    topologies,
    workloads,
    zipf_problem,
)
from tests.support.planner.latencies import any_latency

WIDTHS = ((64, 64), (256, 260), (16, 272))
EXTRA_MEMORY = [0.0, 0.1, 0.5, 2.0]


@st.composite
def problems(
    draw: st.DrawFn,
    most_rows: int = 3,
    most_classes: int = 5,
    homogeneous: bool = False,
    mode: Literal["training", "inference"] | None = None,
) -> ClassProblem:
    """A handful of classes of mixed widths, on drawn topologies; of one mode, or of either."""
    topology = draw(any_latency(topologies(homogeneous=homogeneous)))
    workload = draw(workloads)
    if mode is not None:
        workload = replace(workload, mode=mode)
    size = draw(st.integers(1, most_classes))
    accesses = draw(st.lists(st.integers(0, 3000), min_size=size, max_size=size))
    rows = draw(st.lists(st.integers(1, most_rows), min_size=size, max_size=size))
    width = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    classes = make_classes(accesses, rows, workload, topology.ranks, 1000, WIDTHS, width)
    try:
        return make_problem(classes, topology, workload, draw(st.sampled_from(EXTRA_MEMORY)))
    except OperError:  # drawn capacities in which the rows do not fit
        reject()


def all_sets(topology: Topology, workload: Workload, method: Method) -> HolderSets:
    """Every group a row may be in."""
    ranks = topology.ranks
    if workload.training:
        sets = single_owner_sets(ranks)
        return sets if method == "none" else sets + everywhere_set(ranks)
    holds = np.array([s for s in product([False, True], repeat=ranks) if any(s)])
    return cheapest_holder_sets(holds, Charges.of(topology).read_seconds)


def all_paths(topology: Topology, workload: Workload, method: Method) -> HolderSets:
    """Every group, with every way of reading from its holders, as prices may favour any."""
    sets = all_sets(topology, workload, method)
    if workload.training:
        return sets
    paths, holders = [], []
    for holds in sets.holds:
        holder = np.flatnonzero(holds)
        for path in product(holder, repeat=topology.ranks):
            paths.append(path)
            holders.append(holds)
    return HolderSets(np.array(paths, dtype=np.uint16), np.array(holders))


def unit_seconds(problem: ClassProblem, sets: HolderSets, method: Method) -> Floats:
    """Seconds [C, G, M] on each rank of one row of each class in each group, no latency."""
    classes, topology = problem.classes, problem.topology
    seconds = np.zeros((len(classes), len(sets), topology.ranks))
    latency = pricing_items(classes, topology, problem.workload, method).latency
    for c in range(len(classes)):
        counts = np.zeros((len(classes), 1))
        counts[c] = 1
        sums = classes.sums(counts)
        for g in range(len(sets)):
            one = sets.take([g])
            cost = evaluate(topology, problem.workload, one, sums, problem.capacity_bytes, method)
            seconds[c, g] = cost.rank_seconds - (latency if one.copies[0] > 1 else 0.0)
    return seconds


@st.composite
def priced(
    draw: st.DrawFn, homogeneous: bool = False, mode: Literal["training", "inference"] | None = None
) -> tuple[ClassProblem, Method, DualPrices]:
    """A problem, a method it may use, and prices of any kind. Each class is priced by itself, and a
    reference prices each in all holder sets."""
    problem = draw(problems(most_classes=2, homogeneous=homogeneous, mode=mode))
    ranks = problem.topology.ranks
    method = draw(st.sampled_from(usable_methods(problem.workload, ranks, problem.budget_bytes)))
    price = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
    rank = np.array(draw(st.lists(price, min_size=ranks, max_size=ranks)))
    capacity = np.array(draw(st.lists(price, min_size=ranks, max_size=ranks)))
    byte = 1e-9 * draw(st.sampled_from([0.01, 1.0, 100.0]))
    if homogeneous:
        rank[:], capacity[:] = 1.0, capacity[0]
    return problem, method, DualPrices(rank, capacity * byte, draw(price) * byte)


@given(priced())
def test_the_cheapest_holder_set_is_the_cheapest_of_all(
    drawn: tuple[ClassProblem, Method, DualPrices],
) -> None:
    problem, method, prices = drawn
    sets = all_paths(problem.topology, problem.workload, method)
    seconds = unit_seconds(problem, sets, method)
    held = sets.holds @ prices.capacity + prices.budget * (sets.copies - 1)
    expected = (seconds @ prices.rank + problem.classes.m[:, None] * held).min(axis=1)
    rows = pricing_items(problem.classes, problem.topology, problem.workload, method)
    np.testing.assert_allclose(cheapest(rows, problem.topology, prices), expected, rtol=1e-9)
    if rows.training and method != "none":
        everywhere = seconds[:, -1] @ prices.rank + problem.classes.m * held[-1]
        np.testing.assert_allclose(
            everywhere_price(rows, problem.topology, prices), everywhere, rtol=1e-9
        )


@given(priced(homogeneous=True))
def test_homogeneous_ranks_need_only_numbers_of_copies(
    drawn: tuple[ClassProblem, Method, DualPrices],
) -> None:
    problem, method, prices = drawn
    rows = pricing_items(problem.classes, problem.topology, problem.workload, method)
    exact = cheapest(rows, problem.topology, prices)
    # A price that differs by next to nothing takes the way of heterogeneous ranks.
    capacity = prices.capacity.copy()
    capacity[0] += 1e-30
    other = cheapest(rows, problem.topology, DualPrices(prices.rank, capacity, prices.budget))
    np.testing.assert_allclose(exact, other, rtol=1e-9)


@given(priced(mode="inference"))
def test_the_relaxation_for_many_ranks_is_not_above_the_cheapest(
    drawn: tuple[ClassProblem, Method, DualPrices],
) -> None:
    problem, method, prices = drawn
    rows = pricing_items(problem.classes, problem.topology, problem.workload, method)
    exact = cheapest(rows, problem.topology, prices)
    relaxed = pricing._relaxed(rows, problem.topology, prices)
    assert (relaxed <= exact * (1 + 1e-9) + 1e-30).all()


def test_the_relaxation_is_exact_on_even_links_and_prices() -> None:
    topology, workload = Topology.load("4x4-a100"), Workload("inference", "raw", 4096)
    classes = zipf_problem(topology, workload).classes
    rows = pricing_items(classes, topology, workload, "none")
    even = DualPrices(np.full(16, 1 / 16), np.full(16, 1e-12), 1e-11)
    relaxed = pricing._relaxed(rows, topology, even)
    np.testing.assert_allclose(relaxed, cheapest(rows, topology, even), rtol=1e-9)


@st.composite
def placements(draw: st.DrawFn, problem: ClassProblem) -> tuple[HolderSets, Floats]:
    """Rows of each class in each group, drawn; they may or may not keep the limits."""
    classes, topology = problem.classes, problem.topology
    sets = all_sets(topology, problem.workload, "dense")
    counts = np.zeros((len(classes), len(sets)))
    for c, rows in enumerate(classes.rows.tolist()):
        for g in draw(st.lists(st.integers(0, len(sets) - 1), min_size=rows, max_size=rows)):
            counts[c, g] += 1
    return sets, counts


def solved_by_lp(
    problem: ClassProblem, method: Method, aim: Objective = "time"
) -> FractionalPlacement:
    rows = pricing_items(problem.classes, problem.topology, problem.workload, method)
    limits = problem.capacity_bytes, problem.budget_bytes
    return solve_items(rows, problem.topology, *limits, aim)


def keeps_limits(problem: ClassProblem, sets: HolderSets, counts: Floats) -> bool:
    sums = problem.classes.sums(counts)
    held = sets.holds.T @ sums.memory_bytes
    extra = (sets.copies - 1) @ sums.memory_bytes
    return bool((held <= problem.capacity_bytes).all() and extra <= problem.budget_bytes)


@given(st.data())
def test_no_placement_within_the_limits_is_below_any_bound(data: st.DataObject) -> None:
    problem, _, prices = data.draw(priced())
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    sets, counts = data.draw(placements(problem))
    sums = classes.sums(counts)
    cost = evaluate(topology, workload, sets, sums, problem.capacity_bytes)
    # Limits that this placement just keeps.
    held = sets.holds.T @ sums.memory_bytes
    extra = float((sets.copies - 1) @ sums.memory_bytes)
    rows = pricing_items(classes, topology, workload, cost.allreduce_method)
    for some in (prices, DualPrices(prices.rank, prices.capacity * 0, 0.0)):
        assert lagrangian(rows, topology, some, held, extra) <= cost.objective_seconds
    assert hot_row(classes, topology, workload, extra)[0] <= cost.objective_seconds
    bound = lower_bound(classes, topology, workload, held, extra)
    assert bound.seconds <= cost.objective_seconds


@given(problems(most_rows=200))
def test_the_bound_is_the_linear_program_over_all_holder_sets(
    problem: ClassProblem,
) -> None:
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    capacity, budget, ranks = problem.capacity_bytes, problem.budget_bytes, topology.ranks
    values = []
    for method in usable_methods(workload, ranks, budget):
        sets = all_paths(topology, workload, method)
        C, G = len(classes), len(sets)
        total = classes.rows * classes.m
        seconds = unit_seconds(problem, sets, method) * classes.rows[:, None, None]
        second, byte = max(seconds.max(), 1e-30), total.sum()
        held = total[:, None, None] * sets.holds
        extra = total[:, None] * (sets.copies - 1)
        uses = np.concatenate([seconds / second, held / byte, extra[:, :, None] / byte], axis=2)
        largest = np.r_[-np.ones(ranks), np.zeros(ranks + 1)]
        result = linprog(
            np.r_[np.zeros(C * G), 1.0],
            A_ub=np.c_[uses.reshape(C * G, -1).T, largest],
            b_ub=np.r_[np.zeros(ranks), capacity / byte, budget / byte],
            A_eq=np.c_[np.kron(np.eye(C), np.ones(G)), np.zeros(C)],
            b_eq=np.ones(C),
        )
        assert result.status == 0
        latency = pricing_items(classes, topology, workload, method).latency
        values.append(result.fun * second + latency)
    hottest, _ = hot_row(classes, topology, workload, budget)
    bound = lower_bound(classes, topology, workload, capacity, budget)
    assert bound.seconds == pytest.approx(max(min(values), hottest), rel=1e-5, abs=1e-25)


@given(problems())
def test_the_hottest_row_takes_no_less_in_any_holder_set(problem: ClassProblem) -> None:
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    least = np.full(len(classes), np.inf)
    for method in usable_methods(workload, topology.ranks, problem.budget_bytes):
        sets = all_paths(topology, workload, method)
        latency = pricing_items(classes, topology, workload, method).latency
        seconds = unit_seconds(problem, sets, method).max(axis=2)
        seconds += np.where(sets.copies > 1, latency, 0.0)
        fits = np.outer(classes.m, sets.copies - 1) <= problem.budget_bytes
        least = np.minimum(least, np.where(fits, seconds, np.inf).min(axis=1))
    seconds, hottest = hot_row(classes, topology, workload, problem.budget_bytes)
    assert seconds <= least[hottest]
    if workload.training or problem.budget_bytes < classes.m.min():
        assert seconds == pytest.approx(least.max())


@pytest.mark.parametrize(("copies", "dearest"), [(1, 19e9), (2, 80e9), (3, 80e9), (4, 1244e9)])
def test_too_few_copies_of_a_row_leave_a_far_reader(copies: int, dearest: float) -> None:
    topology, workload = Topology.load("2x2-a100"), Workload("inference", "raw", 64)
    classes = make_classes([900], [1], workload, topology.ranks)
    budget = (copies - 1) * float(classes.m[0])
    seconds, _ = hot_row(classes, topology, workload, budget)
    assert seconds == pytest.approx(float(classes.traffic_bytes(workload)[0]) / dearest)


@given(problems(most_rows=50, homogeneous=True))
def test_homogeneous_prices_are_the_best(problem: ClassProblem) -> None:
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    limits = (problem.capacity_bytes, problem.budget_bytes)
    assert topology.is_homogeneous(problem.capacity_bytes)
    for method in usable_methods(workload, topology.ranks, problem.budget_bytes):
        rows = pricing_items(classes, topology, workload, method)
        best = lagrangian(rows, topology, homogeneous_prices(rows, topology, *limits), *limits)
        other = solve_items(rows, topology, *limits).prices
        assert lagrangian(rows, topology, other, *limits) <= best * (1 + 1e-6) + 1e-25


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_a_row_too_hot_to_split_is_named(mode: str) -> None:
    topology = Topology.load("dgx-a100")
    workload = Workload(mode, "raw", 8192)  # type: ignore[arg-type]
    classes = make_classes([90_000, 10], [1, 1000], workload, 8)
    problem = make_problem(classes, topology, workload, 0.0)
    bound = lower_bound(classes, topology, workload, problem.capacity_bytes, 0.0)
    weight = float(classes.traffic_bytes(workload)[0])
    assert bound.hot_class == 0
    assert bound.seconds == pytest.approx(weight * 8 * topology.link_cost[0, 0])
    with_room = make_problem(classes, topology, workload, 0.1)
    split = lower_bound(
        classes, topology, workload, with_room.capacity_bytes, with_room.budget_bytes
    )
    assert split.seconds < bound.seconds


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_the_linear_program_keeps_the_limits_and_says_its_time(mode: str, ranks: int) -> None:
    problem = _unequal(mode, ranks)
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    for method in usable_methods(workload, ranks, problem.budget_bytes):
        solved = solved_by_lp(problem, method)
        np.testing.assert_allclose(solved.fraction.sum(axis=1), 1.0)
        counts = classes.rows[:, None] * solved.fraction[solved.bucket]
        sums = classes.sums(counts)
        reduce = None if method == "none" else method
        cost = evaluate(
            topology, workload, solved.holder_sets, sums, problem.capacity_bytes, reduce
        )
        assert (cost.memory_bytes <= problem.capacity_bytes * (1 + 1e-6)).all()
        assert cost.extra_bytes <= problem.budget_bytes * (1 + 1e-6) + 1e-6
        # Classes of a bucket share its fractions, and all of cost is linear in them.
        assert cost.objective_seconds == pytest.approx(solved.seconds, rel=1e-6)
    bound = lower_bound(classes, topology, workload, problem.capacity_bytes, problem.budget_bytes)
    assert bound.seconds <= cost.objective_seconds


def test_the_linear_program_for_links_lowers_the_largest_link() -> None:
    problem = _unequal("inference", 4)
    largest = {}
    for aim in ("time", "link"):
        solved = solved_by_lp(problem, "none", aim)
        sums = problem.classes.sums(problem.classes.rows[:, None] * solved.fraction[solved.bucket])
        cost = evaluate(
            problem.topology, problem.workload, solved.holder_sets, sums, problem.capacity_bytes
        )
        largest[aim] = float(cost.link_seconds.max())
        assert cost.objective_seconds == pytest.approx(solved.seconds, rel=1e-6)
    assert largest["link"] < 0.99 * largest["time"]


def test_the_bound_and_the_linear_program_take_many_unequal_ranks() -> None:
    problem = _unequal("inference", 20)
    bound = lower_bound(
        problem.classes,
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
    )
    solved = solved_by_lp(problem, "none")
    assert 0.5 * solved.seconds < bound.seconds <= solved.seconds


def _unequal(mode: str, ranks: int) -> ClassProblem:
    """A Zipf table on ranks of two nodes whose links and capacities all differ."""
    rng = np.random.default_rng(7)
    node_of = tuple(r * 2 // ranks for r in range(ranks))
    cost = np.where(np.equal.outer(node_of, node_of), 1 / 80e9, 1 / 19e9)
    np.fill_diagonal(cost, 1 / 1244e9)
    cost = cost * np.exp(0.2 * rng.standard_normal(cost.shape))
    capacity = tuple(rng.uniform(1.1, 1.5, ranks).tolist())
    topology = Topology("unequal", node_of, cost, 72e9, Latency.of_hops(5e-6), capacity=capacity)
    workload = Workload(mode, "raw", 512 * ranks)  # type: ignore[arg-type]
    return zipf_problem(topology, workload, 0.02)
