"""Mailboxes on devices: what each rank reads of the others while ranks replace theirs by larger
ones, in processes that share the memory of one device; and how that ends where a rank is gone."""

import re
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.base.errors import OperError
from oper.base.free_memory import FreeMemory
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.memory.device import Cpu, Cuda
from oper.runtime.memory.gradient_mailbox import DeviceMailboxes
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients, laid_out
from tests.support.cuda.device_engines import device_of
from tests.support.examples import examples
from tests.support.runtime import mortal_ranks
from tests.support.runtime.ranks import Ranks
from tests.support.runtime.shared_memory import mapped_device_segments, open_descriptors

DIMS = (5, 64)
UNIT = 2 << 20  # of a device's memory: 7,900 rows, at 8 bytes of a slot and 256 of a gradient


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


def batch(rank: int, step: int, accesses: int, ranks: int) -> tuple[SortedRows, torch.Tensor]:
    """The rows of a batch, whose slots are as long as if all accesses were of different rows, and
    the values of their gradients, gaps before buckets included."""
    random = np.random.default_rng([rank, step, accesses])
    groups = len(DIMS) * (1 + ranks)
    ends = np.sort(random.integers(0, accesses + 1, groups))
    before = torch.from_numpy(np.concatenate([[0], ends]))
    slots = torch.from_numpy(random.integers(0, 1 << 40, accesses))
    size = int(laid_out(before, DIMS, Cpu())[1, -1])
    return SortedRows(slots, before, ranks), torch.from_numpy(random.random(size, np.float32))


def there(rows: SortedRows, device: Cuda) -> SortedRows:
    put = device.torch_device
    return SortedRows(rows.slots.to(put), rows.before.to(put), rows.ranks)


def cuda_of(library: str | None) -> Cuda:
    device = device_of(library)
    assert isinstance(device, Cuda)
    return device


def assert_holds(found: RowGradients, rows: SortedRows, values: torch.Tensor) -> None:
    count = int(rows.before[-1])
    assert torch.equal(found.groups.cpu(), laid_out(rows.before, DIMS, Cpu()))
    assert torch.equal(found.slots[:count].cpu(), rows.slots[:count])
    assert torch.equal(found.values[: len(values)].cpu(), values)
    assert found.values.data_ptr() % 64 == 0


class Exchange:
    """What the ranks do with their mailboxes in each step, without anything to update."""

    def __init__(self, group: Any, library: str | None, deadline_seconds: float = 20) -> None:
        self.node = Node.join(group, deadline_seconds)
        self.signals = Signals(self.node, ["published", "applied"])
        self.device = cuda_of(library)
        self.mailboxes = DeviceMailboxes(self.node, self.device, DIMS)
        self.step = 0
        self.descriptors = open_descriptors()  # before any mailbox grows
        self.signals.barrier("begin")

    def write(self, accesses: int) -> None:
        self.signals.wait("applied", self.step, "update its rows")
        self.step += 1
        rows, values = batch(self.node.rank, self.step, accesses, self.node.ranks)
        mine = self.mailboxes.open(there(rows, self.device))
        mine.values[: len(values)] = values.to(self.device.torch_device)
        self.device.synchronize()

    def publish(self) -> None:
        self.signals.post("published", self.step)
        self.signals.wait("published", self.step, "send its gradients")

    def check(self, accesses: list[int]) -> None:
        for rank in self.node.peers:
            found = self.mailboxes.read(rank)
            assert_holds(found, *batch(rank, self.step, accesses[rank], self.node.ranks))
            assert self.mailboxes.read(rank) is found  # and not made again

    def apply(self) -> None:
        self.signals.post("applied", self.step)


def _exchange(rank: int, group: Any, steps: list[list[int]], library: str | None) -> list[int]:
    """Bytes of this rank's mailbox after each step."""
    before, bytes = open_descriptors(), []
    exchange = Exchange(group, library)
    for accesses in steps:
        exchange.write(accesses[rank])
        exchange.publish()
        exchange.check(accesses)
        bytes.append(exchange.mailboxes.bytes)
        if library is not None:  # nothing is mapped that was replaced
            assert mapped_device_segments() == exchange.node.ranks
        assert open_descriptors() == exchange.descriptors
        exchange.apply()
    exchange.signals.wait("applied", len(steps), "end")
    exchange.node.close()
    del exchange
    assert mapped_device_segments() == 0  # without a collection of garbage
    assert open_descriptors() == before
    return bytes


def test_ranks_grow_at_different_steps(ranks: Ranks, library: str | None) -> None:
    few, more, most, unchanged = 10, 15_000, 30_000, 18_000
    steps = [[few, few], [more, few], [unchanged, few], [few, more], [most, most], [few, few]]
    found = ranks.run(2, _exchange, steps, library)
    # 15,000 rows would take 2 units; a quarter more is 3.
    assert [[size // UNIT for size in of_rank] for of_rank in found] == [
        [1, 3, 3, 3, 5, 5],
        [1, 1, 1, 3, 5, 5],
    ]


@given(
    size=st.sampled_from([2, 4]),
    steps=st.lists(
        st.lists(
            st.sampled_from([0, 1, 100, 7_800, 8_000, 11_000, 20_000]), min_size=4, max_size=4
        ),
        min_size=1,
        max_size=4,
    ),
)
@examples(8)
def test_any_growth(ranks: Ranks, library: str | None, size: int, steps: list[list[int]]) -> None:
    for bytes in ranks.run(size, _exchange, steps, library):
        assert bytes == sorted(bytes)


@pytest.mark.parametrize("dims", [DIMS, (1,), (2, 0), (3, 3, 3), (0,), ()])
def test_a_full_mailbox(library: str | None, dims: tuple[int, ...]) -> None:
    """It has room for all rows of the widest bucket, and grows for one more."""
    device = cuda_of(library)
    mailboxes = DeviceMailboxes(Node.join(None), device, dims)
    first = len(mailboxes.read(0).slots)
    for accesses, grows in ((first, False), (first + 1, True)):
        before = torch.full((2 * len(dims) + 1,), accesses)
        before[0] = 0
        bytes = mailboxes.bytes
        mine = mailboxes.open(there(SortedRows(torch.arange(accesses), before, 1), device))
        assert (mailboxes.bytes > bytes) == grows
        assert len(mine.slots) >= accesses
        assert len(mine.values) >= max(dims, default=0) * accesses + 16 * len(dims)
        parts = (mine.groups, mine.slots, mine.values)
        ends = [part.data_ptr() + part.nbytes for part in parts]
        assert ends[0] <= mine.slots.data_ptr()
        assert ends[1] <= mine.values.data_ptr()
        assert ends[2] <= mine.groups.data_ptr() + mailboxes.bytes
        assert mine.values.data_ptr() % 64 == 0


def test_no_memory_to_grow(library: str | None) -> None:
    """What is free must suffice for the new mailbox beside the old one, to the byte."""
    device = cuda_of(library)
    mailboxes = DeviceMailboxes(Node.join(None), device, DIMS)
    rows = there(batch(0, 1, 20_000, 1)[0], device)

    def grow(free_bytes: int) -> None:
        free = [FreeMemory("the device", "gpu 0", free_bytes)]
        with mock.patch.object(device, "free_memory", return_value=free):
            mailboxes.open(rows)

    with pytest.raises(OperError, match=r"expected 6,600,\d+ free bytes, got 1,000,000") as error:
        grow(1_000_000)
    needed = int(re.findall(r"expected ([\d,]+)", str(error.value))[0].replace(",", ""))
    with pytest.raises(OperError, match=f"got {needed - 1:,} of"):
        grow(needed - 1)
    mailboxes.open(there(batch(0, 1, 100, 1)[0], device))
    grow(needed)


def _die(rank: int, group: Any, library: str | None, when: str, kind: signal.Signals) -> Any:
    """Rank 1 is lost after its mailbox has grown; what the other still reads, and its error."""
    exchange = Exchange(group, library, DEADLINES[kind])
    accesses = [10, 20_000]
    unsent = rank == 1 and when == "nothing is sent"
    with mock.patch.object(Node, "send") if unsent else nullcontext():
        exchange.write(accesses[rank])
    if rank == 1:
        if when != "before it is published":
            exchange.signals.post("published", 1)
        mortal_ranks.lose_this_process(kind)
    read = False
    try:
        exchange.publish()
        if when == "after it is published":
            deadline = time.monotonic() + 60
            while kind == signal.SIGKILL and exchange.node.liveness.alive(1):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        exchange.check(accesses)
        read = True
        exchange.apply()
        exchange.write(accesses[rank])
    except OperError as error:
        return read, str(error)
    return None


WAITED_FOR = {
    "before it is published": "send its gradients",
    "nothing is sent": "hand memory over",
    "after it is published": "update its rows",
}


# A rank that died is found long before: these tests end in a minute.
DEADLINES = {signal.SIGKILL: 600.0, signal.SIGSTOP: 1.5}


@pytest.mark.parametrize("kind", DEADLINES)
@pytest.mark.parametrize("when", WAITED_FOR)
def test_a_rank_is_lost_after_its_mailbox_grew(
    library: str | None, when: str, kind: signal.Signals
) -> None:
    read, error = mortal_ranks.run(2, _die, library, when, kind, silent=[1])[0]
    assert read == (when == "after it is published")
    assert error.startswith("rank 1 d")  # died, or did not come
    assert f"waited for it to {WAITED_FOR[when]}" in error


def _without_access(rank: int, group: Any, library: str | None) -> tuple[str, int]:
    exchange, accesses = Exchange(group, library), [20_000, 10]
    exchange.write(accesses[rank])
    failure = RuntimeError("no access to this memory")
    attach = mock.patch.object(native.ops(), "attach_device_segment", side_effect=failure)
    try:
        exchange.publish()
        with attach if rank == 1 else nullcontext():
            exchange.check(accesses)
        exchange.apply()
        exchange.signals.wait("applied", 1, "update its rows")
    except OperError as error:
        exchange.signals.fail(error)
        return str(error), open_descriptors() - exchange.descriptors
    return "", 0


def test_memory_that_cannot_be_mapped_fails_on_all_ranks(library: str | None) -> None:
    (first, _), (second, left_open) = mortal_ranks.run(2, _without_access, library)
    assert second.startswith("no access to this memory. Ranks of one host read each other's rows")
    assert first == f"rank 1 failed: {second}"
    assert left_open == 0  # what came with the message is closed
