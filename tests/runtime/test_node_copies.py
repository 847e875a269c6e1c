"""Training of rows with one copy on each node, on ranks that are processes: against the unsharded
model, to the bit against the order of additions that is said, and what is counted."""

import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.memory.runtime_plan import NOT_FOR_TRAINING, check_trainable
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.runtime.test_accumulate import assert_equals_reference
from tests.runtime.test_engine import assert_equals_unsharded
from tests.support.examples import examples
from tests.support.runtime import fault_cases, node_copy_cases, pooled_cases, relay_cases
from tests.support.runtime.engine_cases import Case, run_case, tables_of
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan

NODES = [(0, 0, 1, 1), (0, 1, 1, 0), (0, 0, 0, 1, 1, 1), (0, 1, 2, 2, 1, 0)]
FETCHES = [("raw", 0.0, "sgd"), ("distinct", 0.0, "rowwise_adagrad"), ("raw", 1.0, "adam")]
FETCHES += [("distinct", 0.5, "rowwise_adagrad")]


def copying_plan(
    case: Case, nodes: tuple[int, ...], pooled: float = 0.0, replicated: float = 0.6, **options: Any
) -> Plan:
    """A random plan with copies on each of these nodes, that pools a share of the tables, the
    first."""
    tables = tables_of(case)
    plan = random_plan(case.seed, tables, len(nodes), nodes=nodes, replicated=replicated, **options)
    names = [table.name for table in tables]
    return replace(plan, pooled_tables=tuple(names[: round(pooled * len(names))]))


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(("fetch", "pooled", "optimizer"), FETCHES)
def test_copies_on_each_node_train_as_the_unsharded_model(ranks, nodes, fetch, pooled, optimizer):
    case = Case(seed=5, ranks=len(nodes), optimizer=optimizer, rows=(50, 1, 200, 40))
    plan = copying_plan(case, nodes, pooled, fetch=fetch)
    found = assert_equals_unsharded(ranks, case, plan, nodes)
    assert sum(sum(result["counted"]["node_copy_rows"]) for result in found) > 0


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.just(4),
    optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum_sgd"]),
    optimizers=st.sampled_from([(), ("sgd", "adam"), ("none", "rowwise_adagrad", "adagrad")]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    weighted=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp32", "fp16", "bf16"]),
    dims=st.sampled_from([(4,), (8, 16), (12, 128), (20, 5, 4)]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    bags=st.sampled_from(["one", "many", "mean one", "none"]),
    int32=st.booleans(),
    rounding=st.booleans(),
).map(
    lambda case: replace(
        case,
        lr=0.125,
        weighted=case.weighted and case.pooling != "none",
        rounding=case.rounding and case.dtype != "fp32" and not case.optimizers,
    )
)


@examples(20)
@given(
    cases,
    st.sampled_from([(0, 0, 1, 1), (0, 1, 0, 1)]),
    st.sampled_from([0.3, 1.0]),
    st.sampled_from(["raw", "distinct"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
)
def test_any_plan_trains_as_the_unsharded_model(
    ranks, case, nodes, replicated, fetch, pooled, idle
):
    """`run_case` finds all copies equal."""
    options: dict[str, Any] = {"fetch": fetch, "idle": (0,) if idle else ()}
    plan = copying_plan(case, nodes, pooled, replicated, **options)
    assert_equals_unsharded(ranks, case, plan, nodes)


@examples(10)
@given(cases, st.sampled_from(NODES), st.sampled_from(["raw", "distinct"]))
def test_ranks_that_are_all_on_one_node(ranks, case, nodes, fetch):
    """Whatever nodes the plan has."""
    case = replace(case, ranks=len(nodes))
    plan = copying_plan(case, nodes, 0.5, 0.7, fetch=fetch)
    assert_equals_unsharded(ranks, case, plan)


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize(("fetch", "pooled"), [("raw", 0.0), ("distinct", 0.0), ("distinct", 0.5)])
def test_runs_are_bit_equal(ranks, nodes, fetch, pooled):
    case = Case(seed=6, ranks=len(nodes), pooling="mean", optimizer="adam", rows=(300, 9, 80))
    plan = copying_plan(case, nodes, pooled, fetch=fetch)
    arguments = (pooled_cases.train_scattered, case, plan, nodes)
    found, again = (ranks.run(case.ranks, *arguments) for _ in range(2))
    for mine, other in zip(found, again, strict=True):
        for name in ("tables", "outputs"):
            assert all(map(torch.equal, mine[name], other[name]))
        # Whichever copy a rank reads.
        assert all(map(torch.equal, mine["tables"], found[0]["tables"]))


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_gradients_are_added_in_the_order_that_is_said(ranks, nodes, fetch):
    case = Case(
        seed=3, ranks=len(nodes), pooling="none", plain=True, lr=1.0, dims=(5, 8), rows=(60, 9, 40)
    )
    plan = copying_plan(case, nodes, fetch=fetch)
    found = ranks.run(case.ranks, relay_cases.train_every_row, case, plan, nodes)
    scale = np.float32(1 / case.ranks)
    for n, table in enumerate(plan.tables):
        mine = [
            scale * relay_cases.row_gradient(r, n, table.rows, table.dim) for r in range(case.ranks)
        ]
        held, slots = node_copy_cases.copies(plan, n)
        number, members = held.sum(axis=0), node_copy_cases.members_of(nodes)
        chosen = (number > 1) & (number < case.ranks)
        assert n == 1 or chosen.any()
        slot = np.where(held, slots, -1).max(axis=0)
        total = np.empty_like(mine[0])
        for home in range(len(members)):  # which adds its own node's one by one
            terms = [
                [mine[r] for r in of] if m == home else [_sum([mine[r] for r in of])]
                for m, of in enumerate(members)
            ]
            summed = _sum([term for of_node in terms for term in of_node])
            total[slot % len(members) == home] = summed[slot % len(members) == home]
        for of_rank in found:
            assert of_rank[n].numpy()[chosen].tobytes() == (-total[chosen]).tobytes()


def _sum(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 1, 1, 2, 2)])
@pytest.mark.parametrize(("fetch", "pooled"), [("raw", 0.0), ("distinct", 0.4)])
def test_accumulated_gradients_and_frozen_tables(ranks, nodes, fetch, pooled):
    case = Case(
        seed=1, ranks=len(nodes), optimizers=("adagrad", "none", "adam"), weighted=True,
        rows=(50, 30, 200, 60, 40), dims=(8,),
    )  # fmt: skip
    plan = copying_plan(case, nodes, pooled, fetch=fetch)
    assert_equals_reference(ranks, case, plan, ((0, 1), (2,), (3, 4, 5), (6,)), nodes=nodes)


@pytest.mark.parametrize("nodes", NODES)
def test_counters_count_what_holders_send_each_other(ranks, nodes):
    case = Case(seed=9, ranks=len(nodes), rows=(60, 5, 200))
    plan = copying_plan(case, nodes, fetch="distinct")
    found = ranks.run(case.ranks, run_case, case, plan, nodes)
    rows, bytes = node_copy_cases.sent(case, plan, nodes)
    for name, expected in (("node_copy_rows", rows), ("node_copy_bytes", bytes)):
        counted = [result["counted"][name] for result in found]
        np.testing.assert_array_equal(counted, expected)


@pytest.mark.parametrize(("fetch", "pooled"), [("raw", 0.0), ("distinct", 0.0), ("raw", 1.0)])
def test_nothing_else_crosses_the_network_where_every_row_is_in_the_node(ranks, fetch, pooled):
    nodes = (0, 0, 1, 1)
    case = Case(seed=2, ranks=4)
    plan = copying_plan(case, nodes, pooled, replicated=1.0, fetch=fetch)
    for result in ranks.run(4, run_case, case, plan, nodes):
        for name in ("relayed_rows", "relayed_gradient_rows", "forwarded_bags"):
            assert sum(result["counted"][name]) == 0


@pytest.mark.parametrize("state", [False, True])
def test_copies_that_differ_are_found(ranks, state):
    case, nodes = Case(seed=4, ranks=4, optimizer="adagrad"), (0, 0, 1, 1)
    plan = copying_plan(case, nodes)
    widths = len(plan.layout.slots)
    part = 2 * (2 * widths + node_copy_cases.WIDTH) + state  # of the second position
    number, _ = node_copy_cases.last_copy(plan, 3)
    for before, after in ranks.run(4, node_copy_cases.train_and_spoil, case, plan, nodes, state):
        assert before == []
        assert [(one.part, one.slot, one.ranks) for one in after] == [(part, number, (3,))]


# What goes wrong.

CASE = Case(seed=1, ranks=4, optimizer="adagrad", steps=2)
PLAN = copying_plan(CASE, (0, 0, 1, 1), fetch="distinct")
COPIED = int(np.flatnonzero(PLAN.layout.holds.sum(axis=1) == 2)[0])


def changed(**arrays: Any) -> Plan:
    return replace(PLAN, layout=replace(PLAN.layout, **arrays))


def array(name: str) -> np.ndarray:
    return np.array(getattr(PLAN.layout, name))


def on_unlike_positions() -> Plan:
    """One position's copies on ranks 0 and 3."""
    holds, base, source = array("holds"), array("base"), array("source")
    holds[COPIED], source[COPIED] = [True, False, False, True], [0, 0, 3, 3]
    base[COPIED] = np.where(holds[COPIED], base[COPIED].max(), -1)
    return changed(holds=holds, base=base, source=source)


def read_from_afar() -> Plan:
    source = array("source")
    source[COPIED, 1] = 2
    return changed(source=source)


def in_unlike_slots() -> Plan:
    base = array("base")
    base[COPIED, 2] += 1
    return changed(base=base)


def on(*node_of: int) -> Plan:
    topology = Topology("other", node_of, np.ones((4, 4)), 1.0, Latency.of_hops(0.0))
    return replace(PLAN, topology=topology)


@pytest.mark.parametrize(
    "plan",
    [
        on_unlike_positions(),
        on(0, 0, 0, 1),
        on(0, 0, 0, 0),
        on(0, 1, 2, 3),
        read_from_afar(),
        in_unlike_slots(),
    ],
)
def test_copies_of_another_form_are_refused(plan):
    check_trainable(PLAN)
    with pytest.raises(OperError) as told:
        check_trainable(plan)
    assert str(told.value) == NOT_FOR_TRAINING


@pytest.mark.parametrize("nodes", [(0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 3)])
def test_ranks_of_other_nodes_are_refused_by_all(ranks, nodes):
    options = [{"nodes": nodes}] * 4
    for told in ranks.run(4, fault_cases.start_each, [CASE] * 4, [PLAN] * 4, options):
        assert "the plan keeps a copy of rows on one rank of each node (ranks 0, 2)" in told


@pytest.mark.parametrize("phase", ["published", "add up the gradients of copies (step 1)"])
def test_a_rank_that_is_killed_is_named(phase):
    with Ranks(4) as mortal:
        found = mortal.run(
            4, fault_cases.train_till_lost, CASE, PLAN, phase, 1, signal.SIGKILL, 60.0,
            (0, 0, 1, 1), lost=(1,),
        )  # fmt: skip
    for text, seconds in (found[0], *found[2:]):
        assert text.startswith("rank 1 died while rank "), text
        assert seconds < 30
