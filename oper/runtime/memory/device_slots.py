"""Lists of slots, and rows on their way, that each rank of a node has for the others on devices.

As on the processor (shared_slots.py), but that the memory of a device is replaced by more where it
must grow (growing_segments.py). What is written goes with the device's other work: it is there for
others once this rank has waited for its device, and then said so by a signal. How many slots there
are of what stands in the host's memory, where the others find it without waiting.
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
        """`what` says in errors what the memory is for."""
        create = partial(device_segment, device, what)
        self._segments = GrowingSegments(node, create, LINE_BYTES)

    @property
    def bytes(self) -> int:
        """Bytes of this rank's memory."""
        return self._segments.mine.reserve_bytes

    def room(self, bytes: int) -> torch.Tensor:
        """This rank's, uint8 [bytes], whose content is anything. To be called once nobody reads any
        more what was there before."""
        if bytes > self.bytes:
            self._segments.grow(aligned(with_slack(bytes)))
        return self._segments.mine.tensor(0, [bytes], torch.uint8)

    def of(self, rank: int, bytes: int) -> torch.Tensor:
        """That of a rank which has said that it is written, uint8 [bytes]."""
        return self._segments.of(rank).tensor(0, [bytes], torch.uint8)


class DeviceSlots:
    """The lists of all ranks of a node, which make them together, with headers of up to `header`
    words in the host's memory."""

    def __init__(self, node: Node, device: Cuda, header: int, name: str) -> None:
        self._rank = node.rank
        size = aligned(8 * (1 + header))
        shared = node.share(Segment.create(size, size, name))
        # How many slots there are, and then the header.
        self._words = {r: s.tensor(0, (1 + header,), torch.int64) for r, s in shared.items()}
        self._slots = DeviceBytes(node, device, "lists of rows of other nodes")

    @property
    def bytes(self) -> int:
        """Bytes of this rank's slots on its device."""
        return self._slots.bytes

    def write(self, header: torch.Tensor, slots: torch.Tensor) -> None:
        """Replace this rank's: the first words of the header, on the host, and slots [n]."""
        words = self._words[self._rank]
        words[0] = len(slots)
        words[1 : 1 + header.numel()] = header.reshape(-1)
        self._slots.room(slots.nbytes).view(torch.int64).copy_(slots, non_blocking=True)

    def read(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A rank's header [header], and its slots."""
        words = self._words[rank]
        return words[1:], self._slots.of(rank, 8 * int(words[0])).view(torch.int64)
