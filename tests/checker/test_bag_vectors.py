"""Vectors of bags between nodes, against the plan's addresses bag by bag."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import oper
from oper.base.formatting import format_digits
from oper.checker.bag_vectors import (
    TableVectors,
    bags_by_node,
    source_nodes,
    vectors_between_nodes,
)
from oper.checker.check import check
from oper.cli.plan_commands import plan_check
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


def test_a_check_counts_the_vectors_of_pooled_tables(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    bags = {name: [random.integers(0, 60, n) for n in random.integers(0, 7, 500)] for name in "abc"}
    pq.write_table(pa.table(bags), tmp_path / "log.parquet")
    profile = oper.profile(tmp_path / "log.parquet")
    topology = Topology.load("2x2-a100")
    plan = make_plan(profile, topology, Workload("training", "raw", 64))
    log = tmp_path / "log.parquet"
    plan.save(tmp_path / "plan")
    assert check(tmp_path / "plan", log).vectors == ()
    replace(plan, pooled_tables=("a", "c")).save(tmp_path / "pooled")
    findings = check(tmp_path / "pooled", log)
    assert findings.ok
    assert check(tmp_path / "pooled").vectors == ()
    vectors = dict.fromkeys("ac", 0)
    for name in vectors:
        for bag, rank in itertools.product(bags[name], range(4)):
            owner = plan.layout.addresses(plan.table_index(name), bag, rank) >> SLOT_BITS
            vectors[name] += bool((np.where(owner == LOCAL, rank, owner) // 2 != rank // 2).any())
    assert findings.vectors == tuple(TableVectors(n, 500, v / 2000) for n, v in vectors.items())
    assert findings.to_json()["vectors"][1] == {
        "table": "c",
        "bags": 500,
        "a_bag": vectors["c"] / 2000,
    }
    app = typer.Typer()
    plan_check.add_to(app)
    said = CliRunner().invoke(app, [str(tmp_path / "pooled"), str(log)]).stdout
    a_bag = format_digits(vectors["a"] / 2000, 4)
    assert f"table a: a bag needs {a_bag} vectors of other nodes (500 bags)" in said
