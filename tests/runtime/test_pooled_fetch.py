"""Pooled fetch between nodes, on ranks that are processes: against the unsharded model, to the bit
against a fetch of rows where sums are exact, and within rounding where they are not."""

import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.plan.address_map import AddressMap, unpack
from oper.plan.plan import Plan
from oper.runtime.memory.runtime_plan import check_nodes
from oper.scheduler.cache_settings import CacheSettings
from tests.runtime.test_accumulate import assert_equals_reference
from tests.runtime.test_engine import TOLERANCE, assert_equals_unsharded
from tests.support.examples import examples
from tests.support.runtime import fault_cases, pooled_cases
from tests.support.runtime.engine_cases import Case, batch_of, features_of, run_case, tables_of
from tests.support.runtime.inference_cases import serve
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan
from tests.support.scheduler.cached_cases import Script, run_cached

NODES = [(0, 1), (0, 0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 2)]


def pooling_plan(case: Case, *, share: float = 1.0, **options: Any) -> Plan:
    """A random plan that pools the first tables."""
    tables = tables_of(case)
    plan = random_plan(case.seed, tables, case.ranks, **options)
    names = [table.name for table in tables]
    return replace(plan, pooled_tables=tuple(names[: round(share * len(names))]))


def assert_equal(found: list[dict], expected: list[dict], *names: str) -> None:
    for mine, other in zip(found, expected, strict=True):
        for name in names:
            for a, b in zip(mine[name], other[name], strict=True):
                assert (a is None and b is None) or torch.equal(a, b), name


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("nodes", NODES)
def test_bags_between_nodes(ranks, nodes, pooling):
    for seed, bags in ((5, "many"), (6, "one"), (7, "none")):
        case = Case(seed=seed, ranks=len(nodes), pooling=pooling, bags=bags)
        assert_equals_unsharded(ranks, case, pooling_plan(case), nodes)


exact_cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.just(0),
    optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum_sgd"]),
    optimizers=st.sampled_from([(), ("sgd", "adam"), ("none", "rowwise_adagrad", "adagrad")]),
    pooling=st.sampled_from(["sum", "sum", "none"]),
    weighted=st.booleans(),
    dtype=st.sampled_from(["fp32", "fp32", "fp16", "bf16"]),
    dims=st.sampled_from([(4,), (8, 16), (12, 128), (20, 4)]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    bags=st.sampled_from(["one", "many", "mean one", "none"]),
    int32=st.booleans(),
    numbered=st.booleans(),
)


@examples(25)
@given(
    exact_cases,
    st.sampled_from(
        [nodes for nodes in NODES if len(nodes) != 3]
    ),  # gradients are divided by ranks
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from(["raw", "distinct"]),
    st.sampled_from([0.5, 1.0]),
    st.booleans(),
)
def test_exact_sums_have_the_bits_of_rows_that_are_fetched(
    ranks, case, nodes, replicated, fetch, share, idle
):
    """Values of rows, weights and gradients are small integers over a power of two: whatever the
    order they are added up in, sums are exact, until rows were updated by other arithmetic."""
    unpooled = case.pooling == "none"
    case = replace(
        case,
        ranks=len(nodes),
        weighted=case.weighted and not unpooled,
        lr=0.125,
        numbered=case.numbered and share == 1.0 and max(case.dims) <= 32 and not unpooled,
    )
    options: dict[str, Any] = {"replicated": replicated, "fetch": fetch}
    plan = pooling_plan(case, share=share, idle=(0,) if idle else (), **options)
    found = ranks.run(case.ranks, run_case, case, plan, nodes)
    by_rows = replace(plan, pooled_tables=())
    rows = ranks.run(case.ranks, run_case, replace(case, numbered=False), by_rows, nodes)
    assert_equal(found, rows, "tables", "weight_grads")
    near: dict[str, Any] = {"rtol": TOLERANCE[case.dtype], "atol": TOLERANCE[case.dtype]}
    for mine, other in zip(found, rows, strict=True):
        assert torch.equal(mine["outputs"][0], other["outputs"][0])
        for out, expected in zip(mine["outputs"], other["outputs"], strict=True):
            torch.testing.assert_close(out, expected, **near)


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1), (0, 1, 1, 2)])
def test_weighted_means_and_their_gradients(ranks, nodes):
    case = Case(seed=3, ranks=len(nodes), pooling="mean", weighted=True, optimizer="adagrad")
    assert_equals_unsharded(ranks, case, pooling_plan(case, share=0.67), nodes)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1), (0, 1, 2)])
def test_sums_are_off_by_the_order_of_additions_alone(ranks, nodes, pooling):
    case = Case(seed=4, ranks=len(nodes), pooling=pooling, rows=(40, 3, 90), lr=1.0, plain=True)
    found = ranks.run(case.ranks, pooled_cases.train_once, case, pooling_plan(case), nodes)
    for error, bound in (pair for of_rank in found for pair in of_rank):
        assert (error <= bound).all()
        assert error.max() > 0, "nothing was rounded: the comparison would accept anything"


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1), (0, 1, 2)])
@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_tables_beside_pooled_ones_keep_their_bits(ranks, nodes, fetch):
    case = Case(seed=6, ranks=len(nodes), pooling="mean", optimizer="adam", rows=(300, 9, 80, 40))
    plan = pooling_plan(case, share=0.5, fetch=fetch)
    arguments = (pooled_cases.train_scattered, case)
    found = ranks.run(case.ranks, *arguments, plan, nodes)
    again = ranks.run(case.ranks, *arguments, plan, nodes)
    rows = ranks.run(case.ranks, *arguments, replace(plan, pooled_tables=()), nodes)
    assert_equal(found, again, "tables", "outputs")
    columns = sum(t.dim * len(features_of(case, n)) for n, t in enumerate(tables_of(case)[:2]))
    for mine, other in zip(found, rows, strict=True):
        assert all(
            torch.equal(a, b) for a, b in zip(mine["tables"][2:], other["tables"][2:], strict=True)
        )
        for a, b in zip(mine["outputs"], other["outputs"], strict=True):
            assert torch.equal(a[:, columns:], b[:, columns:])


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_on_one_node_pooled_tables_are_read_by_pointer(ranks, fetch):
    case = Case(seed=8, ranks=3, optimizer="adagrad", pooling="mean")
    plan = pooling_plan(case, share=0.67, fetch=fetch)
    found = ranks.run(3, run_case, case, plan)
    raw = random_plan(8, tables_of(case), 3, fetch="raw")
    assert_equal(found, ranks.run(3, run_case, case, raw), "tables", "outputs")
    for result in found:
        assert sum(result["counted"]["forwarded_bags"]) == 0


@pytest.mark.parametrize("nodes", [(0, 1, 1), (0, 1, 2)])
def test_accumulated_gradients_and_frozen_tables(ranks, nodes):
    case = Case(seed=1, ranks=3, optimizers=("adagrad", "none", "adam"), weighted=True)
    plan = pooling_plan(case, replicated=0.3)
    assert_equals_reference(ranks, case, plan, ((0, 1), (2,), (3, 4, 5), (6,)), nodes=nodes)


@pytest.mark.parametrize("ahead", [False, True])
def test_cached_tables_beside_pooled_ones(ranks, ahead):
    case = Case(seed=3, ranks=3, dims=(8, 16, 4), rows=(50, 30, 200))
    plan = pooling_plan(case, share=0.67, tier=(2,))
    arguments = (CacheSettings("60%", "on-demand"), Script(ahead=ahead), (0, 0, 1))
    found = ranks.run(3, run_cached, case, plan, *arguments)
    rows = ranks.run(3, run_cached, case, replace(plan, pooled_tables=()), *arguments)
    for mine, other in zip(found, rows, strict=True):
        for a, b in zip(mine["tables"], other["tables"], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1), (0, 1, 1, 2)])
def test_bags_are_served(ranks, nodes, dtype):
    case = Case(seed=2, ranks=len(nodes), optimizer="none", dtype=dtype)
    plan = pooling_plan(case, mode="inference", replicated=0.4)
    found = ranks.run(case.ranks, serve, case, plan, nodes)
    rows = ranks.run(case.ranks, serve, case, replace(plan, pooled_tables=()), nodes)
    for mine, other in zip(found, rows, strict=True):
        for a, b in zip(mine["outputs"], other["outputs"], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_keys_in_any_order_and_batches_prepared_ahead(ranks):
    case = Case(seed=5, ranks=3)
    plan, nodes = pooling_plan(case), (0, 1, 1)
    plain = ranks.run(3, pooled_cases.train_in_turn, case, plan, nodes, False)
    mixed = ranks.run(3, pooled_cases.train_in_turn, case, plan, nodes, True)
    assert_equal(mixed, plain, "tables", "outputs")


def test_counters_count_what_was_forwarded(ranks):
    case = Case(seed=9, ranks=4, weighted=True)
    plan, nodes = pooling_plan(case, share=0.67), np.array([0, 0, 1, 2])
    found = ranks.run(4, run_case, case, plan, tuple(nodes.tolist()))
    proxies = {0: {1: 2, 2: 3}, 1: {1: 2, 2: 3}, 2: {0: 0, 2: 3}, 3: {0: 0, 1: 2}}
    for rank in range(4):
        bags, accesses, sums = np.zeros((3, 4), dtype=np.int64)
        address_map = AddressMap.of(plan, rank)
        for step in range(case.steps):
            batch = batch_of(case, step, rank)
            offsets, samples = batch.offsets().tolist(), batch.stride()
            keys = [n for n in range(len(case.rows)) for _ in features_of(case, n)]
            for key, table in enumerate(keys):
                if plan.tables[table].name not in plan.pooled_tables:
                    continue
                for bag in range(key * samples, (key + 1) * samples):
                    ids = batch.values()[offsets[bag] : offsets[bag + 1]]
                    fields = unpack(address_map.translate(table, ids))[0].numpy()
                    for node, proxy in proxies[rank].items():
                        theirs = sum(nodes[f] == node for f in fields if f < 4)
                        accesses[proxy] += theirs
                        bags[proxy] += theirs > 0
                        sums[proxy] += 4 * plan.tables[table].dim * (theirs > 0)
        counted = found[rank]["counted"]
        assert counted["forwarded_bags"] == bags.tolist()
        assert counted["forwarded_accesses"] == accesses.tolist()
        assert counted["bag_sum_bytes"] == counted["bag_gradient_bytes"] == sums.tolist()
        # Two words for each of three features, a length a bag, an address and a weight an access.
        header = 4 * 2 * 2 * case.steps * np.isin(np.arange(4), list(proxies[rank].values()))
        assert counted["forwarded_bytes"] == (header + 4 * bags + 8 * accesses).tolist()


# What goes wrong.

CASE = Case(seed=1, ranks=3)
PLAN = pooling_plan(CASE)


@pytest.mark.parametrize("phase", ["forward", "backward", "published"])
@pytest.mark.parametrize("nodes", [(0, 1, 0), (0, 1, 1), (0, 1, 2)])
def test_a_rank_that_is_killed_is_named(phase, nodes):
    with Ranks(3) as mortal:
        found = mortal.run(
            3, fault_cases.train_till_lost, CASE, PLAN, phase, 1, signal.SIGKILL, 60.0, nodes,
            lost=(1,),
        )  # fmt: skip
    for text, seconds in found[::2]:
        assert text.startswith("rank 1 died while rank ")
        assert seconds < 30


def test_the_others_get_the_message_of_a_rank_whose_batch_is_wrong():
    batches = [batch_of(CASE, 0, rank) for rank in range(3)]
    batches[1].values()[0] = 12345
    with Ranks(3) as mortal:
        found = mortal.run(3, fault_cases.lookup_each, CASE, PLAN, batches, nodes=(0, 1, 0))
    first = "feature 'f0': id 12345, number 0 of the feature on rank 1"
    assert found[1].startswith(first)
    assert found[0].startswith("rank 1 failed: " + first)
    assert found[2] == found[0]


def test_other_ids_read_row_zero(ranks):
    found = ranks.run(
        2,
        pooled_cases.look_up_wrong_ids,
        replace(CASE, ranks=2),
        pooling_plan(replace(CASE, ranks=2)),
        (0, 1),
    )
    for wrong, zero in found:
        assert torch.equal(wrong, zero)


def test_plans_that_pool_other_tables_are_found_to_differ(ranks):
    plans = [PLAN, replace(PLAN, pooled_tables=()), PLAN]
    found = ranks.run(3, fault_cases.start_each, [CASE] * 3, plans, [{}] * 3)
    assert all("plan: expected the same on all ranks" in text for text in found)


def test_a_compiled_graph_is_refused(ranks):
    case = replace(CASE, ranks=2)
    for text in ranks.run(2, pooled_cases.compile_lookup, case, pooling_plan(case), (0, 1)):
        assert "a graph of torch.compile cannot look up pooled tables" in text


def test_rows_of_other_nodes_that_a_device_reads_itself_are_not_pooled():
    case = replace(CASE, ranks=2)
    plan = pooling_plan(case, mode="inference")
    plan = replace(plan, topology=replace(plan.topology, transport="nvshmem"))
    with pytest.raises(OperError, match="table 't0': the plan pools its bags between nodes"):
        check_nodes([(0,), (1,)], plan, "cuda:0")
