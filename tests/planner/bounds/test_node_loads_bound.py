"""The bound of the nodes' loads: never above a placement, and above the Lagrangian where it can."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.holder_sets import single_owner_sets
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.planner.bounds import hot_rows_bound as hot_rows
from oper.planner.bounds.certificate import certify
from oper.planner.bounds.lagrangian_bound import lower_bound
from oper.planner.bounds.node_loads_bound import node_loads_bound
from oper.planner.lp.pricing import pricing_items
from oper.planner.problem.problem import ClassProblem
from oper.topology.links import link_matrix
from oper.topology.topology import Topology
from tests.support.planner.instances import make_classes, make_problem, zipf_counts


@st.composite
def two_levels(draw: st.DrawFn) -> Topology:
    """Equal nodes; the farther a row, the dearer it is to read, or as dear."""
    sizes = [size for size in itertools.product(range(1, 7), repeat=2) if 2 <= np.prod(size) <= 6]
    nodes, per_node = draw(st.sampled_from(sizes))
    node_of = tuple(rank // per_node for rank in range(nodes * per_node))
    mate = draw(st.floats(1.0, 8.0))
    far = mate * draw(st.one_of(st.just(1.0), st.floats(1.0, 8.0)))
    costs = {"local": 1e-9, "same_node": mate * 1e-9, "other_node": far * 1e-9}
    return Topology("drawn", node_of, link_matrix(node_of, costs), 72e9, 1e-12)


def bound_of(problem: ClassProblem) -> float:
    items = pricing_items(problem.classes, problem.topology, problem.workload, "none")
    return node_loads_bound(items, problem.topology)


def limits(problem: ClassProblem) -> tuple:
    return (
        problem.classes,
        problem.topology,
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
    )


def hot_problem(preset: str) -> ClassProblem:
    """Training with a few rows that are each a part of a rank's time."""
    topology = Topology.load(preset)
    workload = Workload("training", "raw", 1024 * topology.ranks)
    accesses, rows = np.unique(zipf_counts(20_000, 10**6, 1.3), return_counts=True)
    classes = make_classes(
        accesses.tolist(), rows.tolist(), workload, topology.ranks, samples=10**6
    )
    return make_problem(classes, topology, workload, 0.01)


@given(two_levels(), st.sampled_from(["training", "inference"]), st.data())
def test_no_placement_of_whole_rows_is_below_it(
    topology: Topology, mode: str, data: st.DataObject
) -> None:
    workload = Workload(mode, "raw", 64)  # type: ignore[arg-type]
    powers = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    accesses = [int(1.3**power * 10) for power in powers]
    classes = make_classes(accesses, [1] * len(powers), workload, topology.ranks, 10**7)
    problem = make_problem(classes, topology, workload, 0.0)
    weight = np.repeat(classes.traffic_bytes(workload), classes.rows)
    seconds = Charges.of(topology).set_seconds(single_owner_sets(topology.ranks))
    owners = np.array(list(itertools.product(range(topology.ranks), repeat=len(weight))))
    best = (weight[:, None] * seconds[owners]).sum(axis=1).max(axis=1).min()
    assert bound_of(problem) <= best * (1 + 1e-12)


def test_a_hot_row_fills_its_node_before_it_is_cheap() -> None:
    # 2 nodes of 2 ranks, one row on each of two ranks: by hand. Together in a node, each rank owns
    # one, reads the other there, and the other node reads both from afar.
    topology = Topology(
        "four",
        (0, 0, 1, 1),
        link_matrix((0, 0, 1, 1), {"local": 1e-9, "same_node": 1e-9, "other_node": 9e-9}),
        72e9,
        1e-12,
    )
    workload = Workload("inference", "raw", 64)
    classes = make_classes([500], [2], workload, 4, 10**4)
    weight = float(classes.traffic_bytes(workload)[0])
    problem = make_problem(classes, topology, workload, 0.0)
    apart = weight * (4 * 1e-9 + 9e-9)
    assert bound_of(problem) == pytest.approx(apart, rel=1e-6)
    assert lower_bound(*limits(problem)).seconds < 0.95 * apart


@pytest.mark.parametrize("preset", ["4x8-a100", "8x8-a100", "16x8-a100"])
def test_it_is_above_the_lagrangian_where_rows_are_hot(preset: str) -> None:
    problem = hot_problem(preset)
    assert bound_of(problem) > lower_bound(*limits(problem)).seconds * 1.01


def test_many_ranks_are_bounded_without_the_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(*_: object) -> None:
        raise AssertionError("the programme was made")

    monkeypatch.setattr(hot_rows, "_Model", too_long)
    problem = hot_problem("128x8-a100")
    split = lower_bound(*limits(problem))
    certificate = certify(problem, 10 * split.seconds)
    assert certificate.bound.seconds > split.seconds * 1.01
    assert certificate.bound.note == hot_rows.TOO_LARGE.format(ranks=1024)
    assert certificate.to_json()["bound_note"] == certificate.bound.note
    assert "bound_note" not in certify(problem, split.seconds).to_json()


def test_a_programme_that_was_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hot_problem("2x4-a100")
    assert hot_rows.hot_rows_bound(*limits(problem)).note is None
    monkeypatch.setattr(hot_rows, "NODES", 0)
    monkeypatch.setattr(hot_rows, "GAP", 1e-9)
    assert hot_rows.hot_rows_bound(*limits(problem)).note == hot_rows.CUT
