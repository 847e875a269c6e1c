"""Liveness: the ranks of a node that still run, and the errors that name those that do not.

Each rank holds a record lock on a small file of its own and hands the others a descriptor of it.
Such a lock is not inherited over a fork and ends with the process, however it ends: a rank is alive
as long as its lock is held. The file holds the rank's last words: why it failed, or that it left by
itself. A rank that died has written none.

A rank may wait in code that is not OPER's and knows of no deaths (DistributedDataParallel,
checkpoints). So a thread looks at all locks twice a second, and the process once more as it ends:
they log an error that names the rank. If SIGTERM ends the process, csrc/cpu/comm/last_words.cpp
logs it.
"""

import _thread
import atexit
import contextlib
import fcntl
import logging
import multiprocessing.util
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.comm.deadline import COMPARE_SECONDS, HEARTBEAT_SECONDS, SLICE_SECONDS, Deadline
from oper.runtime.comm.group import Group
from oper.runtime.comm.lost_ranks import (
    LostRankError,
    all_wait,
    did_not_come,
    died,
    left,
    of_collection,
    rank_names,
    told,
)
from oper.runtime.comm.wait_marks import WaitMarks, mark_wait

_log = logging.getLogger(__name__)

# struct flock: type, whence, start, length, process
_LOCK = struct.Struct("@hhqqi0q")
# The first byte of last words; the text of a failure, or that of SIGTERM, follows.
_FAILED, _LEFT, _TERMINATED = b"F", b"L", b"T"
_WORDS_BYTES = 1024
_WATCH_SECONDS = 0.5  # between two looks at all locks


class Liveness:
    """The other ranks of this rank's node; `group` is the group of all ranks, None if there is one
    rank. `table` is the first table of the collection that waits here."""

    def __init__(self, rank: int, group: Group | None, table: str = "") -> None:
        self._rank, self._group, self._table = rank, group, table
        self._sockets: dict[int, str] = {}  # addresses, of all other ranks of the node
        self._locks: dict[int, int] = {}  # descriptors of their lock files
        self._lock: int | None = None  # our own
        self._processes: dict[int, int] = {}  # of the other ranks, while they lived
        self._locks_guard = threading.RLock()  # a collection of garbage may close the node inside
        self._process = os.getpid()
        self.wait_marks: WaitMarks | None = None  # None until the ranks share memory
        self.closed = False  # true if this rank has left the node
        self._failed = False  # true if this rank has given up, such as after losing another

    def take_lock(self, resources: contextlib.ExitStack) -> int:
        """Take this rank's lock, which ends with `resources` or with the process. Return the
        descriptor for the other ranks."""
        lock = os.memfd_create("oper-alive", os.MFD_CLOEXEC)
        # Closing any descriptor of the file would end the lock: there is this one alone.
        resources.callback(os.close, lock)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock = lock
        resources.callback(self.leave)
        _leave_at_exit(self)
        return lock

    def leave_words(self, failure: str) -> None:
        """Let the other ranks know, even once this rank has ended, why it failed."""
        self._failed = True
        self._say(_FAILED, failure)

    def leave(self) -> None:
        """Let the other ranks know that this rank releases its tables by itself and in order."""
        self._say(_LEFT, "")
        if self._lock is not None and os.getpid() == self._process:
            native.ops().forget_lock(self._lock)
        self._lock = None

    def _say(self, kind: bytes, text: str) -> None:
        """Write last words, unless there are some. A forked child shares the file and may not write
        to it."""
        lock = self._lock
        if lock is None or os.getpid() != self._process or os.pread(lock, 1, 0):
            return
        with contextlib.suppress(OSError):  # no memory is left: others name the rank alone
            os.pwrite(lock, _cut(text, _WORDS_BYTES), 1)
            os.pwrite(lock, kind, 0)

    def failure(self, rank: int) -> str:
        """Return why another rank of this node has failed, alive or not; "" if it did not say
        so."""
        said = os.pread(self._locks[rank], 1 + _WORDS_BYTES, 0)
        return said[1:].decode(errors="replace") if said[:1] == _FAILED else ""

    def words(self) -> str:
        """Return why a rank of this node has failed, the first that said so; "" if none did."""
        return next(filter(None, map(self.failure, self._locks)), "")

    def lost(self, ranks: Collection[int], action: str) -> str:
        """Return why ranks of this node that are waited for to do `action` are gone, in words that
        are true on every rank; "" if they are not gone."""
        gone = [rank for rank in ranks if rank in self._locks and not self.alive(rank)]
        for rank in gone:
            if failure := self.failure(rank):
                return failure
        words = {rank: os.pread(self._locks[rank], 1 + _WORDS_BYTES, 0) for rank in gone}
        dead = [rank for rank, said in words.items() if not said]
        if dead:
            return died(dead, self._rank, action)
        for said in words.values():  # after ranks that died: then a launcher ends the others
            if said[:1] == _TERMINATED:
                return said[1:].decode(errors="replace")
        return left(gone, self._rank, action) if gone else ""

    def prepare_last_words(self) -> None:
        """Prepare the texts for the case that SIGTERM ends this process: the ranks that died until
        then, and to the others that SIGTERM ended this rank."""
        assert self._lock is not None
        self._processes = self.processes()
        words = _TERMINATED.decode() + f"rank {self._rank} was ended by SIGTERM"
        native.ops().leave_lock(self._lock, words)
        for rank, lock in self._locks.items():
            native.ops().watch_lock(lock, self._death(rank) + "\n")

    def deaths(self) -> dict[str, int]:
        """Return the text on each rank of this node that was ended, with its lock: that it died, or
        why it failed; first the ranks that died. For any thread."""
        dead: dict[str, int] = {}
        failed: dict[str, int] = {}
        if os.getpid() != self._process:
            return {}  # a forked child is no rank
        with self._locks_guard, contextlib.suppress(OSError):
            for rank, lock in list(self._locks.items()):
                if self._process_of(rank) is not None:
                    continue
                said = os.pread(lock, 1 + _WORDS_BYTES, 0)
                if not said:
                    dead[self._death(rank)] = lock
                elif said[:1] != _LEFT:
                    failed[said[1:].decode(errors="replace")] = lock
        return dead | failed

    def _death(self, rank: int) -> str:
        return f"rank {rank} (process {self._processes.get(rank, 0)}) died: see its last output"

    def fail(self, error: BaseException) -> None:
        """Let the other ranks, also those of other nodes, know why this rank ends."""
        if os.getpid() != self._process:
            return  # a forked child's error is its own
        self.leave_words(told(self._rank, error))
        if self._group is not None and 1 + len(self._locks) < self._group.ranks:
            self._group.fail(error)

    def forget(self) -> None:
        """Drop the locks' descriptors, which are about to be closed and whose numbers other files
        will get."""
        if os.getpid() == self._process:  # a fork may have copied the guard while it was held
            with self._locks_guard:
                for lock in filter(None, [self._lock, *self._locks.values()]):
                    native.ops().forget_lock(lock)
                # A script may catch the error, drop its model and end: ranks that die until then
                # are named too. Closing these descriptors ends no lock: others hold the locks.
                kept = self._locks if self._failed else {}
                self.closed, self._group, self.wait_marks = True, None, None
                self._locks = {rank: os.dup(lock) for rank, lock in kept.items()}
                if self._locks:
                    _kept.add(self)

    def watch_socket(self, rank: int, address: str) -> None:
        """Take a rank for alive while its socket is bound, until its lock is known."""
        self._sockets[rank] = address

    def watch_lock(self, rank: int, descriptor: int) -> None:
        """Take a rank for alive while its lock is held."""
        self._locks[rank] = descriptor

    def alive(self, rank: int) -> bool:
        """Say whether a rank of this node still runs, stopped or not, and has not closed the
        node."""
        return rank == self._rank or self._process_of(rank) is not None

    def processes(self) -> dict[int, int]:
        """Return the process ids of the other ranks, as far as they can be seen from here."""
        process_of = {rank: self._process_of(rank) for rank in self._locks}
        return {rank: process for rank, process in process_of.items() if process}

    def check(self, missing: Callable[[], Sequence[int]], action: str, deadline: Deadline) -> None:
        """Raise if ranks that are waited for have died, or have not come by the deadline.

        `missing` returns the ranks that are waited for now; `action` completes "rank 0 waited for
        rank 2 to …". LostRankError names them; OperError if this rank itself has left.
        """
        if self.closed:
            raise OperError(f"rank {self._rank} waits for others after it has left them by close()")
        dead = {peer for peer in missing() if not self.alive(peer)}
        late = missing()  # work that a rank did before it died counts
        dead &= set(late)
        if text := self.lost(dead, action):
            raise LostRankError(text)
        if dead and self._group is not None:
            self._group.check()  # a rank that said why it failed, before it ended
        if dead:
            raise LostRankError(died(dead, self._rank, action))
        waiting = of_collection(action, self._table)
        mark_wait(waiting)
        left = deadline.left()
        if deadline.seen is None and left <= COMPARE_SECONDS:
            deadline.seen = self.waits()
        if left <= -HEARTBEAT_SECONDS and late:  # ranks that came in time have marks by then
            raise LostRankError(self._late(late, deadline, action))
        if late and self._group is not None and 1 + len(self._sockets) < self._group.ranks:
            self._group.heartbeat(waiting, left)  # other nodes may wait for this rank

    def waits(self) -> dict[int, str]:
        """Return the last wait mark of each rank of this node; none before the ranks share
        memory."""
        return self.wait_marks.read() if self.wait_marks is not None else {}

    def _late(self, late: Sequence[int], deadline: Deadline, action: str) -> str:
        """Return the text that ranks are late; ranks that wait themselves are named apart."""
        before, now = deadline.seen or {}, self.waits()
        waits = {r: text.partition(" ")[2] for r, text in now.items() if before.get(r) != text}
        absent = [rank for rank in late if rank not in waits]
        others = [rank for rank in self._locks if rank not in waits]
        alone = self._group is None or 1 + len(self._locks) == self._group.ranks
        if not absent and not others and alone:
            return all_wait(waits)
        processes = self._group.processes if self._group else {}
        named = absent or late
        text = did_not_come(named, deadline.seconds, self._rank, action, processes)
        if absent:
            return text
        doing = "; ".join(f"rank {rank} waits for others to {waits[rank]}" for rank in named)
        idle = f", and {rank_names(others)} of this node for no rank" if others else ""
        return f"{text}; {doing}{idle}"

    def _process_of(self, rank: int) -> int | None:
        """Return the process that holds a rank's lock, 0 if it cannot be known; None if the rank is
        not alive."""
        if rank not in self._locks:  # not joined yet: is its socket bound?
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(self._sockets[rank])
                except ConnectionRefusedError:
                    return None
            return 0
        question = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, process = _LOCK.unpack(fcntl.fcntl(self._locks[rank], fcntl.F_GETLK, question))
        return None if kind == fcntl.F_UNLCK else max(process, 0)  # -1: of another namespace


def _cut(text: str, most: int) -> bytes:
    """Return a text of at most `most` bytes, which ends with a mark if it was longer."""
    encoded, mark = text.encode(errors="replace"), "…".encode()
    if len(encoded) <= most:
        return encoded
    return encoded[: most - len(mark)].decode(errors="ignore").encode() + mark


# The process's work for all of its nodes: at its end, and while it runs.

_nodes: "weakref.WeakSet[Liveness]" = weakref.WeakSet()
_ends_in: set[int] = set()  # this process, once its end is heard of; a forked child is another
_watched: "weakref.WeakSet[Liveness]" = weakref.WeakSet()
_kept: set[Liveness] = set()  # of models that are gone and whose rank gave up
_watches_in: set[int] = set()
_logged: set[str] = set()  # deaths


def _leave_at_exit(liveness: Liveness) -> None:
    """Leave last words when this process ends by itself: why it failed, if it did."""
    _nodes.add(liveness)
    if os.getpid() not in _ends_in:
        _ends_in.add(os.getpid())
        atexit.register(_end)  # after the node's own finalizer was, and so called before it
        multiprocessing.util.Finalize(None, _end, exitpriority=0)  # its processes skip atexit


def _end() -> None:
    error = sys.exc_info()[1]
    if error is None and not hasattr(sys, "ps1"):  # there it may be of any earlier line
        error = getattr(sys, "last_value", None)
    failed = error is not None and not (isinstance(error, SystemExit) and not error.code)
    lost = isinstance(error, LostRankError)  # its text names the death
    if not lost:
        _log_deaths()
        if failed and _watched:
            # A process that ends closes its connections before its lock, and others end with it.
            time.sleep(SLICE_SECONDS)
            _log_deaths()
    for liveness in list(_nodes):
        if error is None or not failed:
            liveness.leave()
        else:  # because of a rank that died, if one has
            deaths = [] if lost else list(liveness.deaths())
            liveness.fail(LostRankError(deaths[0]) if deaths else error)


def watch_for_deaths(liveness: Liveness) -> None:
    """Log an error on this rank when a rank of the node has died, whatever this rank does then."""
    liveness.prepare_last_words()
    _watched.add(liveness)
    if os.getpid() not in _watches_in:
        # Not a threading.Thread, whose `start` may wait without end if memory is short.
        with contextlib.suppress(RuntimeError, MemoryError):
            _thread.start_new_thread(_watch, ())
            _watches_in.add(os.getpid())


def _watch() -> None:
    while True:
        time.sleep(_WATCH_SECONDS)
        _log_deaths(
            "; what is not OPER's and waits for it here, as DistributedDataParallel or a "
            "checkpoint, may do so until its own timeout"
        )


def _log_deaths(advice: str = "") -> bool:
    """Log each death, once; return whether there is any."""
    deaths = [death for liveness in list(_watched) for death in liveness.deaths().items()]
    for text, lock in deaths:
        if text not in _logged:
            _log.error("%s%s", text, advice)
            _logged.add(text)  # afterwards, because the end of the process may halt this thread
        native.ops().forget_lock(lock)
    return bool(deaths)
