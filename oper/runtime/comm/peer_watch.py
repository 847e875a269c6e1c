"""The watch over ranks whose memory kernels read by NVSHMEM: a kernel that asks a rank that is gone
waits for ever, and nothing but the end of its process ends it.

Two threads look twice a second for ranks that are gone. One checks the ranks of the node, by their
locks (liveness.py). The other gives signs of life in the process group's store, and looks there for
those of the next rank. A rank that finds another gone tells all others there. Later lookups raise
then; if a kernel does not end, the process ends with the message.
"""

import contextlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

from oper.runtime.comm.deadline import Deadline
from oper.runtime.comm.liveness import Liveness
from oper.runtime.comm.lost_ranks import LostRankError
from oper.runtime.comm.node import Node

_LOOK_SECONDS = 0.5
_KERNEL_SECONDS = 2.0  # that work started before may still take
_READS = "answer reads of its rows"
_watches: Counter[str] = Counter()  # made so far by each group's name


class PeerWatch:
    """The watch of one rank over the others of its group, made by all ranks together. `is_busy`
    says, in any thread, whether a kernel may be waiting for their rows."""

    def __init__(self, node: Node, is_busy: Callable[[], bool]) -> None:
        assert node.group is not None
        self._rank, self._ranks, self._peers = node.rank, node.ranks, node.peers
        self._liveness: Liveness = node.liveness
        self._seconds, self._is_busy = node.deadline_seconds, is_busy
        self._store, name = node.group.store(), node.group.name
        self._prefix = f"oper/peers/{_watches[name]}"
        _watches[name] += 1
        self._lost, self._ended = "", threading.Event()
        # Set to ask the store at once; and once the others have been told which rank is gone.
        self._hurry, self._told = threading.Event(), threading.Event()
        self._beats, self._last_beat = 0, b""
        self._beat_comes = Deadline(self._seconds)
        self._answers, self._lost_elsewhere = 0, ""  # found by the store's thread
        self._store.set(f"{self._prefix}/{self._rank}", "0")
        # Until then nobody looks for another's signs of life.
        node.check_all("", "begin to answer reads of their rows")
        # A store whose host is gone does not answer, and a call of it does not end: nothing waits
        # for the thread that asks it.
        for run in (self._watch, self._ask):
            threading.Thread(target=run, name="oper-peers", daemon=True).start()

    def check(self) -> None:
        """Raise LostRankError if a rank is gone, once the others have been told, if the store
        answers: this process may end by the error, and the others would take it for the rank that
        is gone."""
        if self._lost:
            self._told.wait(_LOOK_SECONDS)
            raise LostRankError(self._lost)

    def stop(self) -> None:
        """Watch no more."""
        self._ended.set()
        self._hurry.set()

    def _watch(self) -> None:
        seen, answer_comes = 0, Deadline(self._seconds)
        while not self._lost and not self._ended.wait(_LOOK_SECONDS):
            if seen != self._answers:
                seen, answer_comes = self._answers, Deadline(self._seconds)
            self._lost = self._gone_here() or self._lost_elsewhere
            if not self._lost and answer_comes.ended():
                self._lost = (
                    "the process group's store, which rank 0 serves where no launcher does, did "
                    f"not answer rank {self._rank} for {self._seconds:g} s"
                )
        self._hurry.set()
        while not self._ended.wait(_LOOK_SECONDS):
            if self._is_busy() and not self._ends_soon():
                self._end()

    def _ask(self) -> None:
        while not self._ended.is_set():
            if self._hurry.wait(_LOOK_SECONDS):
                self._hurry.clear()
            if self._ended.is_set():
                break
            with contextlib.suppress(RuntimeError):
                if self._lost:
                    self._store.set(f"{self._prefix}/lost", self._lost)
                    self._told.set()
                    break
                self._lost_elsewhere = self._gone_elsewhere()
                self._answers += 1

    def _gone_here(self) -> str:
        """Return why a rank of this node is gone; "" if none is."""
        with contextlib.suppress(OSError, KeyError):  # this rank is leaving
            gone = [peer for peer in self._peers if not self._liveness.alive(peer)]
            return self._liveness.lost(gone, _READS) if gone else ""
        return ""

    def _gone_elsewhere(self) -> str:
        """Return another rank's report of a rank that is gone, or that the next rank gives no signs
        of life; "" if all are there."""
        after = (self._rank + 1) % self._ranks
        self._beats += 1
        self._store.set(f"{self._prefix}/{self._rank}", str(self._beats))
        if self._store.check([f"{self._prefix}/lost"]):
            return str(self._store.get(f"{self._prefix}/lost").decode(errors="replace"))
        beat: bytes = self._store.get(f"{self._prefix}/{after}")
        if beat != self._last_beat:
            self._last_beat, self._beat_comes = beat, Deadline(self._seconds)
        elif self._beat_comes.ended():
            return (
                f"rank {after} gave no sign of life for {self._seconds:g} s, and others read its "
                "rows: see its last output, and whether its host is up"
            )
        return ""

    def _ends_soon(self) -> bool:
        until = time.monotonic() + _KERNEL_SECONDS
        while time.monotonic() < until:
            if not self._is_busy():
                return True
            time.sleep(0.05)
        return False

    def _end(self) -> None:
        """End the process, and leave the text that the other ranks raise with too."""
        self._liveness.leave_words(self._lost)
        sys.stderr.write(
            f"oper: rank {self._rank}: {self._lost}. A kernel here waits for rows or gradients "
            "that do not come any more, and only the end of its process ends it.\n"
        )
        sys.stderr.flush()
        os._exit(1)
