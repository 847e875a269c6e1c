"""Steps that are more than one backward of one module with one optimizer: accumulated gradients,
frozen tables, several optimizers and rates, two engines of one plan. All against Reference."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import RowBlock, RowRange
from tests.support.runtime.engine_cases import (
    Case,
    Reference,
    batch_of,
    gradient_of,
    initial,
    module_tables,
    optimizer_of,
    prepare,
    start,
    tables_of,
)
from tests.support.runtime.runtime_plans import random_plan

STATES = {"momentum1": "m", "exp_avg_sq": "v"}  # names of the engine's, and of the reference's
NEAR: Any = {"rtol": 2e-5, "atol": 2e-5}


def run_schedule(rank: int, group, case: Case, plan, schedule, rates=None, nodes=None):
    """Train: each entry of the schedule is the batches of one update, of which all but the last
    are accumulated. `rates` are of each entry."""
    engine = start(case, plan, group, nodes=nodes)
    outputs, weight_grads = [], []
    for number, steps in enumerate(schedule):
        if rates:
            engine.learning_rates[:] = [rates[number] * b.optimizer.lr for b in engine.buckets]
        for step in steps:
            batch = batch_of(case, step, rank)
            if case.weighted:
                batch.weights().requires_grad_()
            with engine.accumulate() if step != steps[-1] else nullcontext():
                out = engine.lookup(prepare(engine, case, batch))
                out.backward(gradient_of(case, step, rank, out))
            outputs.append(out.detach())
            weight_grads.append(batch.weights().grad if case.weighted else None)
    wanted = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
    tables, states = engine.read_rows(wanted), {}
    for name in STATES:
        having = [r for r in wanted if name in optimizer_of(case, r.table).state_slices(1)]
        for (n, _, _), values in zip(having, engine.read_rows(having, name), strict=True):
            states[n, name] = values
    engine.close()
    return {"outputs": outputs, "tables": tables, "states": states, "weight_grads": weight_grads}


def assert_equals_reference(ranks, case, plan, schedule, rates=None, nodes=None) -> Reference:
    found = ranks.run(case.ranks, run_schedule, case, plan, schedule, rates, nodes)
    reference, outputs, weight_grads = Reference(case), [], []
    for number, steps in enumerate(schedule):
        reference.rate = rates[number] if rates else 1.0
        of_steps = reference.train(*steps)
        outputs += of_steps[0]
        weight_grads += of_steps[1]
    for rank, result in enumerate(found):
        for got, output in zip(result["outputs"], outputs[rank :: case.ranks], strict=True):
            torch.testing.assert_close(got.double(), output, **NEAR)
        for n, table in enumerate(reference.tables):
            torch.testing.assert_close(result["tables"][n].double(), table, **NEAR)
            for name, short in STATES.items():
                expected = reference.states[n].get(short)
                assert (expected is None) == ((n, name) not in result["states"])
                if expected is not None:
                    state = result["states"][n, name].double()
                    torch.testing.assert_close(state.view(expected.shape), expected, **NEAR)
        if case.weighted:
            mine = zip(result["weight_grads"], weight_grads[rank :: case.ranks], strict=True)
            for got, wanted in mine:
                torch.testing.assert_close(got.double(), wanted, **NEAR)
    return reference


@pytest.mark.parametrize("replicated", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("numbered", [False, True])
def test_accumulated_gradients_are_one_step(ranks, numbered, optimizer, replicated):
    weighted = optimizer == "sgd"
    case = Case(seed=1, ranks=3, optimizer=optimizer, weighted=weighted, numbered=numbered)
    plan = random_plan(1, tables_of(case), 3, replicated=replicated)
    assert_equals_reference(ranks, case, plan, ((0, 1), (2,), (3, 4, 5), (6,)))


def run_nested(rank: int, group, case: Case, plan):
    """An accumulation within another: a step in both, one in the outer alone, and one after."""
    engine = start(case, plan, group)

    def train(step):
        out = engine.lookup(prepare(engine, case, batch_of(case, step, rank)))
        out.backward(gradient_of(case, step, rank, out))

    with engine.accumulate():
        with engine.accumulate():
            train(0)
        train(1)
    train(2)
    found = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    engine.close()
    return found


def test_the_end_of_an_inner_accumulation_is_not_that_of_the_outer_one(ranks):
    case = Case(seed=9, ranks=2, optimizer="adagrad")
    found = ranks.run(2, run_nested, case, random_plan(9, tables_of(case), 2))
    reference = Reference(case)
    reference.train(0, 1, 2)
    for tables in found:
        for got, expected in zip(tables, reference.tables, strict=True):
            torch.testing.assert_close(got.double(), expected, **NEAR)


@pytest.mark.parametrize("pooling", ["mean", "none"])
@pytest.mark.parametrize("method", ["dense", "allgather"])
@pytest.mark.parametrize("nodes", [None, (0, 1, 1)])
def test_accumulated_gradients_of_any_batch(ranks, pooling, method, nodes):
    case = Case(seed=2, ranks=3, optimizer="rowwise_adagrad", pooling=pooling, bags="none")
    plan = random_plan(2, tables_of(case), 3, method=method, fetch="distinct")
    assert_equals_reference(ranks, case, plan, ((0, 1), (2, 3)), nodes=nodes)


def test_accumulated_gradients_of_one_rank(ranks):
    case = Case(seed=3, ranks=1, optimizer="momentum_sgd")
    assert_equals_reference(ranks, case, random_plan(3, tables_of(case), 1), ((0, 1, 2), (3,)))


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("optimizers", [("none", "adam"), ("adagrad", "none"), ("none",)])
def test_frozen_tables_stay(ranks, optimizers, fetch):
    case = Case(
        seed=4, ranks=3, optimizer="adam", optimizers=optimizers, dims=(8,), rows=(50, 30, 70, 1)
    )
    plan = random_plan(4, tables_of(case), 3, fetch=fetch, replicated=0.4)
    assert len({optimizer_of(case, n).kind for n in range(4)}) == len(optimizers)
    for result in ranks.run(3, run_schedule, case, plan, ((0,), (1, 2), (3,))):
        for n, table in enumerate(result["tables"]):
            frozen = optimizer_of(case, n).kind == "none"
            assert torch.equal(table, initial(case, n)) == frozen
    assert_equals_reference(ranks, case, plan, ((0,), (1, 2), (3,)))


@pytest.mark.parametrize("numbered", [False, True])
def test_optimizers_and_rates_of_each_table(ranks, numbered):
    case = Case(
        seed=5,
        ranks=3,
        optimizer="adam",
        optimizers=("adam", "sgd", "rowwise_adagrad", "momentum_sgd", "partial_rowwise_adam"),
        lrs=(0.5, 0.25, 0.125),
        dims=(8, 8, 16),
        rows=(50, 30, 70, 40, 60, 20),
        numbered=numbered,
    )
    plan = random_plan(5, tables_of(case), 3, replicated=0.3)
    assert_equals_reference(ranks, case, plan, ((0,), (1,), (2,)))


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_rates_that_change_between_steps(ranks, optimizer):
    case = Case(seed=6, ranks=2, optimizer=optimizer)
    plan = random_plan(6, tables_of(case), 2)
    assert_equals_reference(ranks, case, plan, ((0,), (1, 2), (3,), (4,)), (1.0, 0.5, 0.0, 2.0))


def run_two(rank: int, group, case: Case, plan, nodes=None):
    """Two modules of one plan, trained by one backward of their outputs side by side."""
    tables = module_tables(case)
    engines = [
        EmbeddingEngine(plan, part, group=group, nodes=nodes) for part in (tables[:2], tables[2:])
    ]
    for first, engine in zip((0, 2), engines, strict=True):
        rows = [RowBlock(n, 0, initial(case, first + n)) for n in range(len(engine.tables))]
        engine.write_rows(rows if rank == 0 else [])
    outputs = []
    for step in range(case.steps):
        batch = batch_of(case, step, rank)
        out = torch.cat([engine(batch) for engine in engines], dim=1)
        out.backward(gradient_of(case, step, rank, out))
        outputs.append(out.detach())
    found = []
    for engine in engines:
        wanted = [RowRange(n, 0, case.rows[t.index]) for n, t in enumerate(engine.tables)]
        found += engine.read_rows(wanted)
    return outputs, found


def test_two_engines_of_one_plan(ranks):
    case = Case(seed=7, ranks=3, optimizer="adagrad", rows=(50, 30, 70, 40))
    plan = random_plan(7, tables_of(case), 3, replicated=0.3)
    found = ranks.run(3, run_two, case, plan)
    reference = Reference(case)
    for step in range(case.steps):
        outputs, _ = reference.train(step)
        for rank, expected in enumerate(outputs):
            torch.testing.assert_close(found[rank][0][step].double(), expected, **NEAR)
    for _, tables in found:
        for got, expected in zip(tables, reference.tables, strict=True):
            torch.testing.assert_close(got.double(), expected, **NEAR)


def test_the_reference_tells_accumulated_gradients_from_steps(ranks):
    case = Case(seed=8, ranks=2)
    plan = random_plan(8, tables_of(case), 2)
    found = ranks.run(2, run_schedule, case, plan, ((0, 1),))
    reference = Reference(case)
    reference.train(0)
    reference.train(1)
    assert not all(
        torch.allclose(got.double(), expected, **NEAR)
        for got, expected in zip(found[0]["tables"], reference.tables, strict=True)
    )
