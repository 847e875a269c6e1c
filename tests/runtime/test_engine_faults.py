"""Bad input and lost ranks: a clear error on every rank, soon, and nothing left behind."""

import itertools
import logging
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import RowRange
from tests.support.runtime import fault_cases
from tests.support.runtime.engine_cases import Case, batch_of, module_tables, start, tables_of
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds

CASE = Case(seed=1, ranks=3, optimizer="adagrad", steps=2)
PLAN = random_plan(1, tables_of(CASE), 3, replicated=0.5)


class RanksThatMayFail:
    """The ranks that tests share, in a new group each time: one that gave up waiting is lost."""

    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self._worlds.run(ranks, function, *arguments, new_group=True, **options)


@pytest.fixture
def ranks(worlds: Worlds) -> RanksThatMayFail:
    return RanksThatMayFail(worlds)


def alone(case: Case, **options) -> EmbeddingEngine:
    """An engine of one rank, in this process."""
    case = replace(case, ranks=1)
    return start(case, random_plan(case.seed, tables_of(case), 1), None, **options)


def with_ids(batch, place: int, value: int):
    from torchrec import KeyedJaggedTensor

    values = batch.values().clone()
    values[place] = value
    return KeyedJaggedTensor(
        batch.keys(), values, lengths=batch.lengths(), weights=batch.weights_or_none()
    )


# Ids that no table has.

BAD_IDS = [
    (dtype, value)
    for dtype in (torch.int32, torch.int64)
    for value in (-1, 50, torch.iinfo(dtype).min, torch.iinfo(dtype).max)
]


def batch_with_bad_id(pooling: str, dtype: torch.dtype, value: int):
    case = Case(seed=2, ranks=1, pooling=pooling, int32=dtype == torch.int32)
    batch = batch_of(case, 0, 0)
    assert int(batch.length_per_key()[0]) > 2
    return case, with_ids(batch, 2, value), with_ids(batch, 2, 0)


@pytest.mark.parametrize("pooling", ["sum", "none"])
@pytest.mark.parametrize(("dtype", "value"), BAD_IDS)
def test_fatal_ids_are_named(pooling, dtype, value):
    case, batch, _ = batch_with_bad_id(pooling, dtype, value)
    with pytest.raises(OperError) as told:
        alone(case)(batch)
    text = f"feature 'f0': id {value}, number 2 of the feature on rank 0, is none of the rows 0 "
    assert text + "to 49 of table 't0'" in str(told.value)


def test_one_rank_goes_on_after_a_wrong_batch():
    case, batch, mended = batch_with_bad_id("sum", torch.int64, 50)
    engine = alone(case)
    for wrong, text in (
        (batch, "id 50"),
        (torch.ones(3), "expected a KeyedJaggedTensor"),
    ):
        with pytest.raises(OperError, match=text):
            engine(wrong)
    engine(mended).sum().backward()
    assert engine.steps == 1
    engine.read_rows([RowRange(0, 0, 1)])


@pytest.mark.parametrize("bounds", ["warning", "ignore"])
@pytest.mark.parametrize("pooling", ["sum", "none"])
@pytest.mark.parametrize(("dtype", "value"), BAD_IDS)
def test_other_ids_read_and_train_row_zero(bounds, pooling, dtype, value, caplog):
    case, batch, mended = batch_with_bad_id(pooling, dtype, value)
    found = []
    for given in (batch, mended):
        engine = alone(case, bounds=bounds)
        with caplog.at_level(logging.WARNING, logger="oper"):
            out = engine(given)
        out.backward(torch.ones_like(out))
        tables = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
        found.append([out.detach(), *tables])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == (bounds == "warning")
    assert all(f"feature 'f0': id {value}" in text and "row 0" in text for text in warned)


def test_unknown_bounds():
    with pytest.raises(
        OperError, match="bounds: expected one of fatal, warning, ignore; got 'none'"
    ):
        alone(CASE, bounds="none")


# Batches that contradict themselves, or the module.


def kjt(keys=("f0", "f1", "f2", "g2"), values=8, **parts):
    from torchrec import KeyedJaggedTensor

    ids = values if isinstance(values, torch.Tensor) else torch.zeros(values, dtype=torch.int64)
    if not parts:
        parts = {"lengths": torch.ones(8, dtype=torch.int32)}
    return KeyedJaggedTensor(list(keys), ids, **parts)


BAD_BATCHES = {
    "lengths that sum to less": (lambda: kjt(values=9), "0 to 8 are in use, and there are 9"),
    "lengths that sum to more": (lambda: kjt(values=7), "0 to 8 are in use, and there are 7"),
    "the same in another order": (
        lambda: kjt(("g2", "f0", "f1", "f2", "x"), 7, lengths=torch.tensor([2, 2] * 5)),
        "0 to 20 are in use, and there are 7",
    ),
    "negative lengths": (
        lambda: kjt(lengths=torch.tensor([1, 1, 1, -2, 4, 1, 1, 1])),
        "feature 'f1': the length of sample 1 is -2",
    ),
    "offsets that descend": (
        lambda: kjt(offsets=torch.tensor([0, 1, 2, 3, 4, 5, 9, 7, 8])),
        "feature 'g2': the length of sample 0 is -2",
    ),
    "offsets that begin late": (
        lambda: kjt(offsets=torch.tensor([1, 1, 2, 3, 4, 5, 6, 7, 8])),
        "values 1 to 8 are in use",
    ),
    "lengths that are no samples": (
        lambda: kjt(lengths=torch.tensor([1, 1, 1, 1, 1, 1, 2])),
        "has 7 lengths, and 4 features of 1 samples need 4",
    ),
    "samples that differ": (
        lambda: kjt(
            lengths=torch.ones(8, dtype=torch.int32), stride_per_key_per_rank=[[1], [2], [2], [3]]
        ),
        "different number of samples for each feature",
    ),
    "a missing feature": (
        lambda: kjt(("f0", "f1", "f2", "x")),
        "feature 'g2': the batch does not hold it; it has 'f0', 'f1', 'f2', 'x'",
    ),
    "a feature twice": (
        lambda: kjt(("f0", "f1", "f2", "g2", "f1"), 10, lengths=torch.ones(10).int()),
        "feature 'f1': expected each feature once in the batch, got this one 2 times",
    ),
    "another feature twice": (
        lambda: kjt(("f0", "f1", "x", "f2", "g2", "x"), 12, lengths=torch.ones(12).int()),
        "feature 'x': expected each feature once in the batch, got this one 2 times",
    ),
    "values of two dimensions": (
        lambda: kjt(values=torch.zeros(4, 2, dtype=torch.int64)),
        "values: expected one dimension, got shape [4, 2]",
    ),
    "ids that are no integers": (
        lambda: kjt(values=torch.zeros(8)),
        "on cpu, the tables' device, got torch.float32 on cpu",
    ),
}


@pytest.mark.parametrize("pooling", ["sum", "none"])
@pytest.mark.parametrize("name", BAD_BATCHES)
def test_batches_that_cannot_be(name, pooling):
    make, text = BAD_BATCHES[name]
    with pytest.raises(OperError) as told:
        alone(replace(CASE, pooling=pooling))(make())
    assert text in str(told.value)


def test_weights_that_are_missing_or_too_few():
    case = replace(CASE, weighted=True)
    with pytest.raises(OperError, match="the batch has no weights"):
        alone(case)(kjt())
    for shape in ((7,), (8, 1)):
        with pytest.raises(OperError, match=r"weights: expected one for each of 8 values, got"):
            alone(case)(kjt(lengths=torch.ones(8, dtype=torch.int32), weights=torch.ones(shape)))


def test_features_in_any_order_beside_others():
    engine = alone(CASE)
    batch = batch_of(CASE, 0, 0)
    expected = engine(batch)
    order = [3, 1, 0, 2]
    assert torch.equal(engine(batch.permute(order)), expected)
    wider = {key: batch[key] for key in ("g2", "f1", "f2", "f0")} | {"x": batch["f1"]}
    from torchrec import KeyedJaggedTensor

    assert torch.equal(engine(KeyedJaggedTensor.from_jt_dict(wider)), expected)


def test_a_bad_request_does_not_end_a_server():
    plan = random_plan(1, tables_of(CASE), 1, mode="inference")
    engine = EmbeddingEngine(plan, module_tables(CASE), group=None)
    with torch.no_grad():
        with pytest.raises(OperError, match="feature 'f0'"):
            engine(with_ids(batch_of(CASE, 0, 0), 0, -7))
        assert engine(batch_of(CASE, 0, 0)).shape[0] == batch_of(CASE, 0, 0).stride()


def test_the_others_get_the_message_of_a_rank_that_fails(ranks):
    batches = [batch_of(CASE, 0, rank) for rank in range(3)]
    batches[1] = with_ids(batches[1], 0, 12345)
    found = ranks.run(3, fault_cases.lookup_each, CASE, PLAN, batches)
    for text in found:
        assert "feature 'f0': id 12345, number 0 of the feature on rank 1" in text
    assert all("rank 1 failed: " in found[rank] for rank in (0, 2))


def test_the_others_are_told_of_initial_values_that_cannot_be_made(ranks):
    found = ranks.run(3, fault_cases.fill_wrongly, CASE, PLAN)
    assert "table 't1': its init_fn failed" in found[1]
    assert found[0] == found[2] == f"rank 1 failed: {found[1]}"


def test_servers_are_told_of_tables_that_another_cannot_write_and_serve_on(ranks):
    plan = random_plan(1, tables_of(CASE), 3, mode="inference")
    found = ranks.run(3, fault_cases.write_wrongly, CASE, plan)
    assert "table 't1': id 1" in found[1]
    assert found[0] == found[2] == f"rank 1 failed: {found[1]}"


# Ranks that were given different things.

OTHER = random_plan(2, tables_of(CASE), 3)
FOR_TWO = random_plan(1, tables_of(CASE), 2)
SERVING = random_plan(5, tables_of(CASE), 3, mode="inference", replicated=0.9)
# Copies on all ranks, as in training, of which one rank reads another's.
UNREAD = random_plan(5, tables_of(CASE), 3, replicated=0.9)
UNREAD = replace(UNREAD, layout=replace(UNREAD.layout, source=UNREAD.layout.source.copy()))
UNREAD.layout.source[UNREAD.layout.holds.all(axis=1), 1] = 2


@pytest.mark.parametrize(
    ("second", "plan", "options", "text"),
    [
        (CASE, OTHER, {}, "plan: expected the same on all ranks"),
        (CASE, FOR_TWO, {}, "plan: expected the same on all ranks"),
        (replace(CASE, optimizer="sgd"), PLAN, {}, "tables and optimizers: expected the same"),
        (replace(CASE, lr=0.25), PLAN, {}, "tables and optimizers: expected the same"),
        (replace(CASE, pooling="mean"), PLAN, {}, "tables and optimizers: expected the same"),
        (CASE, PLAN, {"weighted": True}, "tables and optimizers: expected the same"),
        (CASE, PLAN, {"gradient_scale": 1.0}, "tables and optimizers: expected the same"),
    ],
)
def test_ranks_that_differ_find_it_at_the_start(ranks, second, plan, options, text):
    given = ([CASE, second, CASE], [PLAN, plan, PLAN], [{}, options, {}])
    for told in ranks.run(3, fault_cases.start_each, *given):
        assert text in told
        by_value = text.startswith("tables")  # of plans, digests are named
        assert re.search(r" on rank 1( \(and \d more\))?: give" if by_value else "rank 1: ", told)
        assert (" on ranks 0, 2 and " if by_value else "ranks 0, 2: ") in told


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (FOR_TWO, "the plan is for 2 ranks, and 3 are running"),
        (
            replace(SERVING, workload=Workload("training", "raw", 64)),
            "the plan was made for inference, and the model is to be trained",
        ),
        (
            replace(UNREAD, workload=Workload("training", "raw", 64)),
            "the plan was made for inference, and the model is to be trained",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused_by_every_rank(ranks, plan, text):
    for told in ranks.run(3, fault_cases.start_each, [CASE] * 3, [plan] * 3, [{}] * 3):
        assert text in told


# Gradients that are not finite.


@pytest.mark.parametrize(
    ("column", "name", "value"), [(0, "f0", float("nan")), (-1, "g2", float("-inf"))]
)
def test_gradients_that_are_not_finite_name_their_feature(ranks, column, name, value):
    found = ranks.run(3, fault_cases.train_with_gradients, CASE, PLAN, 2, column, value)
    row = batch_of(CASE, 0, 2).stride() - 1
    for text in found:
        assert f"feature {name!r}: the gradient of its output row {row} is not finite" in text
        assert "rank 2, step 1" in text


def test_unpooled_gradients_that_are_not_finite():
    case = replace(CASE, pooling="none")
    engine = alone(case, check_gradients=True)
    batch = batch_of(case, 0, 0).permute([2, 0, 3, 1])
    out = engine(batch)
    grad = torch.ones_like(out)
    lengths, dims = batch.length_per_key(), [8, 8, 8, 16]
    grad[lengths[0] * dims[0] + dims[1] + 3] = torch.nan
    with pytest.raises(OperError, match="feature 'f0': the gradient of its output row 1 is"):
        out.backward(grad)
    assert engine.steps == 0


# Ranks that are lost.

PHASES = ["join", "forward", "backward", "marked", "published", "reduced", "applied", "read tables"]


def lose(phase: str, kind: int, **options) -> list[tuple[str, float]]:
    """What ranks 0 and 2 are told when rank 1 is lost, and after how many seconds."""
    with Ranks(3) as ranks:
        return ranks.run(
            3, fault_cases.train_till_lost, CASE, PLAN, phase, 1, kind, lost=(1,), **options
        )[::2]


# Rank 1 shares memory with both of the others, with none of them, with one.
@pytest.mark.parametrize(
    ("phase", "nodes"),
    [(phase, None) for phase in PHASES]
    + list(itertools.product(PHASES[::2], [(0, 1, 0)]))
    + list(itertools.product(PHASES[1::2], [(0, 1, 1)])),
)
def test_a_rank_that_is_killed_is_named_by_all_others(phase, nodes):
    for text, seconds in lose(phase, signal.SIGKILL, deadline_seconds=60.0, nodes=nodes):
        assert text.startswith("rank 1 died while rank ")
        assert seconds < 30


STOPS = [("join", None), ("published", None), ("backward", (0, 1, 0)), ("backward", (0, 1, 1))]


@pytest.fixture(scope="module")
def stopped():
    """What was told in each case: all of them wait for the deadline at the same time."""

    def stop(case):
        return lose(case[0], signal.SIGSTOP, deadline_seconds=3.0, nodes=case[1])

    with ThreadPoolExecutor(len(STOPS)) as pool:
        return dict(zip(STOPS, pool.map(stop, STOPS), strict=True))


@pytest.mark.parametrize(("phase", "nodes"), STOPS)
def test_a_rank_that_stops_is_named_at_the_deadline(phase, nodes, stopped):
    for text, seconds in stopped[phase, nodes]:
        assert text.startswith("rank 1 did not come within 3 s, while rank ")
        if nodes != (0, 1, 1):  # there rank 2 can see it and rank 0 cannot, and either may be first
            assert text.endswith("is stopped)") == (phase != "join" and nodes is None)
        assert seconds < 30


def test_a_rank_of_another_node_that_fails_is_named_by_all_others():
    batches = [batch_of(CASE, 0, rank) for rank in range(3)]
    batches[1] = with_ids(batches[1], 0, 12345)
    with Ranks(3) as ranks:
        found = ranks.run(3, fault_cases.lookup_each, CASE, PLAN, batches, nodes=(0, 1, 0))
    first = "feature 'f0': id 12345, number 0 of the feature on rank 1"
    assert found[1].startswith(first)
    assert found[0].startswith("rank 1 failed: " + first)
    assert found[2] == found[0]


# Memory, forks, and what is left.


@pytest.mark.parametrize("nodes", [None, (0, 1, 1)])
def test_too_little_memory_is_an_error_on_every_rank(ranks, nodes):
    room = [1000, 1 << 40, 1 << 40]
    for text in ranks.run(3, fault_cases.start_with_room, CASE, PLAN, room, nodes):
        assert "the heap takes" in text
        assert "the machine of 0 has 1,000 free" in text


def test_too_little_memory_for_a_mailbox(ranks):
    case = replace(CASE, dims=(512,), rows=(3000, 3000))
    plan = random_plan(1, tables_of(case), 3)
    for text in ranks.run(3, fault_cases.train_with_room, case, plan, 1):
        assert "free bytes of shared memory, got 100 of the machine" in text


def test_a_forked_child_is_told(ranks):
    for told in ranks.run(3, fault_cases.use_in_child, CASE, PLAN):
        assert len(told) == 4
        assert all("was forked from" in text for text in told)


def test_nothing_is_left(ranks):
    for found in ranks.run(3, fault_cases.leftovers, CASE, PLAN):
        files = found["open_files"]
        assert len({after for _, after in files}) == 1
        assert all(closed == after for closed, after in files if closed is not None)
        assert found["alive"] == found["mapped"] == [False] * 4
        assert not found["shared"]
        assert "released by close()" in found["closed"]
