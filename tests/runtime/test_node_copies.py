"""Rows with a copy on each node, on ranks that are processes: against the unsharded model, their
copies against each other, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.memory.runtime_plan import check_for_devices, check_trainable, copied_to_nodes
from tests.runtime.test_accumulate import assert_equals_reference
from tests.runtime.test_engine import assert_equals_unsharded
from tests.support.examples import examples
from tests.support.runtime import fault_cases
from tests.support.runtime.engine_cases import Case, run_case, tables_of
from tests.support.runtime.runtime_plans import random_plan

NODES = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1, 1)]


def copied_plan(case: Case, nodes: tuple[int, ...], *, pooled: float = 0.0, **options: Any) -> Plan:
    """A random plan with copies on nodes, that pools a share of the tables."""
    tables = tables_of(case)
    plan = random_plan(case.seed, tables, len(nodes), nodes=nodes, **options)
    assert copied_to_nodes(plan.layout).any()
    names = [table.name for table in tables]
    return replace(plan, pooled_tables=tuple(names[: round(pooled * len(names))]))


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.just(0),
    optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum_sgd"]),
    optimizers=st.sampled_from([(), ("sgd", "adam"), ("none", "rowwise_adagrad", "adagrad")]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    weighted=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp32", "fp16", "bf16"]),
    dims=st.sampled_from([(4,), (8, 16), (12, 128), (20, 4)]),
    rows=st.lists(st.integers(40, 300), min_size=1, max_size=4).map(tuple),
    bags=st.sampled_from(["one", "many", "mean one", "none"]),
)


@examples(12)
@given(
    cases,
    st.sampled_from(NODES),
    st.sampled_from([0.4, 1.0]),
    st.sampled_from(["raw", "distinct"]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_plan_trains_as_the_unsharded_model(ranks, case, nodes, replicated, fetch, pooled):
    """`run_case` finds no unequal copies."""
    case = replace(case, ranks=len(nodes), weighted=case.weighted and case.pooling != "none")
    options: dict[str, Any] = {"replicated": replicated, "fetch": fetch}
    assert_equals_unsharded(ranks, case, copied_plan(case, nodes, pooled=pooled, **options), nodes)


@examples(10)
@given(cases, st.sampled_from(NODES), st.sampled_from(["raw", "distinct"]))
def test_ranks_that_are_all_on_one_node(ranks, case, nodes, fetch):
    """Whatever nodes the plan has."""
    case = replace(case, ranks=len(nodes), weighted=case.weighted and case.pooling != "none")
    plan = copied_plan(case, nodes, pooled=0.5, replicated=0.7, fetch=fetch)
    assert_equals_unsharded(ranks, case, plan)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_copies_rounded_at_random_stay_equal(ranks, dtype):
    nodes = NODES[0]
    case = Case(seed=4, ranks=4, dtype=dtype, lr=0.125, rounding=True)
    assert_equals_unsharded(ranks, case, copied_plan(case, nodes, replicated=0.8), nodes)


@pytest.mark.parametrize("nodes", NODES)
def test_equal_runs_give_equal_bits(ranks, nodes):
    case = Case(seed=8, ranks=len(nodes), optimizer="adagrad", bags="many")
    plan = copied_plan(case, nodes, pooled=0.5, replicated=0.7, fetch="distinct")
    first, again = (ranks.run(case.ranks, run_case, case, plan, nodes) for _ in range(2))
    for mine, other in zip(first, again, strict=True):
        for name in ("outputs", "tables"):
            assert all(map(torch.equal, mine[name], other[name]))
        assert sum(mine["counted"]["node_copy_rows"]) > 0
        assert sum(mine["counted"]["node_copy_bytes"]) > 0


def test_accumulated_gradients_are_added_up_once(ranks):
    nodes = NODES[0]
    case = Case(seed=5, ranks=4, optimizer="adagrad", bags="many", steps=4)
    plan = copied_plan(case, nodes, replicated=0.8, fetch="distinct")
    assert_equals_reference(ranks, case, plan, [(0, 1), (2,), (3,)], nodes=nodes)


def malformed(plan: Plan, what: str) -> Plan:
    layout = plan.layout
    some = int(np.flatnonzero(copied_to_nodes(layout))[0])
    holds, base, source = layout.holds.copy(), layout.base.copy(), layout.source.copy()
    if what == "slots":
        base[some, holds[some].argmax()] += 1
    elif what == "holders":
        holds[some] = [True, True, False, False]
        source[some] = [0, 1, 1, 1]
    else:
        source[some] = source[some][::-1]
    return replace(plan, layout=replace(layout, holds=holds, base=base, source=source))


@pytest.mark.parametrize("what", ["slots", "holders", "sources"])
def test_copies_that_cannot_be_updated_together_are_refused(what):
    case = Case(seed=4, ranks=4)
    plan = copied_plan(case, NODES[0], replicated=0.8)
    check_trainable(plan)
    with pytest.raises(OperError, match="the model is to be trained by it"):
        check_trainable(malformed(plan, what))


def test_devices_refuse_them():
    case = Case(seed=4, ranks=4)
    with pytest.raises(OperError, match="keeps a copy of rows on each node"):
        check_for_devices(copied_plan(case, NODES[0], replicated=0.8), "cuda:0")


@pytest.mark.parametrize("running", [(0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 3)])
def test_ranks_on_other_nodes_are_refused(ranks, running):
    case = Case(seed=4, ranks=4)
    plans = [copied_plan(case, NODES[0], replicated=0.8)] * 4
    given = [case] * 4, plans, [{"nodes": running}] * 4
    for said in ranks.run(4, fault_cases.start_each, *given):
        assert "the plan keeps a copy of rows on one rank of each node" in said
