"""Row relay: a row of another node that several ranks of a node need crosses the network once.

Of an owner in another node, one rank of a node is the RELAY: the rank at the owner's own position,
its proxy (allreduce/proxies.py). Forward, in shared memory of the node but for the third line:

    ask       every rank writes which distinct rows it needs, by bucket and owner
    unite     the relay of an owner unites the slots that its node's ranks need of it, ascending
    fetch     it asks the owner for these rows, which come into shared memory (row_exchange.py)
    read      every rank reads its rows there, by pointer: accesses get the address of that copy

Backward, the relay adds up what the mailboxes of its node have for the owner, in the order of its
ranks, and sends one gradient a row (apply_gradients.py).

Two counters of the signals order the ranks; each is the number of the fetch that a rank is at:

    asked     its slots are written, and it has read all rows of the fetch before
    relayed   the rows are there that it is the relay of
"""

from collections.abc import Sequence

import torch

from oper.base import native
from oper.runtime.comm.shared_segment import RESERVE_BYTES, Segment
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import BatchRows
from oper.runtime.memory.shared_slots import SharedSlots
from oper.runtime.step.row_exchange import RowExchange

COUNTERS = ("asked", "relayed")


class RowRelay:
    """What the ranks of a node fetch together, of one engine; made by all of them, and all its
    calls are collective. `exchange` is united."""

    def __init__(self, memory: TableMemory, exchange: RowExchange) -> None:
        node, buckets = memory.node, len(memory.buckets)
        self._node, self._signals, self._exchange = node, memory.signals, exchange
        self._asked = SharedSlots(node, buckets * (1 + node.ranks) + 1, "asked-slots")
        self._united = SharedSlots(node, buckets * node.ranks + 1, "relayed-slots")
        self._rows = node.share(Segment.create(0, RESERVE_BYTES, "relayed-rows"))
        self._fetches = 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's shared memory that rows pass through."""
        return self._asked.bytes + self._united.bytes + self._rows[self._node.rank].bytes

    def fetch(
        self, rows: BatchRows, buckets: Sequence[int], targets: torch.Tensor, bases: torch.Tensor
    ) -> None:
        """Fetch what ranks of this node need of other nodes' rows in some buckets. Where they came
        to are their `targets` [rows] then, by `bases`; they may be read there until the next
        fetch."""
        self._fetches += 1
        self._asked.write(rows.before, rows.slots)
        self._signals.post("asked", self._fetches)
        self._signals.wait("asked", self._fetches, "ask for rows of other nodes")
        slots, before = self._unite(buckets)
        self._united.write(before, slots)
        counts = before.diff().view(-1, len(buckets)).numpy()
        self._exchange.fetch(slots, counts, buckets, self._room)
        self._signals.post("relayed", self._fetches)
        self._signals.wait("relayed", self._fetches, "fetch rows of other nodes")
        for relay in self._node.peers:
            self._find(relay, rows, buckets, targets, bases)

    def _unite(self, buckets: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The slots that this node's ranks need of those that this one asks, ascending in each
        group, and how many there are before each."""
        asked = [self._asked.read(peer) for peer in self._node.peers]
        united: tuple[torch.Tensor, torch.Tensor] = native.ops().unite_slots(
            [slots for _, slots in asked],
            [before for before, _ in asked],
            self._exchange.groups(self._exchange.owners, buckets),
        )
        return united

    def _room(self, bytes: int) -> torch.Tensor:
        """This rank's memory for so many bytes of rows. Nobody reads it any more: all have asked
        for the next ones."""
        mine = self._rows[self._node.rank]
        mine.grow(bytes)
        return mine.tensor(0, (bytes,), torch.uint8)

    def _find(
        self,
        relay: int,
        rows: BatchRows,
        buckets: Sequence[int],
        targets: torch.Tensor,
        bases: torch.Tensor,
    ) -> None:
        """Find where the rows are that a rank fetched."""
        owners = self._exchange.owners_of[relay]
        if not owners:
            return
        header, slots = self._united.read(relay)
        before = header[: len(owners) * len(buckets) + 1]
        counts = before.diff().view(-1, len(buckets)).numpy()
        places = self._exchange.places(counts, buckets)
        self._exchange.read_there(bases, self._rows[relay].pointer, owners, buckets, places)
        native.ops().find_united(
            targets,
            rows.slots,
            rows.before,
            self._exchange.groups(owners, buckets),
            slots,
            before,
            [owner for owner in owners for _ in buckets],
            places.firsts.reshape(-1).tolist(),
        )
