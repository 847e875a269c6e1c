"""The heap: rows of all tables and their optimizer state, of all ranks of a node (§5.1).

A rank has two arenas per width, one of rows and one of optimizer state, both indexed by slot.
They lie in one segment of shared memory, which the others of the node have mapped.
"""

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from oper.errors import OperError
from oper.free_memory import free_memory
from oper.layout import Ints
from oper.runtime.node import Node
from oper.runtime.segment import Segment

_ALIGNMENT = 4096


class Heap:
    """Arenas of W widths: rows of `row_bytes[w]` and state of `state_bytes[w]` bytes a slot.

    `slots` [W, M] are those of each rank; all begin as zero. Made by all ranks together.
    """

    def __init__(
        self, node: Node, slots: Ints, row_bytes: Sequence[int], state_bytes: Sequence[int]
    ) -> None:
        self.node = node
        self._slots = np.asarray(slots, dtype=np.int64)
        self._widths = (list(map(int, row_bytes)), list(map(int, state_bytes)))
        sizes = [self._slots.tobytes(), json.dumps(self._widths).encode()]
        node.agree(hashlib.sha256(b"".join(sizes)).digest(), "the sizes of the heap")
        # Arenas in order: rows of each width, then state of each width.
        arenas = np.concatenate([self._slots * np.array(w)[:, None] for w in self._widths])
        ends = np.cumsum(-(-arenas // _ALIGNMENT) * _ALIGNMENT, axis=0)
        self._starts = np.concatenate([np.zeros_like(ends[:1]), ends])
        self.bytes = int(self._starts[-1, node.rank])
        check_memory(node, self.bytes, "the heap")
        self._segments = node.share(Segment.create(self.bytes, self.bytes, "heap"))
        self.bases = torch.zeros(len(self._slots), node.ranks + 1, dtype=torch.int64)
        for peer, segment in self._segments.items():
            for w in range(len(self._slots)):
                self.bases[w, peer] = segment.pointer + int(self._starts[w, peer])

    def rows(self, width: int, rank: int | None = None) -> torch.Tensor:
        """Rows of a width at a rank of the node (None: this one), uint8 [slots, row_bytes]."""
        return self._arena(0, width, rank)

    def state(self, width: int, rank: int | None = None) -> torch.Tensor:
        """Optimizer state by slot, uint8 [slots, state_bytes]."""
        return self._arena(1, width, rank)

    def _arena(self, kind: int, width: int, rank: int | None) -> torch.Tensor:
        rank = self.node.rank if rank is None else rank
        start = int(self._starts[kind * len(self._slots) + width, rank])
        shape = (int(self._slots[width, rank]), self._widths[kind][width])
        return self._segments[rank].tensor(start, shape, torch.uint8)


def check_memory(node: Node, bytes: int, what: str) -> None:
    """OperError on all ranks of the node, unless there is room for `bytes` of each of them.

    To be called by all of them before any takes its part.
    """
    mine = {
        "bytes": bytes,
        "places": [(left.place, left.identity, left.free_bytes) for left in free_memory()],
    }
    needed: dict[str, int] = {}
    room: dict[str, tuple[int, str]] = {}
    for message in node.gather(json.dumps(mine).encode(), f"say how much {what} takes").values():
        given = json.loads(message)
        for place, identity, free_bytes in given["places"]:
            needed[identity] = needed.get(identity, 0) + given["bytes"]
            room[identity] = min(room.get(identity, (free_bytes, place)), (free_bytes, place))
    for identity, total in needed.items():
        free_bytes, place = room[identity]
        if total > free_bytes:
            raise OperError(
                f"{what} takes {total:,} bytes on the ranks of one node, {bytes:,} of them on rank "
                f"{node.rank}, and {place} has {free_bytes:,} free: plan for ranks with less "
                "memory each, use fewer replicas, or more hosts"
            )
