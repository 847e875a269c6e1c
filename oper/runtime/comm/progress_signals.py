"""Signals: counters in shared memory that tell the ranks of a node each other's progress.

Each rank has one counter of each name. `wait` sleeps until all ranks' counters have reached a
value; the sleep is on a futex, taken in slices between which liveness is checked. A rank that fails
sets its counters to _FAILED, which wakes the others; its last words say why (liveness.py).
"""

import os
from collections.abc import Callable, Sequence

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.comm.deadline import SLICE_SECONDS, Deadline
from oper.runtime.comm.lost_ranks import LostRankError, told
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment

_FAILED = -1  # all counters of a rank that failed
_BARRIER = "barrier"
_SIGNAL_BYTES = native.shared("signal bytes", 64)  # one cache line a counter


class Signals:
    """Counters of all ranks of the node, from 0; all ranks make them together, with equal names.

    `done` waits at most so many seconds for the work that this rank started, and says whether it is
    done. On a device work ends later than it is started, and its results must be there before
    others are told of them.
    """

    def __init__(
        self, node: Node, counters: Sequence[str], done: Callable[[float], bool] | None = None
    ) -> None:
        self.node = node
        self._done = done if len(node.peers) > 1 else None
        counters = [*counters, _BARRIER]
        ops = native.ops()
        self._wait_signals = ops.wait_signals.default
        self._post_signal = ops.post_signal.default
        ranks = len(node.peers)
        size = _SIGNAL_BYTES * len(counters) * ranks
        self._segment = node.share_first(Segment.create(size, size, "signals"))
        lines = self._segment.tensor(0, [len(counters), ranks, _SIGNAL_BYTES // 4], torch.int32)
        self._counters = {name: lines[n] for n, name in enumerate(counters)}
        self._mine = node.peers.index(node.rank)
        self._process = os.getpid()
        self._failure = ""  # of this rank
        self._barriers = 0

    @property
    def deadline_seconds(self) -> float:
        """The most seconds that a wait may take: the node's deadline."""
        return self.node.deadline_seconds

    def post(self, counter: str, value: int) -> None:
        """Set this rank's counter, after all its earlier writes, and wake the ranks that wait.

        LostRankError names ranks of the node that died while this rank's work was running: a
        collective on its device may wait for them. Raise OperError if the work takes longer than
        `deadline_seconds`.
        """
        if os.getpid() != self._process:
            self.node.check_process()
        if not self._failure:
            if self._done is not None and not self._done(SLICE_SECONDS):
                self._outlast(self._done)
            self._post_signal(self._counters[counter], self._mine, value)

    def wait(self, counter: str, value: int, action: str) -> None:
        """Wait until every rank of the node has posted `value` or more; their earlier writes are
        visible then.

        `action` completes "rank 0 waited for rank 2 to …". OperError names ranks that failed,
        died, or did not come within `deadline_seconds`.
        """
        if os.getpid() != self._process:
            self.node.check_process()
        if self._wait_signals(self._counters[counter], value, 0) >= 0:
            self._sleep(self._counters[counter], value, action)

    def barrier(self, action: str) -> None:
        """Wait for all ranks of the whole group, which must all call this. Raises as `wait`
        does."""
        self._barriers += 1
        self.post(_BARRIER, self._barriers)
        self.wait(_BARRIER, self._barriers, action)
        if self.node.group is not None and len(self.node.peers) < self.node.ranks:
            self.node.group.gather(b"0", action)

    def fail(self, error: BaseException) -> None:
        """Let all waits for this rank, now and later, raise for this error; and tell the ranks of
        other nodes."""
        if os.getpid() != self._process:
            return  # a forked child's failure is not the rank's
        self._failure = told(self.node.rank, error)
        self.node.liveness.leave_words(self._failure)  # before others look for them
        for of_ranks in self._counters.values():
            self._post_signal(of_ranks, self._mine, _FAILED)
        self.node.fail(error)

    def _outlast(self, done: Callable[[float], bool]) -> None:
        deadline = Deadline(self.deadline_seconds)
        while not done(SLICE_SECONDS):
            self.node.take_in()
            if deaths := self.node.liveness.deaths():
                raise LostRankError("; ".join(deaths))
            if deadline.ended():
                raise OperError(
                    f"rank {self.node.rank} waited {deadline.seconds:g} s for its own device, "
                    "which is still at work: does a collective there wait for another rank, or a "
                    "kernel not end? Give more time by deadline_seconds"
                )

    def _sleep(self, of_ranks: torch.Tensor, value: int, action: str) -> None:
        deadline = Deadline(self.deadline_seconds)

        def missing() -> list[int]:
            counters = of_ranks[:, 0].tolist()
            if _FAILED in counters:
                raise LostRankError(self._why(self.node.peers[counters.index(_FAILED)], action))
            return [p for p, c in zip(self.node.peers, counters, strict=True) if c < value]

        while self._wait_signals(of_ranks, value, int(1000 * SLICE_SECONDS)) >= 0:
            self.node.take_in()
            # `check` calls `missing` again if it finds a rank dead, which may have failed first.
            self.node.liveness.check(missing, action, deadline)

    def _why(self, rank: int, action: str) -> str:
        """Return why a rank has failed, or that it left before it did."""
        if rank == self.node.rank:
            return self._failure
        liveness = self.node.liveness
        reason = liveness.failure(rank) or liveness.lost([rank], action)
        return reason or f"rank {rank} failed: see its last output"
