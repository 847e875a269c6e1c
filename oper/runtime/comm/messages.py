"""Messages between the ranks of a node: rounds of datagrams over Unix sockets, with descriptors.

Each rank binds one datagram socket to an abstract name, which the kernel frees with the process,
and sends bytes over it, with the descriptors of its shared memory. Messages are exchanged in
rounds, one from each rank of the node to each other, which all ranks go through in the same order.
They carry a secret that the ranks were told over the process group, so that no other process of the
host can take part.
"""

import contextlib
import errno
import os
import secrets
import select
import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

from oper.base.errors import OperError
from oper.runtime.comm.deadline import SLICE_SECONDS, Deadline
from oper.runtime.comm.liveness import Liveness

_NAME_BYTES = _SECRET_BYTES = 16
CARD_BYTES = _NAME_BYTES + _SECRET_BYTES
_HEADER = struct.Struct(f"={_SECRET_BYTES}sii")  # receiver's secret, sender, round
_MAX_BYTES = 1 << 16  # of a message


class Message(NamedTuple):
    """What one rank sent in a round; the receiver owns the descriptors."""

    content: bytes
    descriptors: list[int]


class _Endpoint(NamedTuple):
    """Where a rank receives: the address of its socket, and the secret it asks for."""

    address: str
    secret: bytes


class Messages:
    """This rank's socket and what has come in over it. `resources` closes both with the node."""

    def __init__(self, rank: int, liveness: Liveness, resources: contextlib.ExitStack) -> None:
        self._rank, self._liveness, self._resources = rank, liveness, resources
        self._endpoints: dict[int, _Endpoint] = {}
        self._round = 0
        self._inbox: dict[tuple[int, int], Message] = {}  # by round and rank
        resources.callback(_close_descriptors, self._inbox)

    def open(self) -> bytes:
        """Bind the socket. Returns the card, of CARD_BYTES, by which other ranks find it."""
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
        """One round: send `content` and the descriptor to all other ranks of the node, and receive
        theirs.

        LostRankError names ranks that died or did not come within `seconds`; `action` completes
        "rank 0 waited for rank 2 to …".
        """
        others = list(self._endpoints)
        to_send = set(others)

        def missing() -> list[int]:
            while others and self._receive():
                pass
            return [p for p in others if p in to_send or (self._round, p) not in self._inbox]

        deadline = Deadline(seconds)
        while to_send or missing():
            to_send -= {peer for peer in to_send if self._send(peer, content, descriptor)}
            if missing():
                # The kernel does not tell when a queue that was full has room again.
                sleep_seconds = 0.001 if to_send else SLICE_SECONDS
                if not self._arrivals.poll(1000 * sleep_seconds):
                    self._liveness.check(missing, action, deadline)
        received = {peer: self._inbox.pop((self._round, peer)) for peer in others}
        self._round += 1
        return received

    def _send(self, peer: int, content: bytes, descriptor: int | None) -> bool:
        """Whether the message could be sent."""
        endpoint, rights = self._endpoints[peer], []
        if descriptor is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        header = _HEADER.pack(endpoint.secret, self._rank, self._round)
        try:
            self._socket.sendmsg([header, content], rights, 0, endpoint.address)
        except OSError as error:
            # Its queue is full, or too many descriptors are in flight: a later attempt succeeds.
            # Where the receiver is gone, the liveness check finds it.
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ECONNREFUSED):
                return False
            raise
        return True

    def _receive(self) -> bool:
        """Take one message from the socket, if there is any."""
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, _HEADER.size + _MAX_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        if len(data) >= _HEADER.size:
            secret, peer, number = _HEADER.unpack_from(data)
            if secrets.compare_digest(secret, self._secret):
                self._inbox[number, peer] = Message(data[_HEADER.size :], descriptors)
                if flags & socket.MSG_CTRUNC:
                    raise OperError(
                        f"rank {self._rank} cannot map shared memory of rank {peer}: too many "
                        "files are open; see `ulimit -n`"
                    )
                return True
        for descriptor in descriptors:  # of a process that is no rank of ours
            os.close(descriptor)
        return True


def _close_descriptors(inbox: dict[tuple[int, int], Message]) -> None:
    for message in inbox.values():
        for descriptor in message.descriptors:
            os.close(descriptor)


def _address(name: bytes) -> str:
    return f"\0oper-{name.hex()}"
