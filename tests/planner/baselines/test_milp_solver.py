"""The mixed integer reference against enumeration, and between the bound and any placement."""

import time
from itertools import product
from typing import Literal

import numpy as np
import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.holder_sets import HolderSets, everywhere_set, single_owner_sets
from oper.cost.objective import evaluate
from oper.cost.workload import Workload
from oper.planner.baselines import milp_solver
from oper.planner.bounds.lagrangian_bound import lower_bound
from oper.planner.problem.problem import ClassProblem
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.examples import at_least, examples
from tests.support.planner.instances import make_classes, make_problem, topologies, workloads
from tests.support.planner.latencies import any_latency

WIDTHS = ((64, 64), (256, 260))
EXACT = 1e-9


@st.composite
def rows_problems(draw: st.DrawFn, most_rows: int, most_ranks: int = 4) -> ClassProblem:
    """A few rows, each a class of its own: none is accessed as often as another."""
    topology = draw(any_latency(topologies(most_ranks, homogeneous=draw(st.booleans()))))
    workload = draw(workloads)
    size = draw(st.integers(1, most_rows))
    accesses = draw(st.lists(st.integers(0, 3000), min_size=size, max_size=size, unique=True))
    width = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    classes = make_classes(accesses, [1] * size, workload, topology.ranks, 1000, WIDTHS, width)
    try:
        return make_problem(classes, topology, workload, draw(st.sampled_from([0.0, 0.3, 1.0])))
    except OperError:  # drawn capacities in which the rows do not fit
        reject()


def solved(
    problem: ClassProblem, relative_gap: float = EXACT, time_limit_seconds: float = 20
) -> milp_solver.Reference:
    """The reference with one row a partition."""
    return milp_solver.solve(
        problem.classes.sums(np.eye(len(problem.classes))),
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
        time_limit_seconds,
        relative_gap,
    )


def choices(problem: ClassProblem) -> HolderSets:
    """Every group a row may be in, with all ways of reading from its holders, each of which some
    rank reads from."""
    ranks = problem.topology.ranks
    if problem.workload.training:
        return single_owner_sets(ranks) + everywhere_set(ranks)
    sets = []
    for path in product(range(ranks), repeat=ranks):
        holds = np.zeros(ranks, dtype=bool)
        holds[list(path)] = True
        sets.append((path, holds))
    paths, holds_all = zip(*sets, strict=True)
    return HolderSets(np.array(paths, dtype=np.uint16), np.array(holds_all))


def price(problem: ClassProblem, sets: HolderSets) -> float:
    """The objective of rows in `groups`, one each; infinite outside the limits."""
    classes = problem.classes
    sums = classes.sums(np.eye(len(classes)))
    cost = evaluate(problem.topology, problem.workload, sets, sums, problem.capacity_bytes)
    fits = cost.feasible and cost.extra_bytes <= problem.budget_bytes
    return cost.objective_seconds if fits else np.inf


@at_least(25)
@examples(25)
@given(rows_problems(most_rows=3, most_ranks=3))
def test_the_optimum_is_the_least_of_all_placements(problem: ClassProblem) -> None:
    sets = choices(problem)
    every = product(range(len(sets)), repeat=len(problem.classes))
    least = min(price(problem, sets.take(list(chosen))) for chosen in every)
    reference = solved(problem)
    if least == np.inf:
        assert reference.status == "infeasible"
        assert reference.holder_sets is None
    else:
        assert reference.status == "optimal"
        assert reference.objective_seconds == pytest.approx(least, rel=1e-6, abs=1e-25)
        assert reference.holder_sets is not None
        assert price(problem, reference.holder_sets) == reference.objective_seconds
        assert reference.bound_seconds <= least * (1 + 1e-6) + 1e-25


@at_least(15)
@examples(20)
@given(rows_problems(most_rows=10), st.data())
def test_bound_below_optimum_below_placements(problem: ClassProblem, data: st.DataObject) -> None:
    sets, size = choices(problem), len(problem.classes)
    index = st.integers(0, len(sets) - 1)
    chosen = data.draw(st.lists(index, min_size=size, max_size=size))
    # Within a second or not: what is asserted holds for any incumbent and its bound.
    reference = solved(problem, relative_gap=1e-6, time_limit_seconds=1)
    assume(reference.holder_sets is not None)
    limits = (problem.capacity_bytes, problem.budget_bytes)
    bound = lower_bound(problem.classes, problem.topology, problem.workload, *limits)
    assert bound.seconds <= reference.objective_seconds
    # 1 if the solver has no bound yet, as on a busy machine.
    assert 0 <= reference.gap <= (1e-5 if reference.status == "optimal" else 1)
    placed = price(problem, sets.take(chosen))
    assert reference.bound_seconds <= placed * (1 + 1e-6)
    if reference.status == "optimal":
        assert reference.objective_seconds <= placed * (1 + 1e-5)


@pytest.mark.parametrize("preset", ["2x2-a100", "1x4-a100"])
def test_ordering_homogeneous_ranks_keeps_the_even_placement(preset: str) -> None:
    topology, workload = Topology.load(preset), Workload("inference", "raw", 400)
    classes = make_classes([100], [8], workload, 4)
    problem = make_problem(classes, topology, workload, 0.0)
    limits = (problem.capacity_bytes, 0.0)
    reference = milp_solver.solve(
        classes.sums(np.ones((1, 8))), topology, workload, *limits, 20, EXACT
    )
    assert reference.cost is not None
    assert reference.cost.dob.lookups == pytest.approx(1.0)


def _hard() -> ClassProblem:
    """Many rows of odd weights on unequal ranks: an optimum takes long to prove."""
    rng = np.random.default_rng(3)
    cost = np.exp(rng.standard_normal((6, 6)) * 0.3) / 240e9
    topology = Topology("unequal", (0,) * 6, cost, 235e9, Latency.of_hops(2e-6))
    workload = Workload("inference", "raw", 600)
    accesses = rng.choice(5000, 60, replace=False)
    classes = make_classes(accesses.tolist(), [1] * 60, workload, 6)
    return make_problem(classes, topology, workload, 0.2)


def test_a_time_limit_is_reported_with_a_valid_bound() -> None:
    problem = _hard()
    reference = milp_solver.solve(
        problem.classes.sums(np.eye(len(problem.classes))),
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
        time_limit_seconds=2,
        relative_gap=0.0,
    )
    assert reference.status == "time_limit"
    assert 0 <= reference.bound_seconds <= reference.objective_seconds
    assert reference.gap > 0


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_building_the_programme_is_a_part_of_the_time(
    mode: Literal["training", "inference"],
) -> None:
    """On 64 ranks it takes many seconds."""
    topology, workload = Topology.load("8x8-a100"), Workload(mode, "raw", 6400)
    accesses = list(range(1, 201))
    classes = make_classes(accesses, [1] * 200, workload, 64)
    problem = make_problem(classes, topology, workload, 1.0)
    limits = (problem.capacity_bytes, problem.budget_bytes)
    begun = time.process_time()
    reference = milp_solver.solve(classes.sums(np.eye(200)), topology, workload, *limits, 0.5)
    assert time.process_time() - begun < 4
    assert (reference.status, reference.holder_sets) == ("time_limit", None)
    assert reference.bound_seconds == 0


def test_capacities_that_hold_no_placement_are_infeasible() -> None:
    topology = Topology.load("cpu:2")
    workload = Workload("inference", "raw", 10)
    classes = make_classes([30, 20, 10], [1, 1, 1], workload, 2)
    sums = classes.sums(np.eye(3))
    reference = milp_solver.solve(sums, topology, workload, np.array([102.0, 102.0]), 0.0, 5)
    assert reference.status == "infeasible"
    assert reference.cost is None
    assert reference.objective_seconds == np.inf
