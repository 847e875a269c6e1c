"""Exchange: data from every rank for every other, all at once.

Between nodes it goes over torch.distributed, the portable transport (gloo, NCCL, MPI), by two
all_to_all, of sizes and of contents; ranks that share memory take part with nothing to send. (Rows
and gradients of a step go with all widths together: fetch_paths/row_exchange.py.) Data for ranks of
all nodes goes the same way, or, if all ranks share memory, through a segment of each rank, from
which the others take their parts.

Every call is collective and names its action. In shared memory, ranks that do different things at
once get an error instead of each other's bytes.
"""

import zlib
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from oper.base.arrays import as_bytes
from oper.base.errors import OperError
from oper.runtime.comm.group import Group
from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.comm.shared_segment import RESERVE_BYTES, Segment, aligned

COUNTERS = ("exchanged", "taken")  # that the signals must have


class Exchange(Protocol):
    """Exchanges bytes between all ranks."""

    def send(self, parts: Sequence[torch.Tensor], action: str) -> list[torch.Tensor]:
        """Send parts[j], bytes [n_j], to rank j; return the part that each rank sent here. `action`
        is the same on all ranks and completes "rank 0 waited for rank 2 to …"."""


class AllToAll:
    """All-to-all of tensors among the ranks of a group; every call is collective.

    `action` completes "rank 0 waited for rank 2 to …".
    """

    def __init__(self, group: Group) -> None:
        self._group = group

    @classmethod
    def of(cls, node: Node) -> "AllToAll | None":
        """Return the transport to other nodes; None if all ranks share memory."""
        return cls(node.group) if node.group and len(node.peers) < node.ranks else None

    def send(self, parts: Sequence[torch.Tensor], action: str) -> list[torch.Tensor]:
        """Send parts[j] [n_j, *rest] to rank j; return the part that each rank sent here [m_j,
        *rest]."""
        counts = torch.tensor([len(part) for part in parts], dtype=torch.int64)
        received = torch.empty_like(counts)
        outgoing = torch.cat(list(parts))
        self._group.run(dist.all_to_all_single, received, counts, action=action)
        sizes = received.tolist()
        incoming = outgoing.new_empty((sum(sizes), *outgoing.shape[1:]))
        self._group.run(
            dist.all_to_all_single, incoming, outgoing, sizes, counts.tolist(), action=action
        )
        return list(incoming.split(sizes))


def exchange_of(node: Node, signals: Signals) -> Exchange:
    """Return the exchange of a node's ranks, or of all nodes'. To be called on all ranks."""
    all_to_all = AllToAll.of(node)
    return all_to_all or _Outboxes(node, signals)


def gather(
    exchange: Exchange, ranks: int, content: torch.Tensor, action: str
) -> list[torch.Tensor]:
    """Return the content of all ranks, int64 [n_j] each."""
    same = [as_bytes(content)] * ranks
    return [part.view(torch.int64) for part in exchange.send(same, action)]


class _Outboxes:
    """Exchange in memory that all ranks share: int64 [2 + 2·ranks] of the action's checksum, the
    round, and the start and end of each rank's part; then the parts."""

    def __init__(self, node: Node, signals: Signals) -> None:
        self._node, self._signals, self._round = node, signals, 0
        self._head = 2 + 2 * node.ranks
        own = Segment.create(aligned(8 * self._head), RESERVE_BYTES, "exchange")
        self._segments = node.share(own)

    def send(self, parts: Sequence[torch.Tensor], action: str) -> list[torch.Tensor]:
        """See Exchange."""
        self._signals.wait("taken", self._round, action)
        self._round += 1
        self._write(parts, action)
        self._signals.post("exchanged", self._round)
        self._signals.wait("exchanged", self._round, action)
        received = [self._part_of(rank, action) for rank in range(self._node.ranks)]
        self._signals.post("taken", self._round)
        return received

    def _write(self, parts: Sequence[torch.Tensor], action: str) -> None:
        own, end = self._segments[self._node.rank], aligned(8 * self._head)
        head = [zlib.crc32(action.encode()), self._round]
        places: dict[int, tuple[int, torch.Tensor]] = {}
        for part in parts:
            # A part for several ranks is written once.
            if id(part) not in places:
                places[id(part)] = (end, part)
                end = aligned(end + part.numel())
            begin = places[id(part)][0]
            head += [begin, begin + part.numel()]
        own.grow(end)
        own.tensor(0, (self._head,), torch.int64).copy_(torch.tensor(head))
        for begin, part in places.values():
            own.tensor(begin, (part.numel(),), torch.uint8).copy_(part)

    def _part_of(self, rank: int, action: str) -> torch.Tensor:
        segment = self._segments[rank]
        head = segment.tensor(0, (self._head,), torch.int64).tolist()
        if head[:2] != [zlib.crc32(action.encode()), self._round]:
            raise OperError(
                f"rank {self._node.rank} came to {action}, and rank {rank} to do something else: "
                "all ranks must train, evaluate and save the tables in the same order"
            )
        begin, end = head[2 + 2 * self._node.rank :][:2]
        return segment.tensor(begin, (end - begin,), torch.uint8).clone()
