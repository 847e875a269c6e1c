"""torch.ops.oper.embedding_lookup as torch wants operators, and compiled functions that call it."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from oper.base.errors import OperError
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.prepared_batch import NumberedRows, PreparedBatch, Runs
from oper.runtime.step import sort
from oper.runtime.table_io import RowRange
from tests.support.runtime.engine_cases import Case, batch_of, start, tables_of
from tests.support.runtime.runtime_plans import random_plan

POOLINGS = [("sum", False), ("sum", True), ("mean", False), ("none", False)]


def engine_of(pooling: str = "sum", weighted: bool = False, **options: Any) -> EmbeddingEngine:
    case = Case(seed=1, ranks=1, pooling=pooling, weighted=weighted, optimizer="sgd")
    return start(case, random_plan(1, tables_of(case), 1), None, **options)


def prepared(engine: EmbeddingEngine, step: int) -> PreparedBatch:
    pooling = engine.tables[0].pooling
    case = Case(seed=1, ranks=1, pooling=pooling, weighted=engine.weighted)
    batch = batch_of(case, step, 0)
    if engine.weighted:
        batch.weights().requires_grad_()
    return engine.prepare(batch)


def arguments(engine: EmbeddingEngine, batch: PreparedBatch) -> tuple[Any, ...]:
    return (
        engine.operator.anchor, batch.addresses, batch.segment_offset, batch.offsets, batch.weights,
        batch.features, batch.rows.tensors() if batch.rows else [], batch.out_elements,
        engine.operator.number,
    )  # fmt: skip


def tables(engine: EmbeddingEngine) -> list[torch.Tensor]:
    return engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate((50, 1, 200))])


@pytest.mark.parametrize(("pooling", "weighted"), POOLINGS)
def test_opcheck(pooling, weighted):
    # All of opcheck's utilities. They run the operator forward and backward several times and
    # compare: a backward is a step, so that it must be one that changes nothing.
    engine = engine_of(pooling, weighted)
    engine.learning_rates[:] = [0.0] * len(engine.learning_rates)
    given = arguments(engine, prepared(engine, 0))
    torch.library.opcheck(torch.ops.oper.embedding_lookup.default, given)
    steps = engine.steps
    assert steps > 0
    *batch, number = given
    grad = torch.ones(batch[-1])
    torch.library.opcheck(
        torch.ops.oper.embedding_backward.default,
        (
            grad,
            *(t.detach() if isinstance(t, torch.Tensor) else t for t in batch),
            weighted,
            number,
        ),
    )
    assert engine.steps > steps


def compiled_and_eager(backend: str, pooling: str, weighted: bool, rows: type = Runs) -> None:
    """Three steps of a function that looks up and goes on, by the compiler and without."""
    found = []
    for compiled in (True, False):
        torch._dynamo.reset()
        engine = engine_of(pooling, weighted)

        def model(
            batch: PreparedBatch, scale: torch.Tensor, engine: EmbeddingEngine = engine
        ) -> torch.Tensor:
            return torch.tanh(engine.lookup(batch) * scale).sum()

        run = torch.compile(model, fullgraph=True, backend=backend) if compiled else model
        results: list[torch.Tensor | None] = []
        for step in range(3):
            batch, scale = prepared(engine, step), torch.tensor(0.5, requires_grad=True)
            assert isinstance(batch.rows, rows)
            loss = run(batch, scale)
            loss.backward()
            results += [loss.detach(), scale.grad]
        assert engine.steps == 3
        found.append([*results, *tables(engine)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("pooling", "weighted"), POOLINGS)
def test_compiled_functions_train_as_eager_ones(pooling, weighted):
    compiled_and_eager("aot_eager", pooling, weighted)


@pytest.mark.parametrize(("pooling", "weighted"), POOLINGS)
def test_compiled_functions_train_numbered_rows(pooling, weighted, monkeypatch):
    monkeypatch.setattr(sort, "ROWS_PER_ACCESS", 10**9)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        compiled_and_eager("aot_eager", pooling, weighted, NumberedRows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_inductor():
    compiled_and_eager("inductor", "sum", False)


def test_gradients_of_weights_are_those_of_autograd():
    results = []
    for operator in (True, False):
        engine = engine_of(weighted=True)
        batch = batch_of(Case(seed=1, ranks=1, weighted=True), 0, 0)
        weights = batch.weights().requires_grad_()
        given = engine.prepare(batch)
        if operator:
            out = torch.ops.oper.embedding_lookup(*arguments(engine, given))
        else:
            out = engine.operator.lookup(given)
        (out * torch.arange(out.numel())).sum().backward()
        results.append([out.detach(), weights.grad, *tables(engine)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("operator", [True, False])
def test_a_second_backward_is_refused(operator):
    """Rows would be updated twice. A graph that is kept goes on, as with torch's own functions."""
    engine = engine_of()
    batch = prepared(engine, 0)

    def loss() -> torch.Tensor:
        if operator:
            return torch.ops.oper.embedding_lookup(*arguments(engine, batch)).sum()
        return engine.operator.lookup(batch).sum()

    once = loss()
    once.backward()
    after = tables(engine)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        once.backward()
    assert engine.steps == 1
    assert all(torch.equal(a, b) for a, b in zip(after, tables(engine), strict=True))
    kept = loss()
    kept.backward(retain_graph=True)
    kept.backward()
    assert engine.steps == 3


def test_compiled_without_gradients():
    engine = engine_of()
    with torch.no_grad():
        batch = prepared(engine, 0)
        run = torch.compile(engine.lookup, fullgraph=True, backend="aot_eager")
        assert torch.equal(run(batch), engine.lookup(batch))
    assert engine.steps == 0


def test_an_operator_outlives_its_engine():
    engine = engine_of()
    given = arguments(engine, prepared(engine, 0))
    out = torch.ops.oper.embedding_lookup(*given)
    del engine
    other = engine_of()
    assert other.operator.number != given[-1]
    with pytest.raises(OperError, match="are gone"):
        torch.ops.oper.embedding_lookup(*given)
    with pytest.raises(OperError, match="are gone"):
        out.sum().backward()
    assert other.steps == 0


def trained(prepare) -> list[torch.Tensor]:
    """Outputs and tables of three steps, of batches that `prepare` makes of (engine, step)."""
    engine, found = engine_of(), []
    for step in range(3):
        out = engine.lookup(prepare(engine, step))
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        found.append(out.detach())
    return [*found, *tables(engine)]


def test_a_batch_that_was_prepared_without_gradients_is_sorted_when_it_trains():
    expected = trained(prepared)
    found = trained(torch.no_grad()(prepared))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_sort_beside_the_lookup_changes_nothing(monkeypatch):
    results, counters = [], []

    def ahead(engine: EmbeddingEngine, step: int) -> PreparedBatch:
        batch = prepared(engine, step)
        counters.append((engine.counters, isinstance(batch.sort, Future)))
        return batch

    for cores in (1, 64):
        monkeypatch.setattr("os.sched_getaffinity", lambda _, n=cores: range(n))
        results.append(trained(ahead))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert [beside for _, beside in counters] == [False] * 3 + [True] * 3
    first, *_, last = (c.to_dict() for c, _ in counters)
    assert first == last
    assert first["distinct_rows"] > 0
