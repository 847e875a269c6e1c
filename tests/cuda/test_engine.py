"""Engines on devices: inference by a plan equals that on the CPU in every bit, on 1, 2 and 4 ranks
that share the memory of one device."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime import table_io
from oper.runtime.comm.shared_segment import DeviceSegment
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import Cuda, Device
from oper.runtime.table_io import RowRange
from tests.support.cuda.device_engines import (
    EmulatedDevice,
    batch_on,
    device_of,
    serve_after_a_death,
    serve_on_both,
    served_cases,
    start,
)
from tests.support.examples import examples
from tests.support.runtime import mortal_ranks
from tests.support.runtime.engine_cases import Case, initial, tables_of
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.runtime_plans import random_plan


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def plan_of(case: Case, **options: Any) -> Plan:
    return random_plan(case.seed, tables_of(case), case.ranks, mode="inference", **options)


def assert_serves_as_on_the_cpu(ranks: Ranks, case: Case, library: str | None) -> None:
    plan = plan_of(case, replicated=0.3)
    for on_device, on_cpu in ranks.run(case.ranks, serve_on_both, case, plan, library):
        for found, expected in zip(on_device["outputs"], on_cpu["outputs"], strict=True):
            assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        for found, expected in zip(on_device["tables"], on_cpu["tables"], strict=True):
            assert torch.equal(found, expected)
        assert on_device["counted"] == on_cpu["counted"]


CASES = {
    "one rank": Case(1, 1),
    "two ranks": Case(2, 2),
    "four ranks": Case(3, 4, rows=(50, 7, 400, 30)),
    "weights": Case(4, 2, weighted=True),
    "means": Case(5, 2, pooling="mean"),
    "unpooled": Case(6, 2, pooling="none"),
    "as many ids as bags": Case(15, 2, bags="mean one"),
    "one id each": Case(7, 2, bags="one"),
    "one id each, unpooled": Case(8, 2, pooling="none", bags="one"),
    "ranks without samples": Case(9, 4, bags="none"),
    "int32 ids": Case(10, 2, int32=True),
    "odd dims": Case(11, 2, dims=(5, 12)),
    "fp16": Case(12, 2, dtype="fp16"),
    "bf16": Case(13, 2, dtype="bf16"),
    "int8": Case(14, 4, dtype="int8"),
}


@pytest.mark.parametrize("name", CASES)
def test_serves_as_on_the_cpu(ranks: Ranks, library: str | None, name: str) -> None:
    assert_serves_as_on_the_cpu(ranks, CASES[name], library)


@given(case=served_cases(ranks=[1, 2, 4], dims=[4, 6, 8, 64], bags=["one", "many", "none"]))
@examples(10)
def test_any_case_serves_as_on_the_cpu(ranks: Ranks, library: str | None, case: Case) -> None:
    assert_serves_as_on_the_cpu(ranks, case, library)


def test_a_killed_rank(library: str | None) -> None:
    case = Case(1, 2, steps=1)
    found, lost = mortal_ranks.run(2, serve_after_a_death, case, plan_of(case), library)
    assert lost is None
    assert found["equal"]  # memory that is mapped stays
    assert "rank 1 died" in found["error"]
    assert found["seconds"] < 30  # half of the deadline


CASE = Case(1, 1)


@pytest.mark.parametrize("value", [-1, 50, 2**40])
def test_bad_ids(library: str | None, value: int) -> None:
    device = device_of(library)
    engine = start(CASE, plan_of(CASE), None, device)
    batch = batch_on(device, CASE, 0, 0)
    batch.values()[1] = value
    found = engine(batch)  # the host does not wait for what it has to tell
    error = rf"in an earlier batch: feature 'f0': id {value}, number 1 .* table 't0'"
    with pytest.raises(OperError, match=error):
        told_of(engine, device)
    ignoring = start(CASE, plan_of(CASE), None, device, bounds="ignore")
    assert torch.equal(found, ignoring(batch))
    good = batch_on(device, CASE, 0, 0)
    good.values()[1] = 0
    assert torch.equal(found, ignoring(good))
    assert torch.equal(found, engine(good))


def told_of(engine: EmbeddingEngine, device: Device) -> None:
    """What is wrong in a batch is told with one of the next."""
    for step in range(4):
        engine.prepare(batch_on(device, CASE, step, 0))


def test_a_bad_id_is_told_before_tables_are_read(library: str | None) -> None:
    device = device_of(library)
    engine = start(CASE, plan_of(CASE), None, device)
    batch = batch_on(device, CASE, 0, 0)
    batch.values()[1] = -1
    engine(batch)
    with pytest.raises(OperError, match="in an earlier batch: feature 'f0': id -1, number 1"):
        engine.read_rows([])


def test_a_bad_id_that_is_gone_by_then_is_told_by_its_number(library: str | None) -> None:
    device = device_of(library)
    engine = start(CASE, plan_of(CASE), None, device)
    batch = batch_on(device, CASE, 0, 0)
    batch.values()[1] = -1
    engine(batch)
    device.synchronize()
    batch.values()[1] = 0
    with pytest.raises(OperError, match=r"its values were changed .* id number 1 was none"):
        engine.read_rows([])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda offsets: offsets[:-1], "lengths, and 4 features of"),
        (lambda offsets: torch.cat([offsets[:-1], offsets[-1:] + 1]), "must sum to that"),
        (lambda offsets: offsets.flip(0), "offsets must ascend"),
    ],
)
def test_lengths_that_contradict_the_values(library: str | None, change: Any, error: str) -> None:
    device = device_of(library)
    engine = start(CASE, plan_of(CASE), None, device)
    batch = batch_on(device, CASE, 0, 0)
    batch._offsets, batch._lengths = change(batch.offsets()), None

    def serve() -> None:
        engine(batch)
        told_of(engine, device)

    with pytest.raises(OperError, match=error):
        serve()


def test_a_graph_that_is_captured_is_refused(emulated: Path) -> None:
    case, device = Case(4, 1), device_of(str(emulated))
    engine = start(case, plan_of(case), None, device)
    assert isinstance(device, EmulatedDevice)
    batch = batch_on(device, case, 0, 0)
    prepared = engine.prepare(batch)
    device.captures = True
    for call in (lambda: engine.prepare(batch), lambda: engine.lookup(prepared)):
        with pytest.raises(OperError, match="a CUDA graph is being captured, and lookups"):
            call()
    device.captures = False
    engine.lookup(prepared)


def test_what_a_lookup_reads_is_kept_until_it_is_done(emulated: Path) -> None:
    """It may have been prepared on another stream, whose memory torch would use again."""
    device = device_of(str(emulated))
    assert isinstance(device, EmulatedDevice)
    case = Case(4, 1, weighted=True)
    engine = start(case, plan_of(case), None, device)
    batch = engine.prepare(batch_on(device, case, 0, 0))
    assert batch.offsets is not None
    assert batch.weights is not None
    device.kept.clear()
    engine.lookup(batch)
    read = (batch.addresses, batch.offsets, batch.weights)
    assert {tensor.data_ptr() for tensor in read} <= set(device.kept)


def _without_access(rank: int, group: Any, case: Case, plan: Plan, library: str) -> None:
    def attach(self: DeviceSegment, descriptor: int, reserve_bytes: int) -> DeviceSegment:
        raise OperError("memory that another rank shares could not be mapped on this device")

    device = device_of(library)
    if rank == 1:
        with mock.patch.object(DeviceSegment, "attach", attach):
            start(case, plan, group, device)
    start(case, plan, group, device)


def _on_unlike_devices(rank: int, group: Any, case: Case, plan: Plan, library: str) -> None:
    device = device_of(library)
    assert isinstance(device, EmulatedDevice)
    device.architecture = ("sm_80", "sm_90")[rank]
    start(case, plan, group, device)


def test_devices_of_unlike_architectures_are_refused_on_all_ranks(emulated: Path) -> None:
    case = Case(1, 2)
    for outcome in mortal_ranks.run(2, _on_unlike_devices, case, plan_of(case), str(emulated)):
        assert "unlike architectures (rank 0: sm_80; rank 1: sm_90)" in str(outcome)


def test_devices_without_access_to_each_other_fail_on_all_ranks(emulated: Path) -> None:
    """As parts of one device, or where each rank sees its own alone."""
    case = Case(1, 2)
    found, lost = mortal_ranks.run(2, _without_access, case, plan_of(case), str(emulated))
    for outcome in (found, lost):
        assert "memory that another rank shares could not be mapped" in str(outcome)


def test_a_device_that_is_not_there() -> None:
    with pytest.raises(OperError, match="expected a CUDA device such as cuda:0, got cpu"):
        Cuda("cpu")
    if not torch.cuda.is_available():
        with pytest.raises(OperError, match=r"there is no CUDA device here: \w+"):
            Cuda()


def test_tables_pass_through_a_device_in_pieces(library: str | None) -> None:
    device = device_of(library)
    case = Case(1, 1, dtype="fp16")
    with mock.patch.object(table_io, "_DEVICE_PIECE_BYTES", 100):
        engine = start(case, plan_of(case), None, device)
        tables = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    for number, found in enumerate(tables):
        assert torch.equal(found, initial(case, number).half().float())


def test_graphs_are_refused_by_name(library: str | None) -> None:
    device = device_of(library)
    engine = start(CASE, plan_of(CASE), None, device)
    batch = engine.prepare(batch_on(device, CASE, 0, 0))
    compiling = mock.patch.object(torch.compiler, "is_compiling", return_value=True)
    with compiling, pytest.raises(OperError, match=r"a graph of torch\.compile cannot .* on cuda"):
        engine.lookup(batch)
