"""Copies of rows too hot for one rank: where they lie, what they cost, and what they gain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.workload import Workload
from oper.planner.class_placement import homogeneous_replicas
from oper.planner.class_placement.few_copies import copies_needed, few_copies
from oper.planner.class_placement.homogeneous import place_on_homogeneous
from oper.planner.class_placement.homogeneous_replicas import choose_replicas
from oper.planner.problem.problem import ClassProblem
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.planner.instances import make_classes, make_problem


def nodes_of_slow_memory() -> Topology:
    """8 nodes of 8 ranks, whose memory is as slow as 1,024 readers make a fast one."""
    node_of = tuple(rank // 8 for rank in range(64))
    same = np.equal.outer(node_of, node_of)
    cost = np.where(same, 1 / 100e9, 1 / 25e9)
    np.fill_diagonal(cost, 1 / 100e9)
    return Topology("slow", node_of, cost, 25e9, Latency.of_hops(5e-6))


TOPOLOGY = nodes_of_slow_memory()
WORKLOAD = Workload("inference", "raw", 1024 * TOPOLOGY.ranks)


def hot_problem(hot: list[int], extra_rows: float, workload: Workload = WORKLOAD) -> ClassProblem:
    """So many accesses to single hot rows, each another class, and 10 to each of 6,400 others."""
    classes = make_classes(
        [*hot, 10], [*[1] * len(hot), 6400], workload, TOPOLOGY.ranks, samples=10**7
    )
    return make_problem(classes, TOPOLOGY, workload, extra_rows / int(classes.rows.sum()))


@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=20),
    st.integers(0, 2**32 - 1),
)
def test_every_rank_reads_a_copy_near_by_and_holders_share_all_others(
    copies: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    hot = sorted(rng.choice(10**5, len(copies), replace=False).tolist(), reverse=True)
    problem = hot_problem([h + 100 for h in hot], 1000)
    ranks, node_of = TOPOLOGY.ranks, np.array(TOPOLOGY.node_of)
    needed = np.array([*copies, 1])
    rows = np.array([*[1] * len(copies), 0])
    few = few_copies(problem, rows, needed)
    weight = problem.classes.traffic_bytes(WORKLOAD)
    served = np.zeros(ranks)
    assert few.class_of.tolist() == list(range(len(copies)))
    for source, holds, c in zip(few.sets.source, few.sets.holds, few.class_of, strict=True):
        holders = np.flatnonzero(holds)
        assert len(holders) == needed[c]
        assert len(set(node_of[holders])) == needed[c]
        assert holds[source].all()
        assert (source[holders] == holders).all()
        near = np.isin(node_of, node_of[holders])
        assert (node_of[source[near]] == node_of[near]).all()
        assert np.ptp(np.bincount(source, minlength=ranks)[holders]) <= 1
        served += weight[c] * np.bincount(source, minlength=ranks) / ranks
    np.testing.assert_allclose(few.load, served)


@given(
    st.lists(st.integers(10, 3 * 10**5), min_size=1, max_size=30, unique=True),
    st.floats(0, 300),
)
def test_copies_keep_the_budget(hot: list[int], extra_rows: float) -> None:
    problem = hot_problem(sorted(hot, reverse=True), extra_rows)
    needed = copies_needed(problem)
    assert needed.min() == 1
    assert needed.max() <= TOPOLOGY.nodes
    sets, replicas, _ = choose_replicas(problem)
    assert (replicas >= 0).all()
    assert (replicas.sum(axis=1) <= problem.classes.rows).all()
    spent = (sets.copies[TOPOLOGY.ranks :] - 1) @ replicas.T @ problem.classes.m
    assert spent <= problem.budget_bytes + 1e-6


def test_none_where_no_row_is_hot_and_in_training() -> None:
    assert (copies_needed(hot_problem([12, 11], 50)) == 1).all()
    training = Workload("training", "raw", 1024 * TOPOLOGY.ranks)
    assert (copies_needed(hot_problem([10**5], 50, training)) == 1).all()


def test_hot_rows_with_few_copies_lower_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of which each is several times a rank's share of all, and a budget that pays for a copy
    of one of them on every node."""
    problem = hot_problem([4000 + n for n in range(16)], 20)

    def slowest() -> float:
        placed = place_on_homogeneous(problem)
        counts = placed.counts.astype(np.float64)
        counts[:, : problem.ranks] += placed.striped[:, None] / problem.ranks
        cost = problem.price(placed.holder_sets, problem.classes.sums(counts))
        assert cost.extra_bytes <= problem.budget_bytes + 1e-6
        return cost.objective_seconds

    with_few = slowest()
    monkeypatch.setattr(
        homogeneous_replicas,
        "copies_needed",
        lambda problem: np.ones(len(problem.classes), dtype=np.int64),
    )
    assert with_few < 0.97 * slowest()
