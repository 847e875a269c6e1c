"""Nodes: which ranks share memory, how they hand it to each other, and who of them is alive.

Ranks of one host and network namespace form a node. Each binds one datagram socket to an abstract
name, which the kernel forgets with the process, and sends descriptors of its segments over it.
The first message is a descriptor of a small file that the sender holds a record lock on: the lock
is not inherited over a fork and ends with the process, however it ends, so to ask whether a rank
is alive is to ask whether its lock is still held.

Messages are exchanged in rounds, one from each peer to each, that all ranks go through in the same
order; they carry a secret that the ranks were told over the process group.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import secrets
import select
import socket
import struct
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from oper.base.errors import OperError
from oper.runtime.comm.deadline import Deadline
from oper.runtime.comm.group import SLICE_SECONDS, Group
from oper.runtime.comm.lost_ranks import LostRankError, did_not_come, died, rank_names, told
from oper.runtime.comm.shared_segment import Segment

_NAME_BYTES = _SECRET_BYTES = 16
_HEADER = struct.Struct(f"={_SECRET_BYTES}sii")  # receiver's secret, sender, round
_PROBLEM_BYTES = 1024
_MOST_BYTES = 1 << 16  # of a message
# struct flock: type, whence, start, length, process
_LOCK = struct.Struct("@hhqqi0q")


class Node:
    """The ranks that share memory with this one: `peers`, ascending, own rank included.

    `rank` of `ranks` are those of the process group; `group` is for what all of them do together,
    None where there is one. Not to be used in a forked child.
    """

    def __init__(self, group: "dist.ProcessGroup | None", deadline_seconds: float) -> None:
        """A node of its own; `join` makes those of several ranks."""
        self.deadline_seconds = deadline_seconds
        self.group: Group | None = None
        self.rank, self.ranks = 0, 1
        if group is not None and dist.get_world_size(group) > 1:
            self.group = Group(group, deadline_seconds)
            self.rank, self.ranks = self.group.rank, self.group.ranks
        self.peers: tuple[int, ...] = (self.rank,)
        self._process = os.getpid()
        self._round = 0
        self._addresses: dict[int, tuple[str, bytes]] = {}  # of the others: name, secret
        self._inbox: dict[tuple[int, int], tuple[bytes, list[int]]] = {}  # by round and rank
        self._locks: dict[int, int] = {}  # descriptors of the others' lock files
        self._resources = contextlib.ExitStack()
        self._resources.callback(_close_messages, self._inbox)
        self._closing = weakref.finalize(self, self._resources.close)

    @classmethod
    def join(
        cls,
        group: "dist.ProcessGroup | None",
        deadline_seconds: float = 60.0,
        nodes: Sequence[int] | None = None,
    ) -> "Node":
        """Meet all ranks of the group (None: there is one rank), and those of the same node.

        `nodes`, one number a rank, parts ranks that could share memory: those with different
        numbers then do not. OperError names ranks that died or did not come in time, here and in
        whatever the ranks do together later.
        """
        if group is None:
            return cls(None, deadline_seconds)
        if dist.get_rank(group) < 0:
            raise OperError("this process is no member of the process group that was given")
        if "cpu:" not in dist.get_backend_config(group):
            raise OperError(
                f"the process group's backend is {dist.get_backend(group)}, and one for the CPU "
                'was needed: init_process_group("gloo"), or "cpu:gloo,cuda:nccl"'
            )
        node = cls(group, deadline_seconds)
        try:
            node._meet(0 if nodes is None else nodes[node.rank])
        except BaseException as error:
            node.fail(error)
            node.close()
            raise
        return node

    def share(self, segment: Segment) -> dict[int, Segment]:
        """Exchange segments with all ranks of the node, which must call this together: each
        rank's segment, mapped here."""
        text = json.dumps({"reserve_bytes": segment.reserve_bytes}).encode()
        received = self._exchange(text, segment.descriptor, "share memory", self.deadline_seconds)
        segments = {self.rank: segment}
        for peer, (message, descriptors) in received.items():
            segments[peer] = Segment.attach(descriptors[0], json.loads(message)["reserve_bytes"])
        for given in segments.values():
            self._resources.callback(given.close)
        return {peer: segments[peer] for peer in self.peers}

    def gather(self, message: bytes, doing: str, extra_seconds: float = 0.0) -> dict[int, bytes]:
        """The message, of at most 64 KiB, of every rank of the node, which must call this together.

        `doing` says in errors what they were waited for, `extra_seconds` how much longer than the
        deadline they may take where work comes before.
        """
        received = self._exchange(message, None, doing, self.deadline_seconds + extra_seconds)
        return {r: message if r == self.rank else received[r][0] for r in self.peers}

    def agree(self, digest: bytes, what: str) -> None:
        """Check that all ranks of the whole group have the same digest, of `what`.

        OperError on every rank says which ranks differ.
        """
        digests = self._gather_in_group(hashlib.sha256(digest).digest(), f"compare {what}")
        ranks_with: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(digests):
            ranks_with.setdefault(digest, []).append(rank)
        if len(ranks_with) > 1:
            groups = "; ".join(
                f"{rank_names(ranks)}: {digest.hex()[:12]}" for digest, ranks in ranks_with.items()
            )
            raise OperError(
                f"{what} must be the same on all ranks, and their digests are {groups}: give all "
                "ranks the same plan, tables and settings, and the same collections in the same "
                "order"
            )

    def check_all(self, problem: str, doing: str) -> None:
        """OperError on every rank of the whole group where any has a problem ("": none)."""
        message = problem.encode()[:_PROBLEM_BYTES].ljust(_PROBLEM_BYTES, b"\0")
        for rank, given in enumerate(self._gather_in_group(message, doing)):
            text = given.rstrip(b"\0").decode(errors="replace")
            if text:
                raise OperError(problem) if problem else LostRankError(told(rank, OperError(text)))

    def alive(self, rank: int) -> bool:
        """Whether a rank of this node still runs, stopped or not, and has not closed it."""
        return rank == self.rank or self._holder(rank) is not None

    def check_process(self) -> None:
        """OperError in a forked child, where the memory is still its parent's."""
        if os.getpid() != self._process:
            raise OperError(
                f"rank {self.rank} is process {self._process}; this process was forked from it "
                "and has no part in its tables: use them in the parent, or start this process "
                "by spawn or before the model is sharded"
            )

    def check_alive(
        self, missing: Callable[[], Sequence[int]], doing: str, patience: Deadline
    ) -> None:
        """OperError if ranks that are waited for have died, or patience with them has ended.

        `missing` says which they are, now.
        """
        if not self._closing.alive:
            raise OperError(f"rank {self.rank} waits for others after it has left them by close()")
        dead = {peer for peer in missing() if not self.alive(peer)}
        late = missing()  # what a rank did before it died counts
        dead &= set(late)
        if dead and self.group is not None:
            self.group.check()  # who said why has not just died
        if dead:
            raise LostRankError(died(dead, self.rank, doing))
        if patience.ended() and late:
            processes = self.group.processes if self.group else {}
            raise LostRankError(did_not_come(late, patience.seconds, self.rank, doing, processes))
        if late and self.group is not None and len(self.peers) < self.ranks:
            self.group.look(doing)  # other nodes may wait for this rank

    def fail(self, error: BaseException) -> None:
        """Let all ranks of the group that wait, now or later, raise for an error of this one's."""
        if self.group is not None and os.getpid() == self._process:
            self.group.fail(error)

    def close(self) -> None:
        """Leave: to the others, this rank is no longer alive. Segments stay as they are."""
        self._closing()

    def _meet(self, number: int) -> None:
        lock = os.memfd_create("oper-alive", os.MFD_CLOEXEC)
        # Closing any descriptor of the file would end the lock: there is this one alone.
        self._resources.callback(os.close, lock)
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._resources.callback(self._socket.close)
        self._socket.setblocking(False)
        name, secret = secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(_SECRET_BYTES)
        self._socket.bind(_address(name))
        self._secret = secret
        cards = self._gather_in_group(_host_digest(number) + name + secret, "join")
        host = len(cards[0]) - _NAME_BYTES - _SECRET_BYTES
        mine = cards[self.rank]
        self.peers = tuple(r for r, card in enumerate(cards) if card[:host] == mine[:host])
        for peer in self.peers:
            card = cards[peer][host:]
            self._addresses[peer] = (_address(card[:_NAME_BYTES]), card[_NAME_BYTES:])
        received = self._exchange(b"", lock, "join", self.deadline_seconds)
        for peer, (_, descriptors) in received.items():
            self._locks[peer] = descriptors[0]
            self._resources.callback(os.close, descriptors[0])
        if self.group is not None:
            holders = {peer: self._holder(peer) for peer in self._locks}
            self.group.processes = {peer: process for peer, process in holders.items() if process}

    def _holder(self, rank: int) -> int | None:
        """The process that holds a rank's lock, 0 where that cannot be known; None: nobody does."""
        if rank not in self._locks:  # not joined yet: is its socket there?
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                try:
                    probe.connect(self._addresses[rank][0])
                except ConnectionRefusedError:
                    return None
            return 0
        question = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, *_, process = _LOCK.unpack(fcntl.fcntl(self._locks[rank], fcntl.F_GETLK, question))
        return None if kind == fcntl.F_UNLCK else max(process, 0)  # -1: of another namespace

    def _exchange(
        self, message: bytes, descriptor: int | None, doing: str, seconds: float
    ) -> dict[int, tuple[bytes, list[int]]]:
        """One round: this message to all other peers, and theirs, with descriptors."""
        self.check_process()
        others = [peer for peer in self.peers if peer != self.rank]
        to_send = set(others)

        def missing() -> list[int]:
            while others and self._receive():
                pass
            return [p for p in others if p in to_send or (self._round, p) not in self._inbox]

        patience = Deadline(seconds)
        while to_send or missing():
            to_send -= {peer for peer in to_send if self._send(peer, message, descriptor)}
            if missing():
                # The kernel does not tell when a queue that was full has room again.
                sleep_seconds = 0.001 if to_send else SLICE_SECONDS
                if not select.select([self._socket], [], [], sleep_seconds)[0]:
                    self.check_alive(missing, doing, patience)
        received = {peer: self._inbox.pop((self._round, peer)) for peer in others}
        self._round += 1
        return received

    def _send(self, peer: int, message: bytes, descriptor: int | None) -> bool:
        address, secret = self._addresses[peer]
        rights = []
        if descriptor is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        header = _HEADER.pack(secret, self.rank, self._round)
        try:
            self._socket.sendmsg([header, message], rights, 0, address)
        except OSError as error:
            # Its queue is full, or too many descriptors are on their way: it takes them soon. Or
            # nobody is there, which check_alive finds.
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ECONNREFUSED):
                return False
            raise
        return True

    def _receive(self) -> bool:
        """Take one message that has come, if any."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, _HEADER.size + _MOST_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        if len(data) >= _HEADER.size:
            secret, peer, number = _HEADER.unpack_from(data)
            if secrets.compare_digest(secret, self._secret):
                self._inbox[number, peer] = (data[_HEADER.size :], descriptors)
                if flags & socket.MSG_CTRUNC:
                    raise OperError(
                        f"rank {self.rank} cannot take over shared memory of rank {peer}: too many "
                        "files are open; see `ulimit -n`"
                    )
                return True
        for descriptor in descriptors:  # of a stranger
            os.close(descriptor)
        return True

    def _gather_in_group(self, message: bytes, doing: str) -> list[bytes]:
        """The message, of one length, of every rank of the whole group."""
        self.check_process()
        return [message] if self.group is None else self.group.gather(message, doing)


def _close_messages(inbox: dict[tuple[int, int], tuple[bytes, list[int]]]) -> None:
    for _, descriptors in inbox.values():
        for descriptor in descriptors:
            os.close(descriptor)


def _host_digest(number: int) -> bytes:
    """The same for ranks that can share memory: of one kernel and network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    network = os.stat("/proc/self/ns/net")
    return hashlib.sha256(
        boot + struct.pack("=qqq", network.st_dev, network.st_ino, number)
    ).digest()


def _address(name: bytes) -> str:
    return f"\0oper-{name.hex()}"
