"""Steps that are captured and run again: the bits of steps that are run as they are, on the CPU."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from oper.base import native
from tests.cuda.test_training import CASES, same_bits
from tests.support.cuda import captured_steps as steps
from tests.support.cuda.device_engines import EmulatedDevice
from tests.support.runtime import mortal_ranks
from tests.support.runtime.engine_cases import Case, tables_of
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.shared_memory import mapped_device_segments


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def assert_same(found: list[Any], captures: int = 1) -> None:
    for on_device, on_cpu in found:
        for part in ("outputs", "weight_grads", "tables", "states"):
            same_bits(on_device[part], on_cpu[part])
        assert on_device["counted"] == on_cpu["counted"]
        assert on_device["steps"] == on_cpu["steps"]
        assert on_device["captures"] == captures


@pytest.mark.parametrize("name", CASES)
def test_captured_steps_train_as_on_the_cpu(ranks: Ranks, library: str | None, name: str) -> None:
    case = CASES[name]
    plan = random_plan(case.seed, tables_of(case), case.ranks, replicated=0.3)
    found = ranks.run(case.ranks, steps.train_captured_on_both, case, plan, library)
    assert_same(found)
    assert {on_device["graphs"] for on_device, _ in found} == {7 if case.ranks > 1 else 1}


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("method", ["dense", "allgather"])
def test_every_method_of_the_allreduce(
    ranks: Ranks, library: str | None, number: int, method: str
) -> None:
    case = Case(21, number, optimizer="adam", dims=(5, 16), rows=(300, 7, 900))
    plan = random_plan(21, tables_of(case), number, replicated=0.7, method=method)
    assert_same(ranks.run(number, steps.train_captured_on_both, case, plan, library))


@pytest.mark.parametrize("number", [1, 2])
def test_keys_in_another_order(ranks: Ranks, library: str | None, number: int) -> None:
    case = Case(23, number, weighted=True, optimizer="adagrad")
    plan = random_plan(case.seed, tables_of(case), number, replicated=0.3)
    given = (case, plan, library, steps.STEPS, True)
    assert_same(ranks.run(number, steps.train_captured_on_both, *given))


@pytest.mark.parametrize("number", [1, 2])
def test_serves_as_on_the_cpu(ranks: Ranks, library: str | None, number: int) -> None:
    case = Case(24, number, dtype="int8")
    plan = random_plan(case.seed, tables_of(case), number, replicated=0.3, mode="inference")
    assert_same(ranks.run(number, steps.train_captured_on_both, case, plan, library))


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("accumulated", [False, True])
def test_steps_of_two_batches(
    ranks: Ranks, library: str | None, number: int, accumulated: bool
) -> None:
    case = Case(20, number, optimizer="adam")
    plan = random_plan(20, tables_of(case), number, replicated=0.3)
    ranks.run(number, steps.two_batches_captured, case, plan, library, accumulated)


def test_batches_of_many_shapes_between_captured_steps(ranks: Ranks, library: str | None) -> None:
    """More than the engine keeps the descriptors of."""
    case = Case(29, 1, pooling="none")
    plan = random_plan(29, tables_of(case), 1)
    others = [(step, step, False) for step in range(4, 16)]
    schedule = (*steps.STEPS[:4], *others, (16, 0, True), (17, 0, True))
    assert_same(ranks.run(1, steps.train_captured_on_both, case, plan, library, schedule))


def test_marks_of_touched_rows_begin_between_steps(ranks: Ranks, library: str | None) -> None:
    """What is marked from a step on is marked by a step that is captured then."""
    case = Case(25, 2, optimizer="adagrad")
    plan = random_plan(25, tables_of(case), 2, replicated=0.3)
    given = (case, plan, library)
    assert_same(ranks.run(2, steps.touch_between, *given), captures=2)


@pytest.mark.parametrize("method", ["bitmap", "dense", "allgather"])
def test_rows_move_between_captured_steps(ranks: Ranks, library: str | None, method: str) -> None:
    case = Case(26, 2, optimizer="adagrad")
    plans = [
        random_plan(seed, tables_of(case), 2, replicated=0.3, method=method) for seed in (26, 27)
    ]
    found = ranks.run(2, steps.move_between, case, *plans, library)
    for on_device, on_cpu in found:
        for part in ("outputs", "tables", "states"):
            same_bits(on_device[part], on_cpu[part])
        assert on_device["captures"] >= 2


@pytest.mark.parametrize("at", ["marked", "published", "reduced", "applied"])
def test_a_rank_that_dies_in_a_captured_step_is_named(library: str | None, at: str) -> None:
    case = Case(22, 2, optimizer="adagrad")
    plan = random_plan(22, tables_of(case), 2, replicated=0.5)
    given = (case, plan, library, at)
    outcomes = mortal_ranks.run(2, steps.die_in_a_captured_step, *given, silent=[1])
    assert "rank 1 died while rank 0 waited for it to" in str(outcomes[0])


@pytest.mark.parametrize(
    ("method", "replicated", "times"),
    [
        ("bitmap", 0.0, 2000),
        ("bitmap", 1.0, 2000),
        ("bitmap", 1.0, 3),
        ("dense", 1.0, 2000),
        ("allgather", 1.0, 2000),
        ("allgather", 1.0, 3),
    ],
)
def test_a_larger_batch_beside_a_captured_step(
    library: str | None, method: str, replicated: float, times: int
) -> None:
    case = Case(28, 2, optimizer="adagrad")
    plan = random_plan(28, tables_of(case), 2, replicated=replicated, method=method)
    said = mortal_ranks.run(2, steps.grow_beside_a_captured_step, case, plan, library, times)
    if times == 3 and method == "bitmap":  # for which there is room
        assert said == ["", ""]
        return
    assert "give the step of oper.graph_step the largest batches first" in str(said[0])
    assert "rank 0 failed" in str(said[1])


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_that_fails_while_it_is_captured(
    ranks: Ranks, library: str | None, number: int
) -> None:
    case = Case(30, number, optimizer="adagrad")
    plan = random_plan(30, tables_of(case), number, replicated=0.3)
    ranks.run(number, steps.fail_while_captured, case, plan, library)


@pytest.mark.parametrize("number", [1, 2])
def test_rows_and_new_memory_are_refused_while_a_step_is_captured(
    ranks: Ranks, library: str | None, number: int
) -> None:
    case = Case(33, number)
    plan = random_plan(33, tables_of(case), number, replicated=0.3)
    for said in ranks.run(number, steps.use_rows_while_captured, case, plan, library):
        reads, grows, copies = said
        assert "expected rows to be read and written between steps" in reads
        assert "expected a step that needs no new memory while it is captured, got" in grows
        assert "expected a step without copies between the host and the device" in copies


def test_memory_that_dies_in_a_capture_is_unmapped_afterwards(emulated: Any) -> None:
    """To unmap it waits for the device, which would end the capture; garbage waits as well."""
    device = EmulatedDevice(str(emulated))
    before = mapped_device_segments()
    segments = [device.segment(1, 1), device.segment(1, 1)]
    kept = segments[0].memory[:1]
    assert mapped_device_segments() == before + 2

    def work() -> None:
        segments.clear()
        assert not gc.isenabled()
        assert mapped_device_segments() == before + 2

    device.captured(work)
    assert gc.isenabled()
    assert mapped_device_segments() == before + 1
    del kept
    assert mapped_device_segments() == before

    def fails() -> None:
        raise ValueError("in the user's step")

    with pytest.raises(ValueError, match="in the user's step"):
        device.captured(fails)
    assert gc.isenabled()
    with pytest.raises(RuntimeError, match="nobody holds segments"):
        native.ops().hold_segments(False)


def test_plans_with_distinct_fetches_are_refused(ranks: Ranks, library: str | None) -> None:
    case = Case(31, 2)
    plan = random_plan(31, tables_of(case), 2, fetch="distinct")
    for said in ranks.run(2, steps.refused, case, plan, library):
        assert "plan with fetch='raw'" in said


def test_bad_ids_are_told_of_the_batch_that_had_them(ranks: Ranks, library: str | None) -> None:
    """However many runs ago that was."""
    case = Case(31, 1)
    plan = random_plan(31, tables_of(case), 1)
    (said,) = ranks.run(1, steps.told_later, case, plan, library)
    assert len(said) == 3
    for text, number in zip(said, (3, 4, 9), strict=True):
        assert "in an earlier batch: feature 'f" in text
        assert f"id {10**6 + number}, number" in text
