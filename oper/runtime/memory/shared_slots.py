"""Shared slots: lists of slots that each rank of a node has for the others, with a header.

    int64    [header]   the starts of the lists, for their readers
    int64    [slots]

Written by its rank and read by all others of the node, after a signal. A segment is as long as the
most slots so far needed, so that no rank must ask another for its end.
"""

import torch

from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import RESERVE_BYTES, Segment, aligned

_MOST_ROWS = 1 << 31  # of a batch: the sort numbers accesses by 31 bits


class SharedSlots:
    """The lists of all ranks of a node, which make them together, with headers of up to `header`
    words; `name` is seen in /proc/PID/maps."""

    def __init__(self, node: Node, header: int, name: str) -> None:
        self._rank, self._header = node.rank, header
        self._slots_at = aligned(8 * header)
        most = self._slots_at + 8 * _MOST_ROWS
        self._segments = node.share(Segment.create(self._slots_at, most, name))
        # Views of a rank's segment at its present size: making them takes the host longer than all
        # else that this class does in a step.
        self._views: dict[int, tuple[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    @property
    def bytes(self) -> int:
        """Bytes of this rank's segment."""
        return self._segments[self._rank].bytes

    def write(self, header: torch.Tensor, slots: torch.Tensor) -> None:
        """Replace this rank's list: the first words of the header, and slots [n]."""
        self._segments[self._rank].grow(self._slots_at + slots.nbytes)
        words, mine = self.read(self._rank)
        words[: header.numel()] = header.reshape(-1)
        mine[: len(slots)] = slots

    def read(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a rank's header [header] and slots, with room for more: [n or more]. They are the
        same objects until there is more room."""
        segment = self._segments[rank]
        size = segment.bytes
        known = self._views.get(rank)
        if known is None or known[0] != size:
            views = (
                segment.tensor(0, (self._header,), torch.int64),
                segment.tensor(self._slots_at, ((size - self._slots_at) // 8,), torch.int64),
            )
            known = self._views[rank] = (size, views)
        return known[1]


class SharedBytes:
    """Memory that each rank of a node writes, and the others read; all ranks make it together, and
    `name` is seen in /proc/PID/maps."""

    def __init__(self, node: Node, name: str) -> None:
        self._rank = node.rank
        self._segments = node.share(Segment.create(0, RESERVE_BYTES, name))

    @property
    def bytes(self) -> int:
        """Bytes of this rank's memory."""
        return self._segments[self._rank].bytes

    def room(self, bytes: int) -> torch.Tensor:
        """Return this rank's memory, uint8 [bytes], which stays at its address and only grows."""
        self._segments[self._rank].grow(bytes)
        return self.of(self._rank, bytes)

    def of(self, rank: int, bytes: int) -> torch.Tensor:
        """Return the memory of a rank that has said that it is written, uint8 [bytes]."""
        return self._segments[rank].tensor(0, (bytes,), torch.uint8)
