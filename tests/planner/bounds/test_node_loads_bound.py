"""The bound of the nodes' loads: never above a placement, and above the Lagrangian where it can."""

import itertools
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from oper.analysis import wording
from oper.cost.holder_sets import single_owner_sets
from oper.cost.workload import Workload
from oper.plan.certificate import BoundNote
from oper.planner.bounds import hot_rows_bound as hot_rows
from oper.planner.bounds.certify import certify
from oper.planner.bounds.lagrangian_bound import lower_bound
from oper.planner.bounds.node_loads_bound import node_loads_bound
from oper.planner.lp.pricing import pricing_items
from oper.planner.problem.problem import ClassProblem
from oper.topology.latency import Latency
from oper.topology.links import SHARED, NodeMemory, link_matrix
from oper.topology.topology import Topology
from tests.support.planner.instances import make_classes, make_problem, zipf_counts

MEMORIES = get_args(NodeMemory)


@st.composite
def two_levels(draw: st.DrawFn) -> Topology:
    """Equal nodes, of linked or shared memory; the farther a row, the dearer it is to read, or as
    dear."""
    sizes = [size for size in itertools.product(range(1, 7), repeat=2) if 2 <= np.prod(size) <= 6]
    nodes, per_node = draw(st.sampled_from(sizes))
    node_of = tuple(rank // per_node for rank in range(nodes * per_node))
    mate = draw(st.one_of(st.just(1.0), st.floats(1.0, 8.0)))  # 1 as hosts are measured
    far = mate * draw(st.one_of(st.just(1.0), st.floats(1.0, 8.0)))
    costs = {"local": 1e-9, "same_node": mate * 1e-9, "other_node": far * 1e-9}
    memory = (draw(st.sampled_from(MEMORIES)),) * nodes
    return Topology(
        "drawn", node_of, link_matrix(node_of, costs), 72e9, Latency.of_hops(1e-12), memory=memory
    )


def hosts(nodes: int, ranks_per_node: int, other_node: float) -> Topology:
    """Hosts whose ranks share memory; rows of another one cost `other_node` times as much."""
    node_of = tuple(rank // ranks_per_node for rank in range(nodes * ranks_per_node))
    costs = {"local": 1 / 8e9, "same_node": 1 / 8e9, "other_node": other_node / 8e9}
    cost = link_matrix(node_of, costs)
    return Topology("hosts", node_of, cost, 2e9, Latency.of_hops(5e-6), memory=(SHARED,) * nodes)


def bound_of(problem: ClassProblem) -> float | None:
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


def hot_problem(
    topology: Topology, extra_memory: float = 0.01, mode: str = "training"
) -> ClassProblem:
    """A few rows that are each a part of a rank's time."""
    workload = Workload(mode, "raw", 1024 * topology.ranks)  # type: ignore[arg-type]
    accesses, rows = np.unique(zipf_counts(20_000, 10**6, 1.3), return_counts=True)
    classes = make_classes(
        accesses.tolist(), rows.tolist(), workload, topology.ranks, samples=10**6
    )
    return make_problem(classes, topology, workload, extra_memory)


@given(two_levels(), st.sampled_from(["training", "inference"]), st.data())
def test_no_placement_of_whole_rows_is_below_it(
    topology: Topology, mode: str, data: st.DataObject
) -> None:
    workload = Workload(mode, "raw", 64)  # type: ignore[arg-type]
    powers = data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    accesses = [int(1.3**power * 10) for power in powers]
    classes = make_classes(accesses, [1] * len(powers), workload, topology.ranks, 10**7)
    problem = make_problem(classes, topology, workload, 0.0)
    traffic, sets = classes.traffic(topology, workload), single_owner_sets(topology.ranks)
    rows = np.repeat(np.arange(len(classes)), classes.rows)
    owners = np.array(list(itertools.product(range(topology.ranks), repeat=len(rows))))
    seconds = traffic.set_seconds(rows, sets, owners).sum(axis=1)
    bound = bound_of(problem)
    event("made" if bound is not None else "none")
    assert bound is None or bound <= seconds.max(axis=1).min() * (1 + 1e-12)


def test_a_hot_row_fills_its_node_before_it_is_cheap() -> None:
    # 2 nodes of 2 ranks, one row on each of two ranks: by hand. Together in a node, each rank owns
    # one, reads the other there, and the other node reads both from afar.
    topology = Topology(
        "four",
        (0, 0, 1, 1),
        link_matrix((0, 0, 1, 1), {"local": 1e-9, "same_node": 1e-9, "other_node": 9e-9}),
        72e9,
        Latency.of_hops(1e-12),
    )
    workload = Workload("inference", "raw", 64)
    classes = make_classes([500], [2], workload, 4, 10**4)
    weight = float(classes.traffic_bytes(workload)[0])
    problem = make_problem(classes, topology, workload, 0.0)
    apart = weight * (4 * 1e-9 + 9e-9)
    assert bound_of(problem) == pytest.approx(apart, rel=1e-6)
    assert lower_bound(*limits(problem)).seconds < 0.95 * apart


@pytest.mark.parametrize(
    ("topology", "lifted"),
    [
        (Topology.load("4x8-a100"), 1.005),
        (Topology.load("8x8-a100"), 1.01),
        (Topology.load("16x8-a100"), 1.01),
        (hosts(4, 4, 2.0), 1.3),
        (hosts(4, 8, 8.0), 1.05),
        (hosts(16, 4, 8.0), 1.1),
    ],
    ids=lambda given: given.name if isinstance(given, Topology) else "",
)
def test_it_is_above_the_lagrangian_where_rows_are_hot(topology: Topology, lifted: float) -> None:
    problem = hot_problem(topology, 0.0)
    bound = bound_of(problem)
    assert bound is not None
    assert bound > lower_bound(*limits(problem)).seconds * lifted


def test_hosts_that_share_memory_by_hand() -> None:
    # 2 hosts of 2 ranks, 2 alike rows that all touch in each batch. A read takes its owner 1, and 1
    # for each rank of the other host; a gradient 1 for each rank; from afar both take 8. In one
    # host, the other's ranks pay 2·(8 + 8). One in each, its owner pays 3 + 4, and 8 + 8.
    topology = hosts(2, 2, 8.0)
    workload = Workload("training", "distinct", 10**6)
    classes = make_classes([10**4], [2], workload, 4, samples=10**4)
    # As if there were no relays, which read at the owner's position.
    problem = make_problem(classes, topology, workload, 0.0)
    assert bound_of(problem) is None
    problem = replace(problem, topology=topology, classes=classes)
    gradient = float(classes.S[0] * classes.D[0])
    assert gradient == pytest.approx(float(classes.S[0] * classes.R[0]))
    assert bound_of(problem) == pytest.approx(23 * gradient / 8e9, rel=1e-6)


def test_where_reads_are_nearly_all_they_decide() -> None:
    # 4 alike rows, each read 1,024 times by a rank for each gradient: one on each of 2 x 2 ranks. A
    # read of them takes a rank 3 for its own, 1 for its mate's and 2·1.5; gradients 1 more.
    topology = hosts(2, 2, 1.5)
    workload = Workload("training", "raw", 4096)
    classes = make_classes([10**4], [4], workload, 4, samples=10**4)
    problem = make_problem(classes, topology, workload, 0.0)
    read = float(classes.S[0] * classes.R[0])
    assert bound_of(problem) == pytest.approx(7 * read / 8e9, rel=2e-3)


def test_many_ranks_are_bounded_without_the_programme(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_long(*_: object) -> None:
        raise AssertionError("the programme was made")

    monkeypatch.setattr(hot_rows, "_Model", too_long)
    problem = hot_problem(Topology.load("128x8-a100"))
    split = lower_bound(*limits(problem))
    certificate = certify(problem, 10 * split.seconds)
    assert certificate.lower_bound_seconds > split.seconds * 1.01
    assert certificate.bound_note == BoundNote.HOT_ROWS_BY_NODES
    said = wording.bound_note(certificate)
    assert said is not None
    assert "too large for so many ranks" in said
    assert certify(problem, split.seconds).bound_note is None
    assert wording.bound_note(certify(problem, split.seconds)) is None


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_note_says_what_the_bound_knows(mode: str) -> None:
    """Of nodes only where `node_loads_bound` was made: not on ranks of different costs."""
    shared = hosts(16, 4, 8.0)
    links = shared.link_cost.copy()
    links[0, 1:] *= 1.001
    for topology, known in [
        (shared, BoundNote.HOT_ROWS_BY_NODES),
        (replace(shared, memory=()), BoundNote.HOT_ROWS_BY_NODES),
        (replace(shared, link_cost=links), BoundNote.HOT_ROWS_ALONE),
    ]:
        problem = hot_problem(topology, 0.0, mode)
        assert (bound_of(problem) is None) == (known == BoundNote.HOT_ROWS_ALONE)
        assert hot_rows.hot_rows_bound(*limits(problem)).note == known


def test_where_replicas_decide_no_row_is_whole_on_a_node() -> None:
    cheap: dict[str, Any] = {"allreduce_bandwidth": 1e15, "latency": Latency.of_hops(1e-12)}
    problem = hot_problem(replace(hosts(16, 8, 8.0), memory=(), **cheap), 0.02)
    found = hot_rows.hot_rows_bound(*limits(problem))
    assert found.seconds < (bound_of(problem) or 0.0)  # of plans without replicas
    assert found.note == BoundNote.HOT_ROWS_ALONE


def test_a_programme_that_was_stopped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hot_problem(Topology.load("2x4-a100"))
    assert hot_rows.hot_rows_bound(*limits(problem)).note is None
    monkeypatch.setattr(hot_rows, "NODES", 0)
    monkeypatch.setattr(hot_rows, "GAP", 1e-9)
    assert hot_rows.hot_rows_bound(*limits(problem)).note == BoundNote.SEARCH_CUT
