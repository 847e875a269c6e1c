"""Plans for inference against the unsharded model: rows with copies on some of the ranks."""

import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.runtime.engine import EmbeddingEngine
from tests.support.commands import fine, write_log
from tests.support.examples import examples
from tests.support.runtime import inference_cases as cases
from tests.support.runtime import mortal_ranks
from tests.support.runtime.engine_cases import Case, batch_of, module_tables, tables_of
from tests.support.runtime.forkserver import context
from tests.support.runtime.ranks import RankFailedError
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds
from tests.support.torchrec.models import plan_tables


def inference_plan(case: Case, fetch: str = "raw", **options):
    tables = tables_of(case)
    return random_plan(case.seed, tables, case.ranks, fetch=fetch, mode="inference", **options)


def assert_serves_as_unsharded(ranks: Worlds, case: Case, plan, nodes=None) -> list[dict]:
    found = ranks.run(case.ranks, cases.serve, case, plan, nodes)
    expected = cases.Expected(case)
    for rank, mine in enumerate(found):
        for step, out in enumerate(mine["outputs"]):
            whole, _, _ = expected.lookup(batch_of(case, step, rank))
            torch.testing.assert_close(out.double(), whole.detach(), rtol=1e-5, atol=1e-5)
        for n, table in enumerate(expected.tables):
            torch.testing.assert_close(mine["tables"][n].double(), table, rtol=1e-6, atol=1e-6)
    return found


any_case = st.builds(
    Case,
    seed=st.integers(0, 1000),
    ranks=st.integers(1, 4),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
    dims=st.sampled_from([(4,), (8, 16), (64, 7), (12, 128)]),
    rows=st.lists(st.integers(1, 300), min_size=1, max_size=4).map(tuple),
    bags=st.sampled_from(["one", "many", "mean one", "none"]),
    int32=st.booleans(),
    steps=st.just(2),
)


@examples(16)
@given(
    any_case,
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(["raw", "distinct"]),
    st.booleans(),
)
def test_any_plan_serves_as_the_unsharded_model(ranks, case, replicated, fetch, idle):
    idle = (0,) if idle and case.ranks > 1 else ()
    plan = inference_plan(case, fetch, replicated=replicated, idle=idle)
    assert_serves_as_unsharded(ranks, case, plan)


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("pooling", ["sum", "mean"])
def test_weighted_bags(ranks, pooling, fetch):
    case = Case(seed=3, ranks=3, pooling=pooling, weighted=True)
    assert_serves_as_unsharded(ranks, case, inference_plan(case, fetch))


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1), (0, 1, 0, 1)])
def test_ranks_that_share_no_memory(ranks, nodes, fetch):
    for seed, pooling, bags in ((5, "mean", "many"), (6, "none", "none"), (7, "sum", "one")):
        case = Case(seed=seed, ranks=len(nodes), pooling=pooling, bags=bags)
        plan = inference_plan(case, fetch, replicated=0.6)
        assert_serves_as_unsharded(ranks, case, plan, nodes)


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_a_rank_reads_alone_and_its_errors_are_its_own(ranks, fetch):
    case = Case(seed=8, ranks=3)
    found = ranks.run(3, cases.serve_alone, case, inference_plan(case, fetch))
    expected = cases.Expected(case)
    for rank, mine in enumerate(found):
        for step, out in enumerate(mine["outputs"]):
            whole, _, _ = expected.lookup(batch_of(case, step, rank))
            torch.testing.assert_close(out.double(), whole.detach(), rtol=1e-5, atol=1e-5)
    assert "id 1000000" in found[0]["errors"][0]


def test_a_rank_serves_on_when_the_others_are_dead():
    case = Case(seed=16, ranks=2)
    outputs, died = mortal_ranks.run(2, cases.serve_after_deaths, case, inference_plan(case))
    assert died is None
    expected = cases.Expected(case)
    for step, out in enumerate(outputs):
        whole, _, _ = expected.lookup(batch_of(case, step, 0))
        torch.testing.assert_close(out.double(), whole.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("nodes", [None, (0, 0, 1)])
@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_counters_count_what_each_rank_reads_from_whom(ranks, fetch, nodes):
    case = Case(seed=9, ranks=3, rows=(50, 1, 200, 90))
    plan = inference_plan(case, fetch, replicated=0.7)
    copies = plan.layout.holds.sum(axis=1)
    assert ((copies > 1) & (copies < 3)).any(), "no row has copies on some ranks"
    found = ranks.run(3, cases.serve, case, plan, nodes)
    for rank, result in enumerate(found):
        counted, expected = result["counted"], cases.expected_reads(case, plan, rank)
        read = expected["accesses" if fetch == "raw" else "distinct"]
        assert counted["accessed_rows"] == expected["accesses"].tolist()
        assert counted["fetched_rows"] == read.tolist()
        assert counted["fetched_bytes"] == expected["bytes"].tolist()
        assert counted["replica_accesses"] == expected["replicas"]
        assert counted["accesses"] == expected["replicas"] + expected["accesses"].sum()
        if fetch == "distinct":
            assert counted["distinct_rows"] == expected["distinct_rows"]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_memory_is_the_plans_and_none_of_it_is_for_gradients(ranks, optimizer):
    case = Case(seed=10, ranks=3, optimizer=optimizer, rows=(900, 3000), bags="one")
    plan = plan_tables(tables_of(case), 3, mode="inference")
    assert plan.layout.holds.sum(axis=1).max() > 1
    found = assert_serves_as_unsharded(ranks, case, plan)
    for rank, result in enumerate(found):
        beyond = result["heap_bytes"] - plan.cost.memory_bytes[rank]
        assert 0 <= beyond < 4096 * len(plan.layout.slots)  # whole pages for each width
        assert set(result["memory"]) <= {"heap", "signals", "alive"}
        assert result["memory"]["heap"] == sum(r["heap_bytes"] for r in found)


def test_rows_are_read_only_after_the_first_lookup_until_they_are_written(ranks):
    case = Case(seed=11, ranks=2)
    for result in ranks.run(2, cases.write_again, case, inference_plan(case)):
        before, after = result["outputs"]
        torch.testing.assert_close(2 * before, after)
        assert result["modes"] == [{"rw-s"}, {"r--s"}, {"rw-s"}, {"r--s"}]


def test_a_stray_write_ends_the_process():
    case = Case(seed=12, ranks=1)
    process = context.Process(target=cases.write_astray, args=(case, inference_plan(case)))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGSEGV


def test_weights_have_gradients(ranks):
    case = Case(seed=13, ranks=2, weighted=True)
    found = ranks.run(2, cases.gradients_of_weights, case, inference_plan(case))
    expected = cases.Expected(case)
    for rank, grad in enumerate(found):
        out, weights, _ = expected.lookup(batch_of(case, 0, rank))
        out.sum().backward()
        assert weights is not None
        torch.testing.assert_close(grad.double(), weights.grad, rtol=1e-5, atol=1e-5)


def test_int8_rows_are_not_trained():
    case = Case(seed=14, ranks=1, dtype="int8")
    with pytest.raises(OperError, match=r"table 't0': .* can be looked up and not trained"):
        EmbeddingEngine(random_plan(14, tables_of(case), 1), module_tables(case))


def test_a_row_with_copies_on_some_ranks_is_in_the_plans_tested():
    case = Case(seed=15, ranks=4, rows=(500,))
    copies = inference_plan(case, replicated=0.5).layout.holds.sum(axis=1)
    assert np.isin([2, 3], copies).any()


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_a_torchrec_model_serves_by_a_plan(ranks, dtype):
    for result in ranks.run(2, cases.serve_model, dtype):
        torch.testing.assert_close(*result["outputs"], rtol=1e-5, atol=1e-5)
        found, expected = result["states"]
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6, msg=key)


def test_a_user_asks_for_int8_by_the_tables_dtype(ranks, tmp_path):
    write_log(tmp_path / "log.parquet")
    (tmp_path / "tables.yaml").write_text(
        "defaults: {dtype: int8, dim: 16}\ntables: [{name: C1, rows: 90}, {name: C2, rows: 40}]\n"
    )
    fine("profile", tmp_path / "log.parquet", "--tables", tmp_path / "tables.yaml",
         "-o", tmp_path / "profile")  # fmt: skip
    plan = ("plan", tmp_path / "profile", "--topology", "cpu:2", "--batch-size", 64)
    fine(*plan, "--mode", "inference", "-o", tmp_path / "inference")
    fine(*plan, "--mode", "training", "-o", tmp_path / "training")
    for found, exact in ranks.run(2, cases.serve_collection, tmp_path / "inference"):
        expected = cases.stored(exact.view(-1, 16), "int8").view(exact.shape)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert not torch.equal(found, exact)
    with pytest.raises(RankFailedError, match=r"int8 rows are not trained.*mode='inference'"):
        ranks.run(2, cases.serve_collection, tmp_path / "training")
