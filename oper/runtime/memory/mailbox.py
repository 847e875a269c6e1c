"""Mailbox: a rank's summed gradients, for the owners of the rows to fetch.

In shared memory, written by its rank once a step and read by all others of the node: how many runs
there are for each bucket and owner, their slots in ascending order, and beside them the gradients.

    int64    [buckets · (M + 1) + 1]   runs before each (bucket, owner code); code 0 are replicas
    int64    [runs]                    slots
    float32  [runs, dim]               bucket after bucket
"""

from collections.abc import Sequence

import torch

from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment

_RESERVE_BYTES = 1 << 38  # of address space, not of memory
_LINE = 64


class Mailboxes:
    """The mailboxes of the ranks of a node, of buckets of the given dims."""

    def __init__(self, node: Node, dims: Sequence[int]) -> None:
        self._rank, self._dims, self._codes = node.rank, tuple(dims), node.ranks + 1
        self._header = len(dims) * self._codes + 1
        own = Segment.create(_aligned(8 * self._header), _RESERVE_BYTES, "mailbox")
        self._segments = node.share(own)

    @property
    def bytes(self) -> int:
        """Of this rank's mailbox; it grows with the largest batch and is kept."""
        return self._segments[self._rank].bytes

    def open(self, run_count: torch.Tensor, run_slot: torch.Tensor) -> list[torch.Tensor]:
        """Begin a new content: what the gradients of each bucket are to be written to, [runs, dim].

        `run_count` [buckets · (M + 1) + 1] and `run_slot` [runs] are those of the sort."""
        own = self._segments[self._rank]
        prefix = run_count.tolist()
        end, places = self._places(prefix)
        if end > own.bytes:
            own.grow(end)
        own.tensor(0, (self._header,), torch.int64).copy_(run_count)
        own.tensor(_aligned(8 * self._header), (prefix[-1],), torch.int64).copy_(run_slot)
        runs = [
            prefix[(b + 1) * self._codes] - prefix[b * self._codes] for b in range(len(self._dims))
        ]
        return [
            own.tensor(place, (count, dim), torch.float32)
            for place, count, dim in zip(places, runs, self._dims, strict=True)
        ]

    def read(self, rank: int, code: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What `rank` has for an owner code: of each bucket slots [n] and gradients [n, dim]."""
        segment = self._segments[rank]
        prefix = segment.tensor(0, (self._header,), torch.int64).tolist()
        _, places = self._places(prefix)
        found = []
        for b, (place, dim) in enumerate(zip(places, self._dims, strict=True)):
            base, first, last = (prefix[b * self._codes + k] for k in (0, code, code + 1))
            slots = segment.tensor(
                _aligned(8 * self._header) + 8 * first, (last - first,), torch.int64
            )
            rows = segment.tensor(
                place + 4 * dim * (first - base), (last - first, dim), torch.float32
            )
            found.append((slots, rows))
        return found

    def _places(self, prefix: Sequence[int]) -> tuple[int, list[int]]:
        """The end of a content, and where each bucket's gradients begin, in bytes."""
        place = _aligned(_aligned(8 * self._header) + 8 * prefix[-1])
        places = []
        for b, dim in enumerate(self._dims):
            places.append(place)
            runs = prefix[(b + 1) * self._codes] - prefix[b * self._codes]
            place = _aligned(place + 4 * dim * runs)
        return place, places


def _aligned(bytes: int) -> int:
    return -(-bytes // _LINE) * _LINE
