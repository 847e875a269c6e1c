"""Messages between the ranks of a node: datagrams over Unix sockets, with descriptors.

Each rank binds one datagram socket to an abstract name, which the kernel frees with the process,
and sends bytes over it, with the descriptors of its shared memory. Messages are exchanged in
rounds, one from each rank of the node to each other, which all ranks go through in the same order.
Or they go one way, at any time, in a channel: the receivers take them by sender and number, when
they need them. Messages carry a secret that the ranks were told over the process group, so that no
other process of the host can take part.

A socket's queue holds few messages. So a rank that waits for other ranks, here or for their signals
(progress_signals.py), takes in the messages that have come for later: no rank waits for room
without end.
"""

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from oper.base.errors import OperError
from oper.runtime.comm.deadline import SLICE_SECONDS, Deadline
from oper.runtime.comm.liveness import Liveness

_NAME_BYTES = _SECRET_BYTES = 16
CARD_BYTES = _NAME_BYTES + _SECRET_BYTES
_HEADER = struct.Struct(f"={_SECRET_BYTES}siii")  # receiver's secret, sender, channel, number
_MAX_BYTES = 1 << 16  # of a message
_ROUNDS = 0  # the channel of rounds, by their numbers


class Message(NamedTuple):
    """A message of one rank; the receiver owns the descriptors."""

    content: bytes
    descriptors: list[int]


class _Letter(NamedTuple):
    """A message to other ranks, or the channel and number of an awaited message."""

    channel: int
    number: int
    content: bytes = b""
    descriptor: int | None = None


class _Endpoint(NamedTuple):
    """The receiving end of a rank: the address of its socket, and the secret that it asks for."""

    address: str
    secret: bytes


class Messages:
    """This rank's socket and the messages that have come in over it. `resources` closes both with
    the node."""

    def __init__(self, rank: int, liveness: Liveness, resources: contextlib.ExitStack) -> None:
        self._rank, self._liveness, self._resources = rank, liveness, resources
        self._endpoints: dict[int, _Endpoint] = {}
        self._round, self._channels = 0, 1 + _ROUNDS
        # By channel, number and sender.
        self._inbox: dict[tuple[int, int, int], Message] = {}
        resources.callback(_close_descriptors, self._inbox)

    def open(self) -> bytes:
        """Bind the socket. Return the card, of CARD_BYTES, by which other ranks find it."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._resources.callback(self._socket.close)
        self._socket.setblocking(False)
        name, self._secret = secrets.token_bytes(_NAME_BYTES), secrets.token_bytes(_SECRET_BYTES)
        self._socket.bind(_address(name))
        # select() takes no descriptor above 1,023, and engines of many ranks have more.
        self._arrivals = select.poll()
        self._arrivals.register(self._socket, select.POLLIN)
        return name + self._secret

    def connect(self, cards: Mapping[int, bytes]) -> None:
        """Exchange messages with the ranks of these cards from now on."""
        for rank, card in cards.items():
            endpoint = _Endpoint(_address(card[:_NAME_BYTES]), card[_NAME_BYTES:])
            self._endpoints[rank] = endpoint
            self._liveness.watch_socket(rank, endpoint.address)

    def exchange(
        self, content: bytes, descriptor: int | None, action: str, seconds: float
    ) -> dict[int, Message]:
        """Exchange one round: send `content` and the descriptor to all other ranks of the node, and
        return their messages.

        LostRankError names ranks that died or did not come within `seconds`; `action` completes
        "rank 0 waited for rank 2 to …".
        """
        letter = _Letter(_ROUNDS, self._round, content, descriptor)
        others = list(self._endpoints)
        received = self._pass(letter, others, others, action, seconds)
        self._round += 1
        return received

    def new_channel(self) -> int:
        """Return a new channel of one-way messages; all ranks of the node must make theirs in the
        same order."""
        self._channels += 1
        return self._channels - 1

    def send(
        self,
        channel: int,
        number: int,
        content: bytes,
        descriptor: int,
        action: str,
        seconds: float,
    ) -> None:
        """Send this rank's message `number` in a channel to all other ranks of the node, each of
        which may take it at any time. Wait for room in the queues of ranks that do not read.

        LostRankError names ranks that died, or whose queue stayed full for `seconds`.
        """
        letter = _Letter(channel, number, content, descriptor)
        self._pass(letter, list(self._endpoints), [], action, seconds)

    def receive(
        self, channel: int, number: int, sender: int, action: str, seconds: float
    ) -> Message:
        """Return message `number` of a rank in a channel; messages of lower numbers are dropped.

        Raise LostRankError if the rank died before it sent the message, or did not send it within
        `seconds`.
        """
        received = self._pass(_Letter(channel, number), [], [sender], action, seconds)
        for key in list(self._inbox):
            if key[0] == channel and key[1] < number and key[2] == sender:
                _close_all(self._inbox.pop(key))
        return received[sender]

    def take_in(self) -> None:
        """Take all messages from the socket, and keep them until they are asked for."""
        while self._endpoints and self._receive():
            pass

    def _pass(
        self,
        letter: _Letter,
        receivers: Sequence[int],
        senders: Sequence[int],
        action: str,
        seconds: float,
    ) -> dict[int, Message]:
        """Send a letter, and wait for the letters of its channel and number from `senders`."""
        key, to_send = (letter.channel, letter.number), set(receivers)

        def missing() -> list[int]:
            self.take_in()
            awaited = {p for p in senders if (*key, p) not in self._inbox}
            return [p for p in self._endpoints if p in to_send or p in awaited]

        deadline = Deadline(seconds)
        while to_send or missing():
            to_send -= {peer for peer in to_send if self._send(peer, letter)}
            if missing():
                # The kernel does not tell when a queue that was full has room again.
                sleep_seconds = 0.001 if to_send else SLICE_SECONDS
                if not self._arrivals.poll(1000 * sleep_seconds):
                    self._liveness.check(missing, action, deadline)
        return {peer: self._inbox.pop((*key, peer)) for peer in senders}

    def _send(self, peer: int, letter: _Letter) -> bool:
        """Send a message if there is room. Return whether it was sent."""
        endpoint, rights = self._endpoints[peer], []
        if letter.descriptor is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", letter.descriptor))]
        header = _HEADER.pack(endpoint.secret, self._rank, letter.channel, letter.number)
        try:
            self._socket.sendmsg([header, letter.content], rights, 0, endpoint.address)
        except OSError as error:
            # Its queue is full, or too many descriptors are in flight: a later attempt succeeds.
            # Where the receiver is gone, the liveness check finds it.
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ECONNREFUSED):
                return False
            raise
        return True

    def _receive(self) -> bool:
        """Take one message from the socket. Return whether there was one."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, _HEADER.size + _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        if len(data) >= _HEADER.size:
            secret, peer, channel, number = _HEADER.unpack_from(data)
            if secrets.compare_digest(secret, self._secret):
                self._inbox[channel, number, peer] = Message(data[_HEADER.size :], descriptors)
                if flags & socket.MSG_CTRUNC:
                    raise OperError(
                        f"rank {self._rank} cannot map shared memory of rank {peer}: too many "
                        "files are open; see `ulimit -n`"
                    )
                return True
        for descriptor in descriptors:  # of a process that is no rank of ours
            os.close(descriptor)
        return True


def _close_descriptors(inbox: dict[tuple[int, int, int], Message]) -> None:
    for message in inbox.values():
        _close_all(message)


def _close_all(message: Message) -> None:
    for descriptor in message.descriptors:
        os.close(descriptor)


def _address(name: bytes) -> str:
    return f"\0oper-{name.hex()}"
