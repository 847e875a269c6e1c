"""Liveness: which ranks of a node still run, and the errors that name those that do not.

Each rank holds a record lock on a small file of its own and hands the others a descriptor of it.
Such a lock is not inherited over a fork and ends with the process, however it ends: a rank is alive
as long as its lock is held.
"""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable, Sequence

from oper.base.errors import OperError
from oper.runtime.comm.deadline import Deadline
from oper.runtime.comm.group import Group
from oper.runtime.comm.lost_rank_errors import LostRankError, did_not_come, died

# struct flock: type, whence, start, length, process
_LOCK = struct.Struct("@hhqqi0q")


class Liveness:
    """The other ranks of this rank's node; `group` is that of all ranks, None where there is one
    rank."""

    def __init__(self, rank: int, group: Group | None) -> None:
        self._rank, self._group = rank, group
        self._sockets: dict[int, str] = {}  # addresses, of all other ranks of the node
        self._locks: dict[int, int] = {}  # descriptors of their lock files
        self.closed = False  # whether this rank has left the node

    def take_lock(self, resources: contextlib.ExitStack) -> int:
        """Take this rank's lock, which ends with `resources` or with the process. Returns the
        descriptor that the others are to have."""
        lock = os.memfd_create("oper-alive", os.MFD_CLOEXEC)
        # Closing any descriptor of the file would end the lock: there is this one alone.
        resources.callback(os.close, lock)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock

    def watch_socket(self, rank: int, address: str) -> None:
        """Take a rank for alive while its socket is bound, until its lock is known."""
        self._sockets[rank] = address

    def watch_lock(self, rank: int, descriptor: int) -> None:
        """Take a rank for alive while its lock is held."""
        self._locks[rank] = descriptor

    def alive(self, rank: int) -> bool:
        """Whether a rank of this node still runs, stopped or not, and has not closed it."""
        return rank == self._rank or self._process_of(rank) is not None

    def processes(self) -> dict[int, int]:
        """The process ids of the other ranks, as far as they can be seen from here."""
        found = {rank: self._process_of(rank) for rank in self._locks}
        return {rank: process for rank, process in found.items() if process}

    def check(self, missing: Callable[[], Sequence[int]], action: str, deadline: Deadline) -> None:
        """Raise if ranks that are waited for have died, or have not come by the deadline.

        `missing` says which they are, now; `action` completes "rank 0 waited for rank 2 to …".
        LostRankError names them; OperError if this rank itself has left.
        """
        if self.closed:
            raise OperError(f"rank {self._rank} waits for others after it has left them by close()")
        dead = {peer for peer in missing() if not self.alive(peer)}
        late = missing()  # what a rank did before it died counts
        dead &= set(late)
        if dead and self._group is not None:
            self._group.check()  # a rank that said why it failed, before it ended
        if dead:
            raise LostRankError(died(dead, self._rank, action))
        if deadline.ended() and late:
            processes = self._group.processes if self._group else {}
            raise LostRankError(did_not_come(late, deadline.seconds, self._rank, action, processes))
        if late and self._group is not None and 1 + len(self._sockets) < self._group.ranks:
            self._group.heartbeat(action)  # other nodes may wait for this rank

    def _process_of(self, rank: int) -> int | None:
        """The process that holds a rank's lock, 0 where it cannot be known; None: the rank is not
        alive."""
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
