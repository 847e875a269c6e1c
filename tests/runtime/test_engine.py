"""The engine against the unsharded model, element by element, on ranks that are processes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.runtime.table_io import RowBlock, RowRange
from tests.support.examples import examples
from tests.support.runtime.engine_cases import Case, Reference, run_case, start, tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds

TOLERANCE = {"fp32": 2e-5, "fp16": 2e-2, "bf16": 1e-1}


def assert_equals_unsharded(ranks: Worlds, case: Case, plan, nodes=None) -> list[dict]:
    found = ranks.run(case.ranks, run_case, case, plan, nodes)
    reference = Reference(case)
    near: dict[str, Any] = {"rtol": TOLERANCE[case.dtype], "atol": TOLERANCE[case.dtype]}
    for step in range(case.steps):
        outputs, weight_grads = reference.train(step)
        for rank, out in enumerate(outputs):
            mine = found[rank]
            torch.testing.assert_close(
                mine["outputs"][step].double(), out, **near, msg=f"output, step {step}, rank {rank}"
            )
            if weight_grads[rank] is not None:
                torch.testing.assert_close(
                    mine["weight_grads"][step].double(), weight_grads[rank], **near
                )
    for rank in range(case.ranks):
        for n, table in enumerate(reference.tables):
            torch.testing.assert_close(
                found[rank]["tables"][n].double(), table, **near, msg=f"table {n}, rank {rank}"
            )
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_sgd(ranks, count):
    case = Case(seed=1, ranks=count)
    assert_equals_unsharded(ranks, case, random_plan(1, tables_of(case), count))


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum_sgd"]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    dims=st.sampled_from([(4,), (8, 16), (64, 4), (12, 128), (512, 20)]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    bags=st.sampled_from(["one", "many", "mean one", "none"]),
    int32=st.booleans(),
)


@examples(40)
@given(
    cases,
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(["raw", "distinct"]),
    st.sampled_from(["bitmap", "dense", "allgather"]),
    st.booleans(),
)
def test_any_plan_trains_as_the_unsharded_model(
    ranks, case, replicated, listed, fetch, method, idle
):
    plan = random_plan(
        case.seed, tables_of(case), case.ranks, replicated=replicated, listed=listed, fetch=fetch,
        method=method, idle=(0,) if idle and case.ranks > 1 else (),
    )  # fmt: skip
    assert_equals_unsharded(ranks, case, plan)


numbered_cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    optimizer=st.sampled_from(["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum_sgd"]),
    optimizers=st.sampled_from([(), ("sgd", "adam"), ("none", "rowwise_adagrad", "adagrad")]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    weighted=st.booleans(),
    dims=st.sampled_from([(4,), (8, 16), (12, 32)]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    bags=st.sampled_from(["one", "many", "mean one", "none"]),
    int32=st.booleans(),
    numbered=st.just(True),
).map(lambda case: replace(case, weighted=case.weighted and case.pooling != "none"))


@examples(30)
@given(numbered_cases, st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from(["bitmap", "dense"]))
def test_numbered_rows_train_as_the_unsharded_model(ranks, case, replicated, method):
    plan = random_plan(
        case.seed, tables_of(case), case.ranks, replicated=replicated, fetch="raw", method=method
    )
    assert_equals_unsharded(ranks, case, plan)


@pytest.mark.parametrize("numbered", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("bags", ["one", "many"])
def test_weights_and_their_gradients(ranks, pooling, bags, numbered):
    case = Case(seed=3, ranks=2, pooling=pooling, bags=bags, weighted=True, numbered=numbered)
    assert_equals_unsharded(ranks, case, random_plan(3, tables_of(case), 2))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_narrow_rows(ranks, dtype):
    case = Case(seed=4, ranks=2, dtype=dtype, lr=0.125)
    assert_equals_unsharded(ranks, case, random_plan(4, tables_of(case), 2))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("copies", [0.3, 1.0])
def test_rows_rounded_at_random_are_equal_wherever_they_are(ranks, dtype, copies):
    """`run_case` finds no unequal replicas, and every rank reads the tables alike."""
    case = Case(seed=4, ranks=3, dtype=dtype, lr=0.125, rounding=True)
    plan = random_plan(4, tables_of(case), 3, replicated=copies)
    found = assert_equals_unsharded(ranks, case, plan)
    again = ranks.run(3, run_case, case, plan)
    nearest = ranks.run(3, run_case, replace(case, rounding=False), plan)
    for n, table in enumerate(found[0]["tables"]):
        for mine in (*found, *again):
            assert torch.equal(mine["tables"][n], table)
    pairs = zip(found[0]["tables"], nearest[0]["tables"], strict=True)
    assert any(not torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1), (0, 1, 2), (0, 0, 1, 1)])
def test_ranks_that_share_no_memory(ranks, nodes, fetch):
    for seed, pooling, bags in ((5, "sum", "many"), (6, "none", "many"), (7, "sum", "one")):
        case = Case(seed=seed, ranks=len(nodes), pooling=pooling, bags=bags, optimizer="adagrad")
        plan = random_plan(seed, tables_of(case), len(nodes), fetch=fetch)
        assert_equals_unsharded(ranks, case, plan, nodes)


@pytest.mark.parametrize("numbered", [(False, False), (True, True), (False, True)])
def test_runs_are_bit_equal(ranks, numbered):
    """Also of sorted and of numbered rows: what a row's gradients add up to is the same."""
    case = Case(seed=8, ranks=4, optimizer="adam", rows=(300, 40))
    plan = random_plan(8, tables_of(case), 4)
    first, second = (ranks.run(4, run_case, replace(case, numbered=are), plan) for are in numbered)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a["tables"] + a["outputs"], b["tables"] + b["outputs"], strict=True):
            assert torch.equal(x, y)


def test_counters_count_what_was_read(ranks):
    case = Case(seed=9, ranks=3)
    plan = random_plan(9, tables_of(case), 3)
    found = [result["counted"] for result in ranks.run(3, run_case, case, plan)]
    for counted in found:
        assert counted["lookups"] == counted["steps"] == case.steps
        served = np.sum(counted["accessed_rows"]) + counted["replica_accesses"]
        assert served == counted["accesses"] > 0


@pytest.mark.parametrize("state", [None, "momentum1"])
def test_blocks_without_rows_are_written(state):
    case = Case(seed=1, ranks=1, optimizer="rowwise_adagrad")
    engine = start(case, random_plan(1, tables_of(case), 1), None)
    before = engine.read_rows([RowRange(0, 0, case.rows[0])], state)
    values = torch.empty(0, case.dims[0]) if state is None else torch.empty(0)
    engine.write_rows([RowBlock(0, case.rows[0], values)], state)
    assert torch.equal(engine.read_rows([RowRange(0, 0, case.rows[0])], state)[0], before[0])
