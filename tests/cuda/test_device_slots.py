"""Lists and rows that ranks of a node have for each other on devices, as they grow."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.device_slots import DeviceBytes, DeviceSlots
from oper.runtime.memory.stream_order import StreamOrder
from tests.support.cuda.device_engines import device_of
from tests.support.runtime.ranks import Ranks

# Within a unit of device memory, just beyond, less again, and far beyond.
SIZES = (1_000, (2 << 20) + 8, 2 << 20, (2 << 20) + 16, 9_000_000, 64)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as started:
        yield started


def content(rank: int, step: int, size: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random)


def exchange(rank: int, group: Any, library: str | None) -> list[int]:
    """Each rank writes in turns of unlike sizes, and reads what the other has; the bytes that it
    shares after each turn."""
    device, node = device_of(library), Node.join(group, 20.0)
    assert isinstance(device, Cuda)
    signals = Signals(node, ["written", "read"], device.done)
    there, slots, shared = DeviceBytes(node, device, "rows"), DeviceSlots(node, device, 3, "s"), []
    for step in range(1, 1 + len(SIZES)):
        sizes = [SIZES[(step + r) % len(SIZES)] for r in range(2)]
        mine = content(rank, step, sizes[rank])
        there.room(sizes[rank]).copy_(mine)
        header = torch.tensor([step, rank])
        slots.write(header, mine[: sizes[rank] // 8 * 8].view(torch.int64).to(device.torch_device))
        signals.post("written", step)
        signals.wait("written", step, "write")
        for other in range(2):
            expected = content(other, step, sizes[other])
            assert torch.equal(there.of(other, sizes[other]).cpu(), expected)
            words, found = slots.read(other)
            assert words[:2].tolist() == [step, other]
            assert torch.equal(found.cpu(), expected[: sizes[other] // 8 * 8].view(torch.int64))
        signals.post("read", step)
        signals.wait("read", step, "read")
        shared.append(there.bytes)
    node.close()
    return shared


def test_what_ranks_share_grows(ranks: Ranks, library: str | None) -> None:
    for shared in ranks.run(2, exchange, library):
        assert shared == sorted(shared)
        assert shared[0] < shared[-1]


class _Recorded:
    """A device that says after which points the work on a stream comes."""

    kind = "cuda"

    capture = None

    def __init__(self) -> None:
        self.stream, self.waits = 0, list[str]()

    def point(self) -> str:
        return f"work on {self.stream}"

    def after(self, points: Any) -> None:
        self.waits = [*points]


def test_a_fetch_comes_after_the_reads_of_the_last_one() -> None:
    """On whatever stream: its rows come to where theirs were."""
    device = _Recorded()
    order = StreamOrder(device)  # type: ignore[arg-type]
    order.before_read(True)
    assert device.waits == []
    order.after_read()
    device.stream = 1
    order.before_read(False)
    assert device.waits == []
    order.before_read(True)
    assert device.waits == ["work on 0"]
