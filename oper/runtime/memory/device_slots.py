"""Lists of slots, and rows on their way, that each rank of a node has for the others on devices.

They work as on the processor (shared_slots.py), except that a device's memory is replaced by more
when it must grow (growing_segments.py). Writes are part of the device's other work: the others see
them once this rank has waited for its device, and then signalled that. The number of slots stands
in the host's memory, in which the others find it without waiting.
"""

from functools import partial

import torch

from oper.cost.step_memory import with_slack
from oper.runtime.comm.growing_segments import GrowingSegments
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, Segment, aligned
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.step_room import device_segment


class DeviceBytes:
    """Memory of devices that each rank of a node writes, and the others read; all ranks make it
    together."""

    def __init__(self, node: Node, device: Cuda, what: str) -> None:
        """`what`: the purpose of the memory, for errors."""
        create = partial(device_segment, device, what)
        self._segments = GrowingSegments(node, create, LINE_BYTES)

    @property
    def bytes(self) -> int:
        """Bytes of this rank's memory."""
        return self._segments.mine.reserve_bytes

    def room(self, bytes: int) -> torch.Tensor:
        """Return this rank's memory, uint8 [bytes], with undefined content. To be called once
        nobody reads its earlier content any more."""
        if bytes > self.bytes:
            self._segments.grow(aligned(with_slack(bytes)))
        return self._segments.mine.tensor(0, [bytes], torch.uint8)

    def of(self, rank: int, bytes: int) -> torch.Tensor:
        """Return the memory of a rank that has said that it is written, uint8 [bytes]."""
        return self._segments.of(rank).tensor(0, [bytes], torch.uint8)


class DeviceSlots:
    """The lists of all ranks of a node, which make them together, with headers of up to `header`
    words in the host's memory."""

    def __init__(self, node: Node, device: Cuda, header: int, name: str) -> None:
        self._rank = node.rank
        size = aligned(8 * (1 + header))
        shared = node.share(Segment.create(size, size, name))
        # The number of slots, and then the header.
        self._words = {r: s.tensor(0, (1 + header,), torch.int64) for r, s in shared.items()}
        self._slots = DeviceBytes(node, device, "lists of rows of other nodes")

    @property
    def bytes(self) -> int:
        """Bytes of this rank's slots on its device."""
        return self._slots.bytes

    def write(self, header: torch.Tensor, slots: torch.Tensor) -> None:
        """Replace this rank's list: the first words of the header, on the host, and slots [n]."""
        words = self._words[self._rank]
        words[0] = len(slots)
        words[1 : 1 + header.numel()] = header.reshape(-1)
        self._slots.room(slots.nbytes).view(torch.int64).copy_(slots, non_blocking=True)

    def read(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's header [header], and its slots."""
        words = self._words[rank]
        return words[1:], self._slots.of(rank, 8 * int(words[0])).view(torch.int64)
