"""Vectors of bags between nodes, against the plan's addresses bag by bag."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.checker.bag_vectors import bags_by_node, source_nodes, vectors_between_nodes
from oper.cost.workload import Workload
from oper.plan.layout import LOCAL, SLOT_BITS
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.topology.topology import Topology
from tests.support.planner.profiles import make_profile

Mode = Literal["training", "inference"]


def plan_of(mode: Mode, copies: float) -> Plan:
    topology = Topology.load("2x3-a100")
    workload = Workload(mode, "raw", 60)
    return make_plan(make_profile(3), topology, workload, PlanSettings(extra_memory=copies))


PLANS = {(mode, c): plan_of(mode, c) for mode in ("training", "inference") for c in (0.0, 0.3, 2.0)}


@given(
    case=st.sampled_from(sorted(PLANS)),
    table=st.integers(0, 3),
    lengths=st.lists(st.integers(0, 6), max_size=12),
    seed=st.integers(0, 1000),
)
def test_vectors_are_those_of_the_addresses(
    case: tuple[Mode, float], table: int, lengths: list[int], seed: int
) -> None:
    plan = PLANS[case]
    node_of = np.array(plan.topology.node_of)
    rows = np.random.default_rng(seed).integers(0, plan.tables[table].rows, sum(lengths))
    expected = np.zeros((plan.ranks, plan.topology.nodes), np.int64)
    for rank in range(plan.ranks):
        owner = plan.layout.addresses(table, rows, rank) >> SLOT_BITS
        nodes = node_of[np.where(owner == LOCAL, rank, owner)]
        for bag in np.split(nodes, np.cumsum(lengths)[:-1]) if lengths else []:
            expected[rank, list(set(bag.tolist()))] += 1
    source = source_nodes(plan.layout, node_of, table, rows)
    found = bags_by_node(source, np.array(lengths, dtype=np.int64), plan.topology.nodes)
    np.testing.assert_array_equal(found, expected)
    others = [expected[rank, 1 - node_of[rank]] for rank in range(plan.ranks)]
    assert vectors_between_nodes(found, node_of).tolist() == others


def test_copies_of_some_plans_are_read_at_home() -> None:
    """Or the test above would say nothing of holder sets."""
    layout = PLANS["inference", 2.0].layout
    assert layout.listed
    assert (layout.holds.sum(axis=1) > 1).any()


def test_many_bags_are_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = PLANS["inference", 0.3]
    node_of = np.array(plan.topology.node_of)
    random = np.random.default_rng(0)
    lengths = random.integers(0, 5, 50)
    source = source_nodes(plan.layout, node_of, 0, random.integers(0, 40, lengths.sum()))
    whole = bags_by_node(source, lengths, 2)
    monkeypatch.setattr("oper.checker.bag_vectors._CELLS", 14)
    np.testing.assert_array_equal(bags_by_node(source, lengths, 2), whole)
