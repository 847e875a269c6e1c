"""Row exchange: rows of other nodes and their gradients, over the network (torch.distributed).

A rank asks OWNERS, ranks of other nodes, for their rows, and sends them these rows' gradients; the
other way round it is asked by its ASKERS. Where distinct rows are fetched, a rank asks for all
ranks of its node (row_relay.py), and few of each node ask it: its owners are its clients and its
askers its proxies (allreduce/proxies.py). Where every access is fetched by itself, each rank asks
all ranks of other nodes.

All widths go together, as on a network it is messages that take time:

    rows        how many of each bucket are asked for; their slots; the rows
    gradients   how many rows of each bucket there are; their slots, and the gradients
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import Ints
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.shared_segment import LINE_BYTES
from oper.runtime.memory.heap import TableMemory
from oper.runtime.step.access_counters import Counters
from oper.runtime.tables.row_gradients import RowGradients

_WORD_BYTES = 8  # a message of gradients is so many, or a multiple


class RowPlaces(NamedTuple):
    """Where rows lie that came in messages, one of each owner: bytes from the first message's
    begin. Width after width, each from a line of the caches on, so that the rows of a width can be
    read as those of an arena."""

    sizes: Ints  # of each message, [messages]
    arenas: Ints  # where the arena of a bucket's width begins, [messages, buckets]
    firsts: Ints  # the bucket's first slot there, [messages, buckets]


class Routes:
    """Messages about rows between this rank and those that it asks, its `owners`, and those that
    ask it, its `askers`, ascending both. All ranks of the group call each of these together."""

    def __init__(self, proxies: Proxies, owners: Sequence[int], askers: Sequence[int]) -> None:
        self._proxies, self.owners, self.askers = proxies, owners, askers

    def send_gradients(
        self, parts: Sequence[RowGradients], groups: Sequence[int], dims: Sequence[int], action: str
    ) -> tuple[Ints, dict[int, RowGradients]]:
        """Send each owner the gradients of some rows, summed over the parts in their order: of each
        bucket, of such a dim, one of the `groups` of the parts, owner by owner. How many rows were
        sent, [owners, buckets], and what came of each asker, a group a bucket. `action` says in
        errors what other ranks were waited for."""
        rows, messages = summed(parts, groups, dims)
        counts = rows.reshape(-1, len(dims))
        return counts, self.exchange_gradients(counts, messages, dims, action)

    def exchange_gradients(
        self, counts: Ints, messages: torch.Tensor, dims: Sequence[int], action: str
    ) -> dict[int, RowGradients]:
        """The same of messages that are made already, owner by owner, with so many rows of each
        bucket, [owners, buckets]."""
        asked = self.swap_counts(counts, action)
        sizes = _gradient_bytes(asked, dims)
        came = native.ops().reused_tensor(int(sizes.sum()), torch.uint8)
        self.to_owners(messages, _gradient_bytes(counts, dims), came, sizes, action)
        of_askers = zip(self.askers, came.split(sizes.tolist()), asked, strict=True)
        return {asker: gradients_of(message, of, dims) for asker, message, of in of_askers}

    def swap_counts(self, counts: Ints, action: str) -> Ints:
        """Tell each owner its counts, [owners, buckets]; those of the askers, [askers, buckets]."""
        buckets = counts.shape[1]
        theirs = np.empty((len(self.askers), buckets), dtype=np.int64)
        sizes, incoming = (np.full(len(part), buckets) for part in (counts, theirs))
        given = torch.from_numpy(counts).reshape(-1)
        self.to_owners(given, sizes, torch.from_numpy(theirs).view(-1), incoming, action)
        return theirs

    def to_owners(
        self, outgoing: torch.Tensor, sizes: Ints, incoming: torch.Tensor, theirs: Ints, action: str
    ) -> None:
        """Send each owner its part of what is outgoing, and receive so much of each asker."""
        sent = dict(zip(self.owners, sizes.tolist(), strict=True))
        came = dict(zip(self.askers, theirs.tolist(), strict=True))
        self._proxies.start(outgoing, sent, incoming, came, action)()


class RowExchange:
    """The exchange of rows between nodes, of one engine on one rank; `united`: each rank asks for
    all of its node. Every call is collective, and names the `buckets` that it is about, which are
    the same on all ranks."""

    def __init__(self, memory: TableMemory, united: bool, counters: Counters) -> None:
        node = memory.node
        self._node, self._heap, self._counters = node, memory.heap, counters
        self._buckets = memory.buckets
        self._row_bytes = np.array(
            [memory.heap.rows(bucket.width).shape[1] for bucket in memory.buckets], dtype=np.int64
        )
        self._proxies = Proxies(node)
        away = tuple(r for r in range(node.ranks) if r not in node.peers)
        # The ranks for all of which this one asks, whom each of them asks, and who asks this one.
        self.members: Sequence[int] = (node.rank,)
        self.owners_of: Mapping[int, Sequence[int]] = {node.rank: away}
        self.askers: Sequence[int] = away
        # The ranks whose gradients an owner adds up, in this order: by node, and for nodes that
        # send one sum, the rank that sends it.
        self.order: Sequence[int] = range(node.ranks)
        if united:
            self.members = node.peers
            self.owners_of = {peer: self._proxies.clients_of(peer) for peer in node.peers}
            # Ascending, as messages come: proxies are in the order of their nodes.
            self.askers = sorted(self._proxies.proxies)
            senders = {*node.peers, *self.askers}
            self.order = [r for members in self._proxies.nodes for r in members if r in senders]
        self._routes = Routes(self._proxies, self.owners, self.askers)

    @classmethod
    def of(cls, memory: TableMemory, united: bool, counters: Counters) -> "RowExchange | None":
        """The exchange with other nodes; None where there are none, or kernels read rows there."""
        if memory.all_to_all is None or memory.symmetric is not None:
            return None
        return cls(memory, united, counters)

    @property
    def owners(self) -> Sequence[int]:
        """Whom this rank asks for rows, ascending."""
        return self.owners_of[self._node.rank]

    def groups(self, owners: Sequence[int], buckets: Sequence[int]) -> list[int]:
        """The numbers of the groups of rows (prepared_batch.py) that owners have of buckets, owner
        by owner."""
        return [b * (1 + self._node.ranks) + 1 + owner for owner in owners for b in buckets]

    # Rows.

    def places(self, counts: Ints, buckets: Sequence[int]) -> RowPlaces:
        """Where so many rows of each bucket lie in messages, [messages, buckets]."""
        arenas, firsts = np.zeros((2, *counts.shape), dtype=np.int64)
        end = np.zeros(len(counts), dtype=np.int64)
        widths = [self._buckets[b].width for b in buckets]
        for width in sorted(set(widths)):
            end = _rounded_up(end, LINE_BYTES)
            rows = np.zeros(len(counts), dtype=np.int64)
            for n in (n for n, of in enumerate(widths) if of == width):
                arenas[:, n], firsts[:, n] = end, rows
                rows = rows + counts[:, n]
                row_bytes = self._row_bytes[buckets[n]]
            end = end + rows * row_bytes
        sizes = _rounded_up(end, LINE_BYTES)
        begins = (sizes.cumsum() - sizes)[:, None]
        return RowPlaces(sizes, arenas + begins, firsts)

    def fetch(
        self,
        slots: torch.Tensor,
        counts: Ints,
        buckets: Sequence[int],
        room: Callable[[int], torch.Tensor],
    ) -> torch.Tensor:
        """Ask each owner for rows by their slots, so many of each bucket, [owners, buckets], owner
        by owner. They are put into the memory that `room` makes for so many bytes, where `places`
        says."""
        asked = self._routes.swap_counts(counts, "ask for rows")
        sizes = asked.sum(axis=1)
        wanted = slots.new_empty(int(sizes.sum()))
        self._routes.to_owners(slots, counts.sum(axis=1), wanted, sizes, "ask for rows")
        sent, came = self.places(asked, buckets), self.places(counts, buckets)
        answers = native.ops().reused_tensor(int(sent.sizes.sum()), torch.uint8)
        self._copy_rows(wanted, asked, buckets, sent, answers)
        rows = room(int(came.sizes.sum()))
        outgoing = dict(zip(self.askers, sent.sizes.tolist(), strict=True))
        incoming = dict(zip(self.owners, came.sizes.tolist(), strict=True))
        self._proxies.start(answers, outgoing, rows, incoming, "send rows")()
        self._count("relayed", counts, self._row_bytes[list(buckets)])
        return rows

    def read_there(
        self,
        bases: torch.Tensor,
        rows: int,
        owners: Sequence[int],
        buckets: Sequence[int],
        places: RowPlaces,
    ) -> None:
        """Have the arenas of owners begin, in `bases`, where their rows came to, from address
        `rows` on."""
        for n, b in enumerate(buckets):
            at = torch.from_numpy(rows + places.arenas[:, n])
            bases[self._buckets[b].width, list(owners)] = at

    def _copy_rows(
        self,
        slots: torch.Tensor,
        counts: Ints,
        buckets: Sequence[int],
        places: RowPlaces,
        out: torch.Tensor,
    ) -> None:
        """Copy rows of this rank, by their slots, for each asker."""
        first = 0
        for message, of_buckets in enumerate(counts.tolist()):
            for n, (b, count) in enumerate(zip(buckets, of_buckets, strict=True)):
                row_bytes = int(self._row_bytes[b])
                begin = int(places.arenas[message, n] + places.firsts[message, n] * row_bytes)
                native.ops().copy_rows(
                    slots[first : first + count],
                    int(self._heap.bases[self._buckets[b].width, self._node.rank]),
                    row_bytes,
                    out[begin : begin + count * row_bytes],
                )
                first += count

    # Gradients.

    def send_gradients(
        self, parts: Sequence[RowGradients], buckets: Sequence[int], action: str
    ) -> dict[int, RowGradients]:
        """Send each owner the gradients of its rows, summed over the parts in their order; what
        came of each asker for this rank's rows, a group a bucket. `action` says in errors what
        other ranks were waited for."""
        dims = [self._buckets[b].dim for b in buckets]
        groups = self.groups(self.owners, buckets)
        counts, received = self._routes.send_gradients(parts, groups, dims, action)
        self._count("relayed_gradient", counts, 4 * np.array(dims))
        return received

    def _count(self, what: str, counts: Ints, row_bytes: Ints) -> None:
        counted = np.zeros((2, self._node.ranks), dtype=np.int64)
        counted[:, list(self.owners)] = counts.sum(axis=1), counts @ row_bytes
        self._counters.add(**{f"{what}_rows": counted[0], f"{what}_bytes": counted[1]})


def summed(
    parts: Sequence[RowGradients], groups: Sequence[int], dims: Sequence[int]
) -> tuple[Ints, torch.Tensor]:
    """Rows of some groups of the parts, each with the sum of its gradients in the order of the
    parts, as messages of one group for each of these dims; and how many rows each has, [groups]."""
    rows, messages = native.ops().relay_gradients(
        [part.slots for part in parts],
        [part.values for part in parts],
        [part.groups for part in parts],
        list(groups),
        list(dims),
    )
    return rows.numpy(), messages


def _gradient_bytes(counts: Ints, dims: Sequence[int]) -> Ints:
    """The bytes of messages with so many rows of each bucket, [messages, buckets]: a slot and a
    gradient each."""
    return _rounded_up(counts @ (8 + 4 * np.array(dims, dtype=np.int64)), _WORD_BYTES)


def _rounded_up(bytes: Ints, unit: int) -> Ints:
    """To multiples of a unit."""
    units: Ints = -(-bytes // unit)
    return units * unit


def gradients_of(message: torch.Tensor, counts: Ints, dims: Sequence[int]) -> RowGradients:
    """What a message has, a group a bucket: so many rows of each, of these dims."""
    ends = np.zeros((2, len(dims) + 1), dtype=np.int64)
    ends[:, 1:] = np.cumsum([counts, counts * dims], axis=1)
    slots, values = message.split([8 * int(ends[0, -1]), len(message) - 8 * int(ends[0, -1])])
    return RowGradients(slots.view(torch.int64), torch.from_numpy(ends), values.view(torch.float32))
