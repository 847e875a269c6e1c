"""Repaired capacities: what is kept, and that a repair is found wherever there is room for it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.holder_sets import everywhere_set, single_owner_sets
from oper.cost.workload import Workload
from oper.plan.settings import Limits, PlanSettings
from oper.planner.problem.problem import ClassProblem
from oper.planner.row_placement.capacity_repair import keep_capacity, memory_bytes
from oper.topology.topology import Topology
from tests.support.planner.instances import make_classes

TOPOLOGY = Topology.load("cpu:4")
WORKLOAD = Workload("inference", "raw", 64)


def problem_of(accesses, rows, width, capacity) -> ClassProblem:
    classes = make_classes(accesses, rows, WORKLOAD, 4, 1000, ((16, 20), (64, 68)), width)
    capacity = np.asarray(capacity, dtype=np.float64)
    return ClassProblem(PlanSettings(), Limits(0.0), classes, TOPOLOGY, WORKLOAD, capacity, 1e9)


@given(st.integers(0, 2**32 - 1))
def test_rows_are_kept_and_capacities_wherever_a_row_of_each_width_is_spare(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    accesses = rng.choice(500, size, replace=False).tolist()
    problem = problem_of(
        accesses, rng.integers(1, 9, size).tolist(), rng.integers(0, 2, size).tolist(), np.ones(4)
    )
    classes, sets = problem.classes, single_owner_sets(4) + everywhere_set(4)
    counts = np.stack([rng.multinomial(n, np.full(5, 1 / 5)) for n in classes.rows])
    held = memory_bytes(classes, sets, counts)
    # Any shares of what is held, and room for a row of each width beside them.
    capacity = held.sum() * rng.dirichlet(np.full(4, 3.0)) + sum(classes.width_memory)
    problem = ClassProblem(PlanSettings(), Limits(0.0), classes, TOPOLOGY, WORKLOAD, capacity, 1e9)
    copies = counts[:, 4].sum()
    assert keep_capacity(problem, sets, counts)
    assert (memory_bytes(classes, sets, counts) <= capacity).all()
    assert counts.min() >= 0
    assert (counts.sum(axis=1) == classes.rows).all()
    assert counts[:, 4].sum() <= copies


def test_the_coldest_rows_go_to_the_rank_with_most_room() -> None:
    problem = problem_of([9, 5, 1], [4, 4, 4], [0, 0, 0], [200, 60, 100, 40])
    counts = np.array([[4, 0, 0, 0], [4, 0, 0, 0], [4, 0, 0, 0]])
    assert keep_capacity(problem, single_owner_sets(4), counts)
    assert counts.tolist() == [[4, 0, 0, 0], [4, 0, 0, 0], [2, 0, 2, 0]]


def test_what_fits_stays_as_it_is_and_what_cannot_be_moved_is_said() -> None:
    problem = problem_of([9], [3], [0], [20, 20, 20, 20])
    counts = np.array([[1, 1, 1, 0]])
    assert keep_capacity(problem, single_owner_sets(4), counts)
    assert counts.tolist() == [[1, 1, 1, 0]]
    assert not keep_capacity(problem, single_owner_sets(4), counts, np.array([1.0, 0, 0, 20]))


def test_a_rank_of_copies_alone_gives_them_up() -> None:
    sets = single_owner_sets(4) + everywhere_set(4)
    problem = problem_of([9, 5], [1, 1], [0, 0], [40, 40, 40, 20])
    counts = np.array([[0, 0, 0, 0, 1], [0, 0, 0, 0, 1]])
    assert keep_capacity(problem, sets, counts)
    assert counts.tolist() == [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
