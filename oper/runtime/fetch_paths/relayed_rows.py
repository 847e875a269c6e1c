"""Relayed rows: a row of another node that several ranks of a node need crosses the network once.

One rank of a node is the RELAY of an owner in another node: the rank at the owner's own position,
its proxy (allreduce/proxies.py). Forward, in shared memory of the node except for the third line:

    ask       every rank writes the distinct rows that it needs, by bucket and owner
    unite     the relay of an owner unites the slots that its node's ranks need of it, ascending
    fetch     it asks the owner for these rows, which come into shared memory (row_exchange.py)
    read      every rank reads its rows there, by pointer: accesses get the address of that copy

Backward, the relay adds up the gradients for the owner in the mailboxes of its node, in the order
of its ranks, and sends one gradient per row (apply_gradients.py).

On devices lists and rows lie in their memory, and their numbers in the host's.

Two counters of the signals order the ranks; each is the number of the fetch that a rank is at:

    asked     its slots are written, and it has read all rows of the fetch before
    relayed   the rows are there that it is the relay of
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from oper.base.arrays import Ints
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.copied_rows import CopiedRows
from oper.runtime.fetch_paths.fetch_path import Arrived
from oper.runtime.fetch_paths.row_exchange import RowExchange, groups_of
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.device_slots import DeviceBytes, DeviceSlots
from oper.runtime.memory.heap import TableMemory
from oper.runtime.memory.prepared_batch import BatchRows
from oper.runtime.memory.shared_slots import SharedBytes, SharedSlots
from oper.runtime.tables.row_gradients import RowGradients

COUNTERS = ("asked", "relayed")


class RelayedRows(CopiedRows):
    """The path of the `copied` buckets, by number, between several nodes. The gradients of the
    `sent` ones go to owners there."""

    def __init__(
        self, memory: TableMemory, copied: Sequence[int], sent: Sequence[int], counters: Counters
    ) -> None:
        super().__init__(memory, copied)
        self.needs = replace(self.needs, together=True, shared_fetch=True, messages=True)
        self._exchange = RowExchange(memory, True, sent, counters)
        self._relay = RowRelay(memory, self._exchange)

    def _fetch_far(
        self, rows: BatchRows, buckets: Sequence[int], targets: torch.Tensor, bases: Ints
    ) -> None:
        if buckets:
            self._relay.fetch(rows, buckets, targets, bases)

    def exchange_gradients(self, mailbox: Callable[[int], RowGradients], step: int) -> Arrived:
        """See FetchPath."""
        return self._exchange.exchange_gradients(mailbox, step)

    def carry(self, digests: Ints) -> bool:
        """See FetchPath."""
        return self._exchange.carry(digests)

    @property
    def shared_bytes(self) -> int:
        """See FetchPath."""
        return self._relay.shared_bytes


class RowRelay:
    """The fetches that the ranks of a node make together, for one engine. All of them make it, and
    all its calls are collective. `exchange` is united."""

    def __init__(self, memory: TableMemory, exchange: RowExchange) -> None:
        node, buckets = memory.node, len(memory.buckets)
        self._node, self._signals, self._exchange = node, memory.signals, exchange
        sizes = buckets * (1 + node.ranks) + 1, buckets * node.ranks + 1
        names = "asked-slots", "relayed-slots"
        self._rows: DeviceBytes | SharedBytes
        self._asked: DeviceSlots | SharedSlots
        self._united: DeviceSlots | SharedSlots
        self._device = device = memory.heap.device
        if isinstance(device, Cuda):
            self._asked = DeviceSlots(node, device, sizes[0], names[0])
            self._united = DeviceSlots(node, device, sizes[1], names[1])
            self._rows = DeviceBytes(node, device, "rows of other nodes")
        else:
            self._asked = SharedSlots(node, sizes[0], names[0])
            self._united = SharedSlots(node, sizes[1], names[1])
            self._rows = SharedBytes(node, "relayed-rows")
        self._fetches = 0

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's shared memory through which rows pass."""
        return self._asked.bytes + self._united.bytes + self._rows.bytes

    def fetch(
        self, rows: BatchRows, buckets: Sequence[int], targets: torch.Tensor, bases: Ints
    ) -> None:
        """Fetch the rows of other nodes in some buckets that ranks of this node need. `targets`
        [rows] and `bases` become their addresses, at which they may be read until the next fetch.
        """
        self._fetches += 1
        asked = rows.before_on_host
        self._asked.write(asked, rows.slots[: int(asked[-1])])
        self._signals.post("asked", self._fetches)
        self._signals.wait("asked", self._fetches, "ask for rows of other nodes")
        slots, before = self._of_node(buckets)
        self._united.write(before, slots)
        counts = before.diff().view(-1, len(buckets)).numpy()
        # Nobody reads this rank's rows any more: all have asked for the next ones.
        self._exchange.fetch(slots, counts, buckets, self._rows.room)
        self._signals.post("relayed", self._fetches)
        self._signals.wait("relayed", self._fetches, "fetch rows of other nodes")
        self._find_rows(rows, buckets, targets, bases)

    def _of_node(self, buckets: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the slots that this node's ranks need of the owners that this rank asks, ascending
        in each group, and the number of slots before each group."""
        asked = [self._asked.read(peer) for peer in self._node.peers]
        slots, before = self._device.ops().unite_slots(
            [slots for _, slots in asked],
            [before for before, _ in asked],
            groups_of(self._exchange.owners, buckets, self._node.ranks),
            self._device.stream,
        )
        before = before.cpu()  # waits for a device
        return slots[: int(before[-1])], before

    def _find_rows(
        self,
        rows: BatchRows,
        buckets: Sequence[int],
        targets: torch.Tensor,
        bases: Ints,
    ) -> None:
        """Find the addresses of the rows that the ranks of this node fetched."""
        slots: list[torch.Tensor] = []
        before: list[torch.Tensor] = []
        groups: list[int] = []
        fields: list[int] = []
        firsts: list[int] = []
        for relay in self._node.peers:
            owners = self._exchange.owners_of[relay]
            if not owners:
                continue
            header, united = self._united.read(relay)
            slots.append(united)
            before.append(header[: len(owners) * len(buckets) + 1])
            counts = before[-1].diff().view(-1, len(buckets)).numpy()
            places = self._exchange.places(counts, buckets)
            rows_there = self._rows.of(relay, int(places.sizes.sum()))
            self._exchange.read_there(bases, rows_there.data_ptr(), owners, buckets, places)
            groups += groups_of(owners, buckets, self._node.ranks)
            fields += [owner for owner in owners for _ in buckets]
            firsts += places.firsts.reshape(-1).tolist()
        self._device.ops().find_united(
            targets,
            rows.slots,
            rows.before_on_host,
            groups,
            slots,
            before,
            fields,
            firsts,
            self._device.stream,
        )
