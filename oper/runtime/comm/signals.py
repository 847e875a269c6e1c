"""Boards: counters by which ranks of a node tell each other how far they are, and sleep meanwhile.

Each rank has one counter per word. `wait` sleeps until all ranks' counters have come to a value;
the sleep is a futex in shared memory, taken in slices between which liveness is checked.
"""

import os
from collections.abc import Sequence

import torch

from oper.base import native
from oper.runtime.comm.deadline import Deadline
from oper.runtime.comm.group import SLICE_SECONDS
from oper.runtime.comm.lost_ranks import LostRankError, told
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment

_FAILED = -1  # on all words of a rank that failed
_MESSAGE_BYTES = 1024
_SIGNAL_BYTES = native.shared("signal bytes", 64)  # one cache line a counter


class Signals:
    """Counters of all ranks of the node, at 0; all ranks make it together, of the same words."""

    def __init__(self, node: Node, words: Sequence[str]) -> None:
        self.node = node
        ops = native.ops()
        self._wait_signals = ops.wait_signals.default
        self._post_signal = ops.post_signal.default
        ranks = len(node.peers)
        counters_bytes = _SIGNAL_BYTES * len(words) * ranks
        size = counters_bytes + _MESSAGE_BYTES * ranks
        # Each rank brings a segment, and all use the first one's; untouched, the others are free.
        segments = node.share(Segment.create(size, size, "board"))
        self._segment = segments[node.peers[0]]
        lines = self._segment.tensor(0, [len(words), ranks, _SIGNAL_BYTES // 4], torch.int32)
        self._words = {word: lines[n] for n, word in enumerate(words)}
        self._messages = self._segment.tensor(counters_bytes, [ranks, _MESSAGE_BYTES], torch.uint8)
        self._mine = node.peers.index(node.rank)
        self._process = os.getpid()
        self._failed = False

    @property
    def deadline_seconds(self) -> float:
        """How long a wait may take: the node's deadline."""
        return self.node.deadline_seconds

    def post(self, word: str, value: int) -> None:
        """Set this rank's counter, after all that it wrote before, and wake those who wait."""
        if os.getpid() != self._process:
            self.node.check_process()
        if not self._failed:
            self._post_signal(self._words[word], self._mine, value)

    def wait(self, word: str, value: int, doing: str) -> None:
        """Until every rank of the node has posted `value` or more; what they wrote before is seen.

        `doing` completes "rank 0 waited for rank 2 to …". OperError names ranks that failed,
        died, or did not come within `deadline_seconds`.
        """
        if os.getpid() != self._process:
            self.node.check_process()
        if self._wait_signals(self._words[word], value, 0) >= 0:
            self._sleep(self._words[word], value, doing)

    def fail(self, error: BaseException) -> None:
        """Let all waits for this rank, now and later, raise for this error; and tell the ranks of
        other nodes."""
        if os.getpid() != self._process:
            return  # what fails in a forked child is not the rank
        text = told(self.node.rank, error).encode()[: _MESSAGE_BYTES - 1]
        box = self._messages[self._mine]
        box.zero_()
        box[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._failed = True
        for words in self._words.values():
            self._post_signal(words, self._mine, _FAILED)
        self.node.fail(error)

    def _sleep(self, words: torch.Tensor, value: int, doing: str) -> None:
        patience = Deadline(self.deadline_seconds)

        def missing() -> list[int]:
            counters = words[:, 0].tolist()
            if _FAILED in counters:
                n = counters.index(_FAILED)
                text = bytes(self._messages[n].tolist()).rstrip(b"\0").decode(errors="replace")
                raise LostRankError(text)
            return [p for p, c in zip(self.node.peers, counters, strict=True) if c < value]

        while self._wait_signals(words, value, int(1000 * SLICE_SECONDS)) >= 0:
            # It looks again after it found a rank dead: who failed is no longer alive either.
            self.node.check_alive(missing, doing, patience)
