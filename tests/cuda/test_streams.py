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

from oper.base.errors import OperError
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.memory.runtime_plan import check_nodes
from oper.runtime.step.apply_gradients import Gradients
from oper.runtime.step.row_fetcher import RowFetcher
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
    read, update = RowFetcher.read, Gradients._update_by_runs

    def reading(self: RowFetcher, *given: Any) -> torch.Tensor:
        assert all(map(device.comes_after, updates))
        reads.append(device.work())
        return read(self, *given)

    def updating(self: Gradients, *given: Any) -> None:
        assert all(map(device.comes_after, reads))
        updates.append(device.work())
        update(self, *given)

    ahead: list[tuple[int, torch.Tensor]] = []
    with (
        patch.object(RowFetcher, "read", reading),
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
