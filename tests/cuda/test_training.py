"""Training on a device: every bit of the CPU's, of outputs, rows, optimizer states, gradients of
weights and counters."""

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.runtime.memory.device import Cpu
from oper.runtime.table_io import RowRange
from oper.runtime.tables.optimizers import STATES
from tests.support.cuda.device_engines import (
    Schedule,
    batch_on,
    device_of,
    start,
    train_on_both,
    train_until_a_death,
)
from tests.support.examples import examples
from tests.support.runtime import mortal_ranks
from tests.support.runtime.engine_cases import Case, tables_of
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan

STEPS: Schedule = ((0,), (1,), (2,))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def same_bits(found: Any, expected: Any) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32))


def same_training(found: list[Any]) -> list[dict[str, Any]]:
    """Check that what ranks made on devices is what they made on the CPU (train_on_both); what each
    counted."""
    for on_device, on_cpu in found:
        for part in ("outputs", "weight_grads", "tables", "states"):
            same_bits(on_device[part], on_cpu[part])
        assert on_device["counted"] == on_cpu["counted"]
    return [on_device["counted"] for on_device, _ in found]


def assert_trains_as_on_the_cpu(
    ranks: Ranks,
    case: Case,
    library: str | None,
    schedule: Schedule = STEPS,
    **options: Any,
) -> None:
    plan = random_plan(case.seed, tables_of(case), case.ranks, **{"replicated": 0.3, **options})
    given = (case, plan, schedule, library)
    for counted in same_training(ranks.run(case.ranks, train_on_both, *given)):
        assert counted["steps"] == len(schedule)


CASES = {
    "weights": Case(4, 1, weighted=True),
    "means": Case(5, 1, pooling="mean"),
    "unpooled": Case(6, 1, pooling="none"),
    "as many ids as bags": Case(15, 1, bags="mean one"),
    "one id each": Case(7, 1, bags="one"),
    "one id each, unpooled": Case(8, 1, pooling="none", bags="one"),
    "int32 ids": Case(10, 1, int32=True),
    "odd dims": Case(11, 1, dims=(5, 12, 33)),
    "fp16": Case(12, 1, dtype="fp16", optimizer="rowwise_adagrad"),
    "bf16": Case(13, 1, dtype="bf16"),
    "stochastic rounding": Case(16, 1, dtype="fp16", rounding=True),
    "unlike optimizers": Case(17, 1, optimizers=("adam", "sgd", "rowwise_adagrad")),
    "frozen tables": Case(18, 1, optimizers=("none", "adagrad")),
    "all frozen": Case(19, 1, optimizer="none"),
    "two ranks": Case(2, 2, optimizer="adam"),
    "four ranks": Case(3, 4, rows=(50, 7, 400, 30), optimizer="rowwise_adagrad"),
    "weights on two ranks": Case(4, 2, weighted=True),
    "unpooled on two ranks": Case(6, 2, pooling="none"),
    "ranks without samples": Case(9, 4, bags="none"),
    "fp16 on two ranks": Case(12, 2, dtype="fp16", optimizer="rowwise_adagrad", rounding=True),
    "unlike optimizers on two ranks": Case(17, 2, optimizers=("adam", "sgd", "none")),
    "frozen tables that a batch does not read": Case(
        56, 1, optimizers=("none", "adagrad"), rows=(50, 200)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_trains_as_on_the_cpu(ranks: Ranks, library: str | None, name: str) -> None:
    assert_trains_as_on_the_cpu(ranks, CASES[name], library)


@pytest.mark.parametrize("replicated", [0.0, 1.0])
def test_rows_on_one_rank_and_on_all(ranks: Ranks, library: str | None, replicated: float) -> None:
    case = Case(21, 4, optimizer="adagrad", dims=(5, 16))
    assert_trains_as_on_the_cpu(ranks, case, library, replicated=replicated)


@pytest.mark.parametrize("method", ["dense", "allgather"])
@pytest.mark.parametrize("number", [2, 4])
def test_every_method_of_the_allreduce(
    ranks: Ranks, library: str | None, number: int, method: str
) -> None:
    """Adam moves the rows that are touched, and no others."""
    case = Case(21, number, optimizer="adam", dims=(5, 16), rows=(300, 7, 900))
    schedule = ((0,), (1, 2), (3,), (4,))
    assert_trains_as_on_the_cpu(ranks, case, library, schedule, replicated=0.7, method=method)


@pytest.mark.parametrize("optimizer", STATES)
def test_every_optimizer(ranks: Ranks, library: str | None, optimizer: str) -> None:
    assert_trains_as_on_the_cpu(ranks, Case(3, 1, optimizer=optimizer), library)


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_accumulated_gradients(
    ranks: Ranks, library: str | None, weighted: bool, number: int
) -> None:
    case = Case(20, number, optimizer="adagrad", weighted=weighted)
    assert_trains_as_on_the_cpu(ranks, case, library, ((0, 1), (2,), (3, 4, 5), (6,)))


@pytest.mark.parametrize("method", ["bitmap", "dense", "allgather"])
@pytest.mark.parametrize("at", ["marked", "published", "reduced", "applied"])
def test_a_rank_that_dies_in_a_step_is_named(library: str | None, at: str, method: str) -> None:
    case = Case(22, 2, optimizer="adagrad")
    plan = random_plan(22, tables_of(case), 2, replicated=0.5, method=method)
    outcomes = mortal_ranks.run(2, train_until_a_death, case, plan, library, at, silent=[1])
    assert "rank 1 died while rank 0 waited for it to" in str(outcomes[0])


@pytest.mark.parametrize("on_cpu", [False, True])
def test_memory_is_freed_with_the_engine(library: str | None, on_cpu: bool) -> None:
    """Without a collection of garbage, though nobody has looked at the counters."""
    case, device = Case(4, 1), Cpu() if on_cpu else device_of(library)
    engine = start(case, random_plan(1, tables_of(case), 1), None, device)
    heap = weakref.ref(engine.heap)
    gc.disable()
    try:
        engine(batch_on(device, case, 0, 0)).sum().backward()
        engine.close()
        del engine
        assert heap() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("bounds", "trained"), [("fatal", False), ("ignore", True)])
def test_what_an_id_out_of_range_trains(library: str | None, bounds: str, trained: bool) -> None:
    case, device = Case(4, 1), device_of(library)
    engine = start(case, random_plan(1, tables_of(case), 1), None, device, bounds=bounds)
    every = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
    before, batch = engine.read_rows(every), batch_on(device, case, 0, 0)
    batch.values()[3] = 10**6
    engine(batch).sum().backward()
    if not trained:
        with pytest.raises(OperError, match=r"in an earlier batch: .*id 1000000"):
            engine.read_rows(every)
    after = engine.read_rows(every)
    changed = any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert changed == trained


@pytest.mark.parametrize("weighted", [False, True])
def test_nothing_is_trained_by_lengths_that_do_not_fit(library: str | None, weighted: bool) -> None:
    case, device = Case(4, 1, weighted=weighted), device_of(library)
    engine = start(case, random_plan(1, tables_of(case), 1), None, device)
    every = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
    before, batch = engine.read_rows(every), batch_on(device, case, 0, 0)
    offsets = batch.offsets().long()
    offsets[7:] += 1 << 40  # far beyond all addresses
    batch._offsets, batch._lengths = offsets, None
    weights = batch.weights_or_none()
    if weights is not None:
        weights.requires_grad_()
    engine(batch).sum().backward()
    with pytest.raises(OperError, match=r"in an earlier batch: .* must sum to that"):
        engine.read_rows(every)
    same_bits(engine.read_rows(every), before)
    if weights is not None:
        assert weights.grad is not None
        assert not weights.grad.any()


@given(
    seed=st.integers(0, 2**32 - 1),
    number=st.sampled_from([1, 2, 4]),
    replicated=st.sampled_from([0.0, 0.3, 1.0]),
    optimizer=st.sampled_from(["none", *STATES]),
    pooling=st.sampled_from(["sum", "mean", "none"]),
    dims=st.lists(st.sampled_from([1, 4, 8, 33, 128]), min_size=1, max_size=3),
    rows=st.lists(st.sampled_from([1, 7, 300]), min_size=1, max_size=4),
    bags=st.sampled_from(["many", "one", "mean one"]),
    dtype=st.sampled_from(["fp32", "fp16", "bf16"]),
    weighted=st.booleans(),
)
@examples(15)
def test_any_module(
    ranks: Ranks,
    library: str | None,
    seed: int,
    number: int,
    replicated: float,
    optimizer: str,
    pooling: str,
    dims: list[int],
    rows: list[int],
    bags: str,
    dtype: str,
    weighted: bool,
) -> None:
    case = Case(
        seed, number, optimizer=optimizer, pooling=pooling, dims=tuple(dims), rows=tuple(rows),
        bags=bags, dtype=dtype, weighted=weighted and pooling != "none",
    )  # fmt: skip
    assert_trains_as_on_the_cpu(ranks, case, library, replicated=replicated)
