"""Rows of other nodes that cross the network once a node: against the unsharded model, to the bit
against rows that each rank fetches for itself, and what is counted against the batches."""

import itertools
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.scheduler.cache_settings import CacheSettings
from tests.runtime.test_accumulate import NEAR, assert_equals_reference, run_two
from tests.runtime.test_engine import assert_equals_unsharded
from tests.support.examples import examples
from tests.support.runtime import fault_cases, pooled_cases, relay_cases
from tests.support.runtime.engine_cases import Case, Reference, run_case, tables_of
from tests.support.runtime.inference_cases import serve
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan
from tests.support.scheduler.cached_cases import Script, run_cached

# Alike; in turns; of unlike sizes; one rank alone; and all alone.
NODES = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1), (0, 0, 0, 1, 1), (0, 1, 1, 2), (0, 1, 2)]
# Rank 1 is asked by rank 5, of the second node, and by rank 4, of the third.
NODES += [(0, 0, 1, 2, 2, 1)]


def assert_equal(found: list[dict], expected: list[dict], *names: str) -> None:
    for mine, other in zip(found, expected, strict=True):
        for name in names:
            for a, b in zip(mine[name], other[name], strict=True):
                assert (a is None and b is None) or torch.equal(a, b), name


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.just(0),
    optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum_sgd"]),
    optimizers=st.sampled_from([(), ("sgd", "adam"), ("none", "rowwise_adagrad", "adagrad")]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    weighted=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp32", "fp16", "bf16"]),
    dims=st.sampled_from([(4,), (8, 16), (12, 128), (20, 5, 4)]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    bags=st.sampled_from(["one", "many", "mean one", "none"]),
    int32=st.booleans(),
).map(lambda case: replace(case, lr=0.125, weighted=case.weighted and case.pooling != "none"))


@examples(20)
@given(
    cases,
    st.sampled_from(NODES),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.booleans(),
)
def test_any_plan_trains_as_the_unsharded_model(ranks, case, nodes, replicated, idle):
    case = replace(case, ranks=len(nodes))
    plan = random_plan(
        case.seed, tables_of(case), case.ranks, replicated=replicated, fetch="distinct",
        idle=(0,) if idle else (),
    )  # fmt: skip
    assert_equals_unsharded(ranks, case, plan, nodes)


@examples(12)
@given(cases, st.sampled_from([n for n in NODES if len(n) == 4]), st.sampled_from([0.0, 0.3]))
def test_exact_sums_have_the_bits_of_rows_that_each_rank_fetches(ranks, case, nodes, replicated):
    """Values of rows, weights and gradients are small integers over a power of two, and gradients
    are divided by four: whatever the order they are added up in, sums are exact."""
    case = replace(case, ranks=4, pooling="sum" if case.pooling == "mean" else case.pooling)
    given_plan = {"seed": case.seed, "tables": tables_of(case), "ranks": 4}
    found, each = (
        ranks.run(
            4, run_case, case, random_plan(**given_plan, replicated=replicated, fetch=fetch), nodes
        )
        for fetch in ("distinct", "raw")
    )
    assert_equal(found, each, "outputs", "tables", "weight_grads")


@pytest.mark.parametrize("nodes", NODES)
def test_runs_are_bit_equal(ranks, nodes):
    case = Case(seed=6, ranks=len(nodes), pooling="mean", optimizer="adam", rows=(300, 9, 80))
    arguments = (pooled_cases.train_scattered, case)
    plan = random_plan(6, tables_of(case), case.ranks, fetch="distinct")
    found, again = (ranks.run(case.ranks, *arguments, plan, nodes) for _ in range(2))
    assert_equal(found, again, "tables", "outputs")
    raw = random_plan(6, tables_of(case), case.ranks, fetch="raw")
    each = ranks.run(case.ranks, *arguments, raw, nodes)
    for mine, other in zip(found, each, strict=True):
        assert torch.equal(mine["outputs"][0], other["outputs"][0])  # copies of rows
    if len({*nodes}) == len(nodes):
        assert_equal(found, each, "tables", "outputs")


@pytest.mark.parametrize("nodes", NODES)
def test_gradients_are_added_in_the_order_that_is_said(ranks, nodes):
    case = Case(
        seed=3, ranks=len(nodes), pooling="none", plain=True, lr=1.0, dims=(5, 8), rows=(60, 9, 40)
    )
    plan = random_plan(3, tables_of(case), case.ranks, replicated=0.0, fetch="distinct")
    found = ranks.run(case.ranks, relay_cases.train_every_row, case, plan, nodes)
    members = [[r for r, of in enumerate(nodes) if of == n] for n in dict.fromkeys(nodes)]
    scale = np.float32(1 / case.ranks)
    for n, table in enumerate(plan.tables):
        mine = [
            scale * relay_cases.row_gradient(r, n, table.rows, table.dim) for r in range(case.ranks)
        ]
        owners = relay_cases.owners(plan, n)
        expected = np.zeros((table.rows, table.dim), dtype=np.float32)
        for owner in range(case.ranks):
            terms: list[np.ndarray] = []
            for of_node in members:
                parts = [mine[r] for r in of_node]
                terms += parts if owner in of_node else [_sum(parts)]
            expected[owners == owner] = -_sum(terms)[owners == owner]
        for of_rank in found:
            assert of_rank[n].numpy().tobytes() == expected.tobytes()


def _sum(terms: list[np.ndarray]) -> np.ndarray:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@pytest.mark.parametrize("nodes", NODES)
def test_counters_count_what_crossed_the_network(ranks, nodes):
    case = Case(seed=9, ranks=len(nodes), rows=(60, 5, 200))
    plan = random_plan(9, tables_of(case), case.ranks, fetch="distinct")
    found = ranks.run(case.ranks, run_case, case, plan, nodes)
    expected = relay_cases.relayed(case, plan, nodes, case.steps)
    assert expected["relayed_rows"].sum() > 0
    for name, by_rank in expected.items():
        counted = np.array([result["counted"][name] for result in found])
        np.testing.assert_array_equal(counted, by_rank, name)
    away = np.array([[a != b for b in nodes] for a in nodes])
    read = np.array([result["counted"]["fetched_rows"] for result in found])
    for step_rows in (read, np.array([r["counted"]["gradient_rows"] for r in found])):
        # What each rank reads, and sums, is as ever.
        total = np.zeros_like(read)
        for rank, step in itertools.product(range(case.ranks), range(case.steps)):
            for owner, _, _ in relay_cases.rows_read(case, plan, rank, step):
                total[rank, owner] += 1
        np.testing.assert_array_equal(step_rows[away], total[away])


def test_every_access_counts_where_each_is_fetched(ranks):
    case, nodes = Case(seed=9, ranks=3), (0, 0, 1)
    plan = random_plan(9, tables_of(case), 3, fetch="raw")
    for rank, result in enumerate(ranks.run(3, run_case, case, plan, nodes)):
        counted = result["counted"]
        for other in range(3):
            same = nodes[other] == nodes[rank]
            fetched = 0 if same else counted["fetched_rows"][other]
            assert counted["relayed_rows"][other] == fetched
            gradients = 0 if same else counted["gradient_rows"][other]
            assert counted["relayed_gradient_rows"][other] == gradients


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 0, 1, 1)])
def test_accumulated_gradients_and_frozen_tables(ranks, nodes):
    case = Case(seed=1, ranks=len(nodes), optimizers=("adagrad", "none", "adam"), weighted=True)
    plan = random_plan(1, tables_of(case), case.ranks, replicated=0.3, fetch="distinct")
    assert_equals_reference(ranks, case, plan, ((0, 1), (2,), (3, 4, 5), (6,)), nodes=nodes)


@pytest.mark.parametrize("ahead", [False, True])
def test_cached_tables_beside(ranks, ahead):
    case = Case(seed=3, ranks=4, dims=(8, 16, 4), rows=(50, 30, 200))
    plan, raw = (
        random_plan(3, tables_of(case), 4, tier=(2,), fetch=fetch) for fetch in ("distinct", "raw")
    )
    arguments = (CacheSettings("60%", "on-demand"), Script(ahead=ahead), (0, 0, 1, 1))
    found = ranks.run(4, run_cached, case, plan, *arguments)
    each = ranks.run(4, run_cached, case, raw, *arguments)
    assert_equal(found, each, "tables", "outputs")


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 0, 1)])
def test_batches_prepared_ahead_and_keys_in_any_order(ranks, nodes):
    case = Case(seed=5, ranks=len(nodes))
    plan = random_plan(5, tables_of(case), case.ranks, fetch="distinct")
    plain = ranks.run(case.ranks, pooled_cases.train_in_turn, case, plan, nodes, False)
    mixed = ranks.run(case.ranks, pooled_cases.train_in_turn, case, plan, nodes, True)
    assert_equal(mixed, plain, "tables", "outputs")


def test_two_engines_of_one_plan(ranks):
    case = Case(seed=7, ranks=4, optimizer="adagrad", rows=(50, 30, 70, 40))
    plan = random_plan(7, tables_of(case), 4, replicated=0.3, fetch="distinct")
    found = ranks.run(4, run_two, case, plan, (0, 0, 1, 1))
    reference = Reference(case)
    for step in range(case.steps):
        outputs, _ = reference.train(step)
        for rank, expected in enumerate(outputs):
            torch.testing.assert_close(found[rank][0][step].double(), expected, **NEAR)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("nodes", NODES[:4])
def test_rows_are_served(ranks, nodes, dtype):
    case = Case(seed=2, ranks=len(nodes), optimizer="none", dtype=dtype, steps=6, bags="none")
    plan, raw = (
        random_plan(2, tables_of(case), case.ranks, mode="inference", replicated=0.4, fetch=fetch)
        for fetch in ("distinct", "raw")
    )
    found = ranks.run(case.ranks, serve, case, plan, nodes)
    each = ranks.run(case.ranks, serve, case, raw, nodes)
    assert_equal(found, each, "outputs")


# Ranks that are lost, at each stage of a fetch and of the gradients' way. One that is killed as it
# is about to signal has written what it signals.

CASE = Case(seed=1, ranks=3, optimizer="adagrad", steps=2)
PLAN = random_plan(1, tables_of(CASE), 3, replicated=0.5, fetch="distinct")


@pytest.mark.parametrize("phase", ["asked", "relayed", "published", "ask for rows", "send rows"])
@pytest.mark.parametrize("nodes", [(0, 1, 0), (0, 1, 1)])
def test_a_rank_that_is_killed_is_named(phase, nodes):
    with Ranks(3) as mortal:
        found = mortal.run(
            3, fault_cases.train_till_lost, CASE, PLAN, phase, 1, signal.SIGKILL, 60.0, nodes,
            lost=(1,),
        )  # fmt: skip
    for text, seconds in found[::2]:
        assert text.startswith("rank 1 died while rank "), text
        assert seconds < 30


@pytest.mark.parametrize("phase", ["asked", "relayed"])
def test_a_rank_that_stops_is_named_at_the_deadline(phase):
    with Ranks(3) as mortal:
        found = mortal.run(
            3, fault_cases.train_till_lost, CASE, PLAN, phase, 1, signal.SIGSTOP, 3.0, (0, 1, 1),
            lost=(1,),
        )  # fmt: skip
    for text, seconds in found[::2]:
        assert text.startswith("rank 1 did not come within 3 s, while rank "), text
        assert seconds < 30
