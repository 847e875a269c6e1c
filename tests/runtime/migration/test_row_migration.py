"""Rows that migrate while a model trains, against a model whose rows never move."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.runtime.migration.changed_rows import changed_rows
from tests.support.examples import examples
from tests.support.runtime.engine_cases import Case, tables_of
from tests.support.runtime.migration_cases import serve_and_move, train_and_move
from tests.support.runtime.runtime_plans import random_plan

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "adam", "momentum_sgd", "partial_rowwise_adam"]


def assert_same(moved: list[dict[str, Any]], still: list[dict[str, Any]]) -> None:
    for mine, others in zip(moved, still, strict=True):
        assert mine["unequal"] == []
        for name in ("outputs", "tables"):
            for a, b in zip(mine[name], others[name], strict=True):
                assert torch.equal(a, b)


cases = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    optimizer=st.sampled_from(OPTIMIZERS),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    weighted=st.booleans(),
    dims=st.sampled_from([(4,), (8, 16), (12, 32)]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    bags=st.sampled_from(["one", "many", "none"]),
    numbered=st.booleans(),
    steps=st.just(12),
).map(lambda case: replace(case, weighted=case.weighted and case.pooling != "none"))


@examples(40)
@given(
    cases,
    st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=2, max_size=4),
    st.sampled_from(["raw", "distinct"]),
    st.sampled_from(["bitmap", "dense", "allgather"]),
    st.sampled_from([1, 2000, 1 << 20]),
    st.booleans(),
)
def test_models_train_on_as_if_no_row_had_moved(
    ranks, case, shares, fetch, method, bytes_per_step, ahead
):
    case = replace(case, numbered=case.numbered and fetch == "raw")
    plans = [
        random_plan(
            case.seed + n, tables_of(case), case.ranks, replicated=share, fetch=fetch, method=method
        )
        for n, share in enumerate(shares)
    ]
    still = ranks.run(case.ranks, train_and_move, case, plans[:1], bytes_per_step)
    moved = ranks.run(case.ranks, train_and_move, case, plans, bytes_per_step, ahead=ahead)
    assert_same(moved, still)
    differ = len(changed_rows(plans[0], plans[1])) > 0
    assert all((found["moved"] > 0) >= differ for found in moved if found["left"] < len(plans) - 1)


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_ranks_serve_while_rows_move(ranks, fetch):
    case = Case(seed=3, ranks=3, rows=(300, 5, 200), pooling="mean")
    plans = [random_plan(n, tables_of(case), 3, mode="inference", fetch=fetch) for n in range(4)]
    for looked_up, steps, wrong in ranks.run(3, serve_and_move, case, plans, 800):
        assert wrong == []
        assert looked_up > 20
        assert steps > 20


def test_bags_of_pooled_tables_follow(ranks):
    """Their sums are added up in another order where a bag's rows come to other ranks."""
    case = Case(seed=9, ranks=4, optimizer="adagrad", rows=(300, 70, 200), steps=10)
    nodes = (0, 0, 1, 1)
    plans = [
        replace(random_plan(n, tables_of(case), 4, fetch="pooled"), pooled_tables=("t0", "t2"))
        for n in range(3)
    ]
    still = ranks.run(4, train_and_move, case, plans[:1], 3000, nodes)
    moved = ranks.run(4, train_and_move, case, plans, 3000, nodes, ahead=True)
    for mine, others in zip(moved, still, strict=True):
        assert mine["moved"] > 3
        for name in ("outputs", "tables"):
            for a, b in zip(mine[name], others[name], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", [(0, 0, 1, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_rows_cross_nodes(ranks, nodes, fetch):
    case = Case(seed=5, ranks=4, optimizer="adam", rows=(300, 70, 200), steps=12)
    plans = [random_plan(5 + n, tables_of(case), 4, fetch=fetch, nodes=nodes) for n in range(3)]
    still = ranks.run(4, train_and_move, case, plans[:1], 3000, nodes)
    moved = ranks.run(4, train_and_move, case, plans, 3000, nodes, ahead=True)
    assert_same(moved, still)
    assert all(found["moved"] > 5 for found in moved)
