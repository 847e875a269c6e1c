"""Streams of one device: batches that are looked up on one stream while another trains, and work
on a device that does not end."""

import itertools
import os
import signal
import time
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.fetch_path import FetchPath
from oper.runtime.memory.runtime_plan import check_nodes
from oper.runtime.step.apply_gradients import Gradients
from oper.runtime.step.device_copies import DeviceCopies
from oper.runtime.step.prepare_batch import BatchPreparer
from oper.tables.table import Table
from tests.support.cuda.device_engines import EmulatedDevice, batch_on, device_of, start
from tests.support.cuda.emulator import Emulator
from tests.support.runtime import mortal_ranks
from tests.support.runtime.engine_cases import Case, tables_of
from tests.support.runtime.runtime_plans import random_plan


class StreamedDevice(EmulatedDevice):
    """Knows what comes before the work that is started on its streams, which are numbers: of each
    stream, how many pieces of every stream's work."""

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self.number, self.before = 0, {n: [0, 0] for n in (0, 1)}

    @property
    def stream(self) -> int:  # type: ignore[override]
        return self.number

    def point(self) -> Any:
        return list(self.before[self.number])

    def after(self, points: Iterable[Any]) -> None:
        for point in points:
            self.before[self.number] = list(map(max, self.before[self.number], point))

    def work(self) -> tuple[int, int]:
        """Start a piece of work; its stream and number."""
        self.before[self.number][self.number] += 1
        return self.number, self.before[self.number][self.number]

    def comes_after(self, piece: tuple[int, int]) -> bool:
        """Whether what is started now does."""
        return self.before[self.number][piece[0]] >= piece[1]


@pytest.mark.parametrize("streams", [(0, 1, 0, 1, 0, 1), (1, 1, 0, 0, 1, 0)])
def test_updates_and_reads_on_unlike_streams_keep_their_order(
    emulated: Any, streams: tuple[int, ...]
) -> None:
    """Batches are looked up one ahead, each on a stream of its own."""
    case = Case(5, 1, steps=len(streams))
    device = StreamedDevice(str(emulated))
    engine = start(case, random_plan(1, tables_of(case), 1), None, device)
    reads: list[tuple[int, int]] = []
    updates: list[tuple[int, int]] = []
    read, update = FetchPath.read, Gradients._update_by_runs

    def reading(self: FetchPath, *given: Any) -> torch.Tensor:
        assert all(map(device.comes_after, updates))
        reads.append(device.work())
        return read(self, *given)

    def updating(self: Gradients, *given: Any) -> None:
        assert all(map(device.comes_after, reads))
        updates.append(device.work())
        update(self, *given)

    ahead: list[tuple[int, torch.Tensor]] = []
    with (
        patch.object(FetchPath, "read", reading),
        patch.object(Gradients, "_update_by_runs", updating),
    ):
        for step, stream in enumerate(streams):
            device.number = stream
            ahead.append((stream, engine(batch_on(device, case, step, 0))))
            if len(ahead) == 2:
                device.number, out = ahead.pop(0)
                out.sum().backward()
    assert len(reads) == len(streams)
    assert len(updates) >= len(streams) - 1


def test_a_lookup_comes_after_the_preparation_of_its_batch(emulated: Any) -> None:
    case = Case(6, 1)
    device = StreamedDevice(str(emulated))
    engine = start(case, random_plan(1, tables_of(case), 1), None, device)
    prepare, read = BatchPreparer._prepared, FetchPath.read
    prepared: list[tuple[int, int]] = []
    reads = 0

    def preparing(self: BatchPreparer, batch: Any) -> Any:
        prepared.append(device.work())
        return prepare(self, batch)

    def reading(self: FetchPath, *given: Any) -> torch.Tensor:
        nonlocal reads
        assert device.comes_after(prepared[-1])
        reads += 1
        return read(self, *given)

    with (
        patch.object(BatchPreparer, "_prepared", preparing),
        patch.object(FetchPath, "read", reading),
    ):
        for first, then in ((0, 1), (1, 0), (1, 1)):
            device.number = first
            batch = engine.prepare(batch_on(device, case, 0, 0))
            device.number = then
            engine.lookup(batch)
    assert reads == 3


def test_a_kept_copy_is_used_after_it_was_made(emulated: Any) -> None:
    device = StreamedDevice(str(emulated))
    copies, made = DeviceCopies(device), []
    send = device.send

    def sending(tensor: torch.Tensor) -> torch.Tensor:
        made.append(device.work())
        return send(tensor)

    with patch.object(device, "send", sending):
        there = copies.of(torch.arange(3))
        device.number = 1
        device.kept.clear()
        assert copies.of(torch.arange(3)) is there
    assert len(made) == 1
    assert device.comes_after(made[0])
    assert device.kept == [there.data_ptr()]  # until the other stream has read it


class Counts:
    """Counts that streams add to, each after the others."""

    def __init__(self, device: StreamedDevice) -> None:
        self._device, self.added = device, [device.work()]

    def __iadd__(self, other: Any) -> "Counts":
        assert all(map(self._device.comes_after, self.added))
        self.added.append(self._device.work())
        return self

    def zero_(self) -> None:
        self += self


def test_streams_add_to_a_counter_one_after_the_other(emulated: Any) -> None:
    device = StreamedDevice(str(emulated))
    counters = Counters(1, device)
    counts: Any = Counts(device)
    for number in (0, 1, 0, 0, 1):
        device.number = number
        counters.add_later(counts, dict)
    device.number = 0
    counters.reset()
    assert len(counts.added) == 6


def test_words_of_the_host_are_refused_while_a_stream_is_captured(emulated: Any) -> None:
    """They would be read again by each run of the graph, from memory that others have by then."""
    native.ops().load_device_library(str(emulated))
    arena, out = torch.arange(16, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    copied, found = ([0], [1], [arena.data_ptr()], [8]), torch.full((1,), -1)

    def copy() -> None:
        ops, stream = torch.ops.oper_emulated, 0
        ops.copy_rows(torch.tensor([1]), *copied, out, [0], found, [5], stream=stream)

    captured = "a CUDA graph is captured, in which no memory of the host can be copied"
    with Emulator(emulated).captured(), pytest.raises(RuntimeError, match=captured):
        copy()
    assert not out.any()
    copy()
    assert out.tolist() == [*range(8, 16)]


@pytest.fixture
def streams() -> Any:
    """Two streams of a device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.cuda.Stream(), torch.cuda.Stream()


LONG = 200_000_000  # cycles of a device: about a tenth of a second


def test_a_device_prepares_a_batch_on_one_stream_and_looks_it_up_on_another(streams: Any) -> None:
    case = Case(6, 1, pooling="none")
    device = device_of(None)
    engine = start(case, random_plan(1, tables_of(case), 1), None, device)
    batch = batch_on(device, case, 0, 0)
    expected = engine(batch).detach().clone()
    other = batch_on(device, case, 1, 0)
    torch.cuda.synchronize()
    for first, then in (streams, streams[::-1]):
        with torch.cuda.stream(first):
            torch.cuda._sleep(LONG)
            prepared = engine.prepare(batch)
        with torch.cuda.stream(then):
            found = engine.lookup(prepared).detach().clone()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
        engine(other)  # something else in the memory of what was prepared


def test_a_device_copies_on_one_stream_what_another_reads(streams: Any) -> None:
    copies, given = DeviceCopies(device_of(None)), torch.arange(1, 1000)
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(LONG)
        copies.of(given)
    with torch.cuda.stream(streams[1]):
        found = copies.of(given.clone()).clone()
    torch.cuda.synchronize()
    assert torch.equal(found.cpu(), given)


def test_a_device_adds_on_two_streams(streams: Any) -> None:
    counters = Counters(1, device_of(None))
    for stream in (streams[0], *streams):
        with torch.cuda.stream(stream):
            if stream is streams[0]:
                torch.cuda._sleep(LONG)
            counters.add_later(torch.ones(1, dtype=torch.int64, device="cuda"), _as_lookups)
    assert counters.totals["lookups"] == 3


def _as_lookups(counts: Any) -> dict[str, int]:
    return {"lookups": int(counts[0])}


def test_a_long_wait_leaves_the_processor_to_others(emulated: Any) -> None:
    """After 50 µs the host asks at most once in a sixteenth of the time so far."""
    native.ops().load_device_library(str(emulated))
    emulator = Emulator(emulated)
    emulator.busy(True)
    try:
        before = emulator.queries()
        assert not torch.ops.oper.stream_is_done(0, 400, torch.device("cpu"))
        asked = emulator.queries() - before
    finally:
        emulator.busy(False)
    assert asked < 20_000  # each 200 µs, and as often as it can in the first 50 µs
    assert torch.ops.oper.stream_is_done(0, 400, torch.device("cpu"))


def busy_for_ever(rank: int, group: Any, library: str, dies: bool) -> float:
    """Rank 1 dies, or lives, while rank 0's device waits for what does not come."""
    device = device_of(library)
    signals = Signals(Node.join(group, 2.0), ["posted"], device.done)
    signals.post("posted", 1)
    signals.wait("posted", 1, "post")
    if rank == 1:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    Emulator(library).busy(True)  # type: ignore[arg-type]
    begun = time.monotonic()
    try:
        signals.post("posted", 2)
    except OperError as error:
        assert signals._counters["posted"][0, 0] == 1
        raise OperError(f"{time.monotonic() - begun:.0f} s: {error}") from error
    return 0.0


@pytest.mark.parametrize(
    ("dies", "says"),
    [(True, r"^0 s: rank 1 \(process \d+\) died"), (False, r"^2 s: rank 0 waited 2 s for its own")],
)
def test_work_that_does_not_end_is_told(emulated: Any, dies: bool, says: str) -> None:
    outcomes = mortal_ranks.run(2, busy_for_ever, str(emulated), dies, silent=(1,))
    with pytest.raises(OperError, match=says):
        raise outcomes[0]


@pytest.mark.parametrize("nodes", [[72], [71, 1], [69, 1, 1, 1]])
def test_more_ranks_than_a_step_takes_are_refused(nodes: list[int]) -> None:
    tables, fetch = (Table("t", 1000, 8),), "distinct" if len(nodes) > 1 else "raw"
    ends = list(itertools.accumulate(nodes))
    members = [[*range(end - size, end)] for size, end in zip(nodes, ends, strict=True)]
    check_nodes(members, random_plan(0, tables, ends[-1], fetch=fetch), "cuda:0")
    ends[-1] += 1
    members[0].append(ends[-1] - 1)
    with pytest.raises(
        OperError, match=f"of {ends[-1]} ranks {nodes[0] + 1} share a node, .* may be 73"
    ):
        check_nodes(members, random_plan(0, tables, ends[-1], fetch=fetch), "cuda:0")
    # In inference there are no updates.
    serving = random_plan(0, tables, ends[-1], fetch=fetch, mode="inference")
    check_nodes(members, serving, "cuda:0")
