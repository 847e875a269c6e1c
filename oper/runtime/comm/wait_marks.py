"""Wait marks: the present waits of the ranks of a node, and their actions, in memory that they
share.

A rank that did not come by a deadline may itself wait, for a third rank or for something else, and
the rank that is late is another one. So a rank marks each slice of its waits, in the marks of all
nodes that its process is in, such as those of a model's other collections. A rank whose mark
changes around a deadline waits.
"""

import itertools
import os
import weakref

import numpy as np
import torch

from oper.runtime.comm.shared_segment import Segment

_BYTES = 256  # of a rank's mark: its number, int64, and the text
_NUMBER_BYTES = 8
_all: "weakref.WeakSet[WaitMarks]" = weakref.WeakSet()  # of this process
_numbers = itertools.count(1)


class WaitMarks:
    """The marks of a node's ranks, `peers`, in a segment that they share; `rank` is this one."""

    def __init__(self, segment: Segment, peers: tuple[int, ...], rank: int) -> None:
        self._peers, self._mine, self._process = peers, peers.index(rank), os.getpid()
        self._marks = segment.tensor(0, (len(peers), _BYTES), torch.uint8).numpy()
        _all.add(self)

    @staticmethod
    def segment(ranks: int) -> Segment:
        """Return a new segment for the marks of so many ranks."""
        return Segment.create(ranks * _BYTES, ranks * _BYTES, "waits")

    def read(self) -> dict[int, str]:
        """Return the last mark of each rank: its number, a space and the text."""
        marks = {}
        for rank, mark in zip(self._peers, self._marks, strict=True):
            content = mark.tobytes()
            number = int.from_bytes(content[:_NUMBER_BYTES], "little")
            text = content[_NUMBER_BYTES:].rstrip(b"\0").decode(errors="ignore")
            marks[rank] = f"{number} {text}"
        return marks

    def _write(self, mark: bytes) -> None:
        if os.getpid() == self._process:
            self._marks[self._mine] = np.frombuffer(mark, dtype=np.uint8)


def mark_wait(action: str) -> None:
    """Let the other ranks of this host see that this rank waits for others to do `action`."""
    text = action.encode()[: _BYTES - _NUMBER_BYTES].ljust(_BYTES - _NUMBER_BYTES, b"\0")
    mark = next(_numbers).to_bytes(_NUMBER_BYTES, "little") + text
    for marks in list(_all):
        marks._write(mark)
