"""The bound with hot rows in whole numbers, between the lower bound and the exact reference."""

import numpy as np
import pytest
from hypothesis import assume, given, reject
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.planner.baselines import milp_solver
from oper.planner.bounds import hot_rows_bound as hot_rows
from oper.planner.bounds.hot_rows_bound import hot_rows_bound
from oper.planner.bounds.lagrangian_bound import lower_bound
from oper.planner.problem.problem import ClassProblem
from oper.topology.topology import Topology
from tests.support.examples import at_least, examples
from tests.support.planner.instances import (
    make_classes,
    make_problem,
    topologies,
    zipf_counts,
)
from tests.support.planner.latencies import any_latency

WIDTHS = ((64, 64), (256, 260))


@st.composite
def rows_problems(draw: st.DrawFn, mode: str, extra_memory: float) -> ClassProblem:
    """A few rows, some much hotter than others, each a class of its own."""
    topology = draw(any_latency(topologies(homogeneous=draw(st.booleans()))))
    workload = Workload(mode, draw(st.sampled_from(["raw", "distinct"])), 64)  # type: ignore[arg-type]
    size = draw(st.integers(1, 10))
    powers = draw(st.lists(st.integers(0, 99), min_size=size, max_size=size, unique=True))
    accesses = [int(1.08**power * 10 + power) for power in powers]
    width = draw(st.lists(st.integers(0, 1), min_size=size, max_size=size))
    classes = make_classes(accesses, [1] * size, workload, topology.ranks, 30000, WIDTHS, width)
    try:
        return make_problem(classes, topology, workload, extra_memory)
    except OperError:  # drawn capacities in which the rows do not fit
        reject()


def limits(problem: ClassProblem) -> tuple:
    return (
        problem.classes,
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
    )


def best_placement(problem: ClassProblem) -> milp_solver.Reference:
    """The solver's best placement: the optimum, but where its time was up. Examples of which no
    placement keeps the limits are left out."""
    sums = problem.classes.sums(np.eye(len(problem.classes)))
    _, topology, workload, capacity, budget = limits(problem)
    reference = milp_solver.solve(
        sums, topology, workload, capacity, budget, time_limit_seconds=20, relative_gap=1e-7
    )
    assume(reference.holder_sets is not None)
    return reference


@pytest.mark.parametrize(("mode", "extra_memory"), [("inference", 0.0), ("training", 0.4)])
@at_least(15)
@examples(15)
@given(st.data())
def test_hot_rows_bound_is_between_lower_bound_and_optimum(
    mode: str, extra_memory: float, data: st.DataObject
) -> None:
    problem = data.draw(rows_problems(mode, extra_memory))
    reference = best_placement(problem)
    low, bound = lower_bound(*limits(problem)), hot_rows_bound(*limits(problem))
    assert low.seconds <= bound.seconds <= reference.objective_seconds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot_rows, "HEAD_SHARE", 0.0)
        bound = hot_rows_bound(*limits(problem))
    # Every row that takes time is in whole numbers: what is left is the solvers' gaps.
    assert bound.seconds >= reference.bound_seconds * (1 - 0.01)


@pytest.mark.parametrize(("mode", "extra_memory"), [("inference", 0.0), ("training", 0.4)])
@at_least(12)
@examples(12)
@given(data=st.data())
def test_a_bucketed_tail_keeps_the_bound_valid(
    mode: str, extra_memory: float, data: st.DataObject
) -> None:
    problem = data.draw(rows_problems(mode, extra_memory))
    reference = best_placement(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hot_rows, "HEAD_ROWS", 2)
        patch.setattr(hot_rows, "TAIL_RATIO", 5.0)
        assert hot_rows_bound(*limits(problem)).seconds <= reference.objective_seconds


@pytest.mark.parametrize("preset", ["dgx-a100", "2x4-a100"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_hot_row_lifts_the_bound(preset: str, mode: str) -> None:
    topology, workload = Topology.load(preset), Workload(mode, "raw", 8192)  # type: ignore[arg-type]
    accesses, rows = np.unique(zipf_counts(20_000, 10**6, 2.0), return_counts=True)
    classes = make_classes(accesses.tolist(), rows.tolist(), workload, 8, samples=10**6)
    problem = make_problem(classes, topology, workload, 0.0)
    low, bound = lower_bound(*limits(problem)), hot_rows_bound(*limits(problem))
    # The hottest row alone is 3/5 of all work. Its owner serves it M times and fetches the rest.
    hot = float(classes.traffic_bytes(workload)[0])
    rest = float(classes.rows @ classes.traffic_bytes(workload)) - hot
    nearest = np.sort(topology.link_cost[0])[1]
    by_hand = 8 * hot * topology.link_cost[0, 0] + rest * nearest
    assert bound.seconds > low.seconds * 1.001
    assert bound.hot_class == 0
    assert bound.seconds >= by_hand * (1 - 1e-4)


def test_copies_in_inference_are_left_to_the_lower_bound() -> None:
    workload = Workload("inference", "raw", 64)
    classes = make_classes([9000, 10], [1, 50], workload, 8, samples=10**4)
    problem = make_problem(classes, Topology.load("dgx-a100"), workload, 0.5)
    assert hot_rows_bound(*limits(problem)) == lower_bound(*limits(problem))
