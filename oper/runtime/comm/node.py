"""Nodes: the ranks that share memory, their exchange of segments, and the agreement of all ranks.

Ranks of one host and network namespace form a node (membership). They share segments of memory by
messages (messages.py) that carry descriptors, and learn from locks whether the others run
(liveness.py). Comparisons between all ranks of the process group go over the group (group.py).
"""

import contextlib
import hashlib
import json
import operator
import os
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from oper.base.errors import OperError
from oper.base.units import positive_seconds
from oper.runtime.comm.group import Group
from oper.runtime.comm.liveness import Liveness, watch_for_deaths
from oper.runtime.comm.lost_ranks import LostRankError, rank_names, told
from oper.runtime.comm.messages import CARD_BYTES, Message, Messages
from oper.runtime.comm.shared_segment import DeviceSegment, Segment
from oper.runtime.comm.wait_marks import WaitMarks

_PROBLEM_BYTES = 1024
Shared = TypeVar("Shared", bound=Segment | DeviceSegment)


class Node:
    """The ranks that share memory with this one: `peers`, ascending, own rank included.

    `rank` of `ranks` are those of the process group; `group` is for calls that all of them make
    together, None if there is one rank. Not to be used in a forked child.
    """

    def __init__(
        self, group: "dist.ProcessGroup | None", deadline_seconds: float, table: str = ""
    ) -> None:
        """Make a node of one rank; `join` makes nodes of several ranks."""
        self.deadline_seconds = positive_seconds(deadline_seconds, "deadline_seconds")
        self.group: Group | None = None
        self.rank, self.ranks = 0, 1
        if group is not None and dist.get_world_size(group) > 1:
            self.group = Group(group, deadline_seconds, table)
            self.rank, self.ranks = self.group.rank, self.group.ranks
        self.peers: tuple[int, ...] = (self.rank,)
        self.liveness = Liveness(self.rank, self.group, table)
        self._process = os.getpid()
        self._resources = contextlib.ExitStack()
        self._messages = Messages(self.rank, self.liveness, self._resources)
        self._release = weakref.finalize(self, self._resources.close)

    @classmethod
    def join(
        cls,
        group: "dist.ProcessGroup | None",
        deadline_seconds: float = 60.0,
        nodes: Sequence[int] | None = None,
        table: str = "",
    ) -> "Node":
        """Find the ranks of this rank's node. To be called by all ranks of the group (None: there
        is one rank) together.

        `nodes`, one number per rank, separates ranks that could share memory: ranks with different
        numbers then do not. `table` is the first table of the collection that the ranks make, by
        which errors tell collections apart. OperError names ranks that died or did not come in
        time, here and in all later calls of the ranks together.
        """
        if group is None:
            return cls(None, deadline_seconds, table)
        if dist.get_rank(group) < 0:
            raise OperError("this process is no member of the process group that was given")
        check_backend(group)
        node = cls(group, deadline_seconds, table)
        try:
            node._find_peers(_node_number(nodes, node.rank, node.ranks))
        except BaseException as error:
            node.fail(error)
            node.close()
            raise
        return node

    def share(self, segment: Shared) -> dict[int, Shared]:
        """Exchange segments with all ranks of the node, which must call this together. Return each
        rank's segment, mapped here."""
        self.check_process()
        received = self._messages.exchange(
            _described(segment), segment.descriptor, "share memory", self.deadline_seconds
        )
        segments = {self.rank: segment}
        for peer, message in received.items():
            segments[peer] = _attached(segment, message)
        for shared in segments.values():
            self._resources.callback(shared.close)
        return {peer: segments[peer] for peer in self.peers}

    def share_first(self, segment: Shared) -> Shared:
        """Return the segment of the node's first rank, mapped here, for all ranks to use. All must
        call this together, each with a segment of one size; the segments of the other ranks are
        released."""
        segments = self.share(segment)
        for peer in self.peers[1:]:
            segments[peer].close()
        return segments[self.peers[0]]

    def new_channel(self) -> int:
        """Return a new channel by which ranks send each other segments. All ranks of the node must
        make theirs in the same order."""
        return self._messages.new_channel()

    def send(self, segment: Segment | DeviceSegment, channel: int, number: int) -> None:
        """Send a segment, as this rank's `number` in a channel, to all other ranks of the node,
        which need not wait for it. Its descriptor may be closed afterwards."""
        self.check_process()
        self._messages.send(
            channel,
            number,
            _described(segment),
            segment.descriptor,
            "take memory that is handed to it",
            self.deadline_seconds,
        )

    def receive(self, like: Shared, channel: int, number: int, sender: int) -> Shared:
        """Return segment `number` of a rank in a channel, mapped here as `like` is. Wait for it if
        it was not sent yet."""
        self.check_process()
        message = self._messages.receive(
            channel, number, sender, "hand memory over", self.deadline_seconds
        )
        return _attached(like, message)

    def take_in(self) -> None:
        """Take the messages that other ranks have sent for later, so that they do not wait for
        room. To be called in all waits for them."""
        self._messages.take_in()

    def gather(self, message: bytes, action: str, extra_seconds: float = 0.0) -> dict[int, bytes]:
        """Return the message, of at most 64 KiB, of every rank of the node; all ranks must call
        this together.

        `action` completes "rank 0 waited for rank 2 to …" in errors; `extra_seconds` extends the
        deadline if work precedes the call.
        """
        self.check_process()
        seconds = self.deadline_seconds + extra_seconds
        received = self._messages.exchange(message, None, action, seconds)
        return {r: message if r == self.rank else received[r].content for r in self.peers}

    def agree(self, content: bytes, what: str) -> None:
        """Check that all ranks of the whole group have the same content, which errors call `what`.

        OperError on every rank says which ranks differ.
        """
        digests = self._gather_in_group(hashlib.sha256(content).digest(), f"compare {what}")
        ranks_with: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(digests):
            ranks_with.setdefault(digest, []).append(rank)
        if len(ranks_with) > 1:
            groups = "; ".join(
                f"{rank_names(ranks)}: {digest.hex()[:12]}" for digest, ranks in ranks_with.items()
            )
            raise OperError(
                f"{what}: expected the same on all ranks, got the digests {groups}: give all ranks "
                "the same plan, tables and settings, and the same collections in the same order"
            )

    def agree_on(self, settings: Mapping[str, str], what: str) -> None:
        """Check that all ranks of the whole group have equal settings, by their names.

        OperError on every rank names the first setting that differs, with the ranks' values.
        """
        digest = hashlib.sha256(_packed(settings)).digest()
        if len(set(self._gather_in_group(digest, f"compare {what}"))) > 1:
            raise self.unequal(settings, what)

    def unequal(self, settings: Mapping[str, str], what: str) -> OperError:
        """Return the error that names the first of some settings that differs between ranks, with
        their values. To be called on all ranks of the whole group, whose settings differ."""
        packed, action = _packed(settings), f"compare {what}"
        sizes = self._gather_in_group(len(packed).to_bytes(8, "little"), action)
        most = max(int.from_bytes(size, "little") for size in sizes)
        gathered = [json.loads(text) for text in self._gather_in_group(packed.ljust(most), action)]
        differences = []
        for name in sorted({name for of_rank in gathered for name in of_rank}):
            ranks_with: dict[str, list[int]] = {}
            for rank, of_rank in enumerate(gathered):
                ranks_with.setdefault(of_rank.get(name, "missing"), []).append(rank)
            if len(ranks_with) > 1:
                values = " and ".join(f"{v} on {rank_names(r)}" for v, r in ranks_with.items())
                differences.append(f"{name} is {values}")
        more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
        return OperError(
            f"{what}: expected the same on all ranks, but {differences[0]}{more}: give all ranks "
            "the same"
        )

    def check_all(self, problem: str, action: str) -> None:
        """Raise OperError on every rank of the whole group if any has a problem ("": none)."""
        message = problem.encode()[:_PROBLEM_BYTES].ljust(_PROBLEM_BYTES, b"\0")
        for rank, answer in enumerate(self._gather_in_group(message, action)):
            text = answer.rstrip(b"\0").decode(errors="replace")
            if text:
                raise OperError(problem) if problem else LostRankError(told(rank, OperError(text)))

    def check_process(self) -> None:
        """Raise OperError in a forked child, whose memory is still its parent's."""
        if os.getpid() != self._process:
            raise OperError(
                f"rank {self.rank} is process {self._process}; this process was forked from it "
                "and has no part in its tables: use them in the parent, or start this process "
                "by spawn or before the model is sharded"
            )

    def fail(self, error: BaseException) -> None:
        """Let all ranks of the group that wait, now or later, raise for an error of this rank."""
        if self.group is not None and os.getpid() == self._process:
            self.group.fail(error)

    def at_close(self, call: Callable[[], object]) -> None:
        """Call `call` once the node is left, or gone. It may not hold the node."""
        self._resources.callback(call)

    def close(self) -> None:
        """Leave the node: to the others, this rank is no longer alive. Segments stay as they
        are."""
        self.liveness.closed = True
        self._release()

    def _find_peers(self, number: int) -> None:
        """Exchange cards with all ranks over the group, and locks with the ranks of this host."""
        lock = self.liveness.take_lock(self._resources)
        cards = self._gather_in_group(_host_digest(number) + self._messages.open(), "join")
        hosts = [card[:-CARD_BYTES] for card in cards]
        self.peers = tuple(r for r, host in enumerate(hosts) if host == hosts[self.rank])
        others = [peer for peer in self.peers if peer != self.rank]
        self._messages.connect({peer: cards[peer][-CARD_BYTES:] for peer in others})
        received = self._messages.exchange(b"", lock, "join", self.deadline_seconds)
        for peer, (_, descriptors) in received.items():
            self.liveness.watch_lock(peer, descriptors[0])
            self._resources.callback(os.close, descriptors[0])
        if self.group is not None:
            self.group.processes = self.liveness.processes()
            self.group.see(self.liveness)
            # Not this object's method, which the group would keep.
            self.group.take_in = self._messages.take_in
        if others:
            waits = self.share_first(WaitMarks.segment(len(self.peers)))
            self.liveness.wait_marks = WaitMarks(waits, self.peers, self.rank)
        self._resources.callback(self.liveness.forget)  # before the descriptors are closed
        watch_for_deaths(self.liveness)

    def _gather_in_group(self, message: bytes, action: str) -> list[bytes]:
        """Return the message of every rank of the whole group; all messages have one length."""
        self.check_process()
        return [message] if self.group is None else self.group.gather(message, action)


def _packed(settings: Mapping[str, str]) -> bytes:
    return json.dumps(settings, sort_keys=True).encode()


def _described(segment: Segment | DeviceSegment) -> bytes:
    """Return the message that goes with the descriptor of a segment."""
    return json.dumps({"reserve_bytes": segment.reserve_bytes}).encode()


def _attached(like: Shared, message: Message) -> Shared:
    """Return the segment that a message brought, mapped as `like` is."""
    bytes = json.loads(message.content)["reserve_bytes"]
    return cast(Shared, like.attach(message.descriptors[0], bytes))


def check_backend(group: dist.ProcessGroup) -> None:
    """Raise OperError if a process group has no backend for the CPU, by which ranks find each other
    wherever their tables are."""
    if "cpu:" not in dist.get_backend_config(group):
        raise OperError(
            "the process group: expected a backend for the CPU, got "
            f'{dist.get_backend(group)}: call init_process_group("gloo"), or with '
            '"cpu:gloo,cuda:nccl" for ranks on devices'
        )


def _host_digest(number: int) -> bytes:
    """Return a digest that is equal on ranks that can share memory: ranks of one kernel and network
    namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    network = os.stat("/proc/self/ns/net")
    return hashlib.sha256(
        boot + struct.pack("=qqq", network.st_dev, network.st_ino, number)
    ).digest()


def _node_number(nodes: Sequence[int] | None, rank: int, ranks: int) -> int:
    if nodes is None:
        return 0
    try:
        numbers = [operator.index(number) for number in nodes]
    except TypeError:
        numbers = []
    if len(numbers) != ranks:
        raise OperError(
            f"nodes: expected an integer for each of the {ranks} ranks, equal for ranks that share "
            f"memory, got {nodes!r}: leave it out to let the ranks find them"
        )
    return numbers[rank]
