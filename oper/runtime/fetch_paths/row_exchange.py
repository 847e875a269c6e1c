"""Row exchange: rows of other nodes and their gradients, over the network (torch.distributed).

A rank asks OWNERS, ranks of other nodes, for their rows, and sends them these rows' gradients; in
turn its ASKERS ask it. If distinct rows are fetched, a rank asks for all ranks of its node
(relayed_rows.py), and few of each node ask it: its owners are its clients and its askers its
proxies (allreduce/proxies.py). If every access is fetched by itself, each rank asks all ranks of
other nodes (rows_by_access.py).

All widths go together, because messages, not bytes, take most of the time on a network:

    rows        the number of rows asked for, by bucket; their slots; the rows
    gradients   the number of rows, by bucket; their slots, and the gradients

The layout of messages, and their senders and receivers: row_messages.py. Rows lie on devices if
the heap does; the host knows their number, because the network asks for it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.shared_segment import LINE_BYTES
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.fetch_paths.fetch_path import Arrived
from oper.runtime.fetch_paths.row_messages import Routes
from oper.runtime.memory.heap import TableMemory
from oper.runtime.tables.row_gradients import RowGradients


class RowPlaces(NamedTuple):
    """The places of rows that came in messages, one from each owner, in bytes from the beginning of
    the first message. Each width begins at a line of the caches, so that the rows of a width can be
    read as those of an arena."""

    sizes: Ints  # of each message, [messages]
    arenas: Ints  # the beginning of the arena of a bucket's width, [messages, buckets]
    firsts: Ints  # the bucket's first slot there, [messages, buckets]


def groups_of(owners: Iterable[int], buckets: Sequence[int], ranks: int) -> list[int]:
    """Return the numbers of the groups of rows (prepared_batch.py) that owners among so many ranks
    have of buckets, owner by owner."""
    return [b * (1 + ranks) + 1 + owner for owner in owners for b in buckets]


def count_relayed(
    counters: Counters, kind: str, ranks: int, owners: Sequence[int], counts: Ints, row_bytes: Ints
) -> None:
    """Count rows of a kind, and their bytes, that crossed the network from or to their owners,
    [owners, buckets]."""
    counted = np.zeros((2, ranks), dtype=np.int64)
    counted[:, list(owners)] = counts.sum(axis=1), counts @ row_bytes
    counters.add(**{f"{kind}_rows": counted[0], f"{kind}_bytes": counted[1]})


class RowExchange:
    """The exchange of rows between nodes, of one engine on one rank; `united`: each rank asks for
    all of its node. Gradients of the `sent` buckets go to owners on other nodes. Every call is
    collective, and names the `buckets` that it is about, which are the same on all ranks."""

    def __init__(
        self, memory: TableMemory, united: bool, sent: Sequence[int], counters: Counters
    ) -> None:
        node = memory.node
        self._node, self._heap, self._counters = node, memory.heap, counters
        self._buckets, self._sent = memory.buckets, sent
        self._row_bytes = np.array(
            [memory.heap.rows(bucket.width).shape[1] for bucket in memory.buckets], dtype=np.int64
        )
        self._device = memory.heap.device
        self._proxies = Proxies(node, self._device)
        away = tuple(r for r in range(node.ranks) if r not in node.peers)
        # The ranks for which this one asks, the owners that each of them asks, and its askers.
        self._members: Sequence[int] = (node.rank,)
        self.owners_of: Mapping[int, Sequence[int]] = {node.rank: away}
        self._askers: Sequence[int] = away
        # The ranks whose gradients an owner adds up, in this order: by node, and for a node that
        # sends one sum, the rank that sends it.
        self._order: Sequence[int] = range(node.ranks)
        if united:
            self._members = node.peers
            self.owners_of = {peer: self._proxies.clients_of(peer) for peer in node.peers}
            # Ascending, in the order of messages: proxies are in the order of their nodes.
            self._askers = sorted(self._proxies.proxies)
            senders = {*node.peers, *self._askers}
            self._order = [r for members in self._proxies.nodes for r in members if r in senders]
        self._routes = Routes(self._proxies, self.owners, self._askers, self._device)

    @property
    def owners(self) -> Sequence[int]:
        """The ranks that this one asks for rows, ascending."""
        return self.owners_of[self._node.rank]

    # Rows.

    def places(self, counts: Ints, buckets: Sequence[int]) -> RowPlaces:
        """Return the places of so many rows of each bucket in messages, [messages, buckets]."""
        arenas, firsts = np.zeros((2, *counts.shape), dtype=np.int64)
        end = np.zeros(len(counts), dtype=np.int64)
        widths = [self._buckets[b].width for b in buckets]
        for width in sorted(set(widths)):
            end = _rounded_up(end, LINE_BYTES)
            rows = np.zeros(len(counts), dtype=np.int64)
            for n in (n for n, other in enumerate(widths) if other == width):
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
        """Ask each owner for rows by their slots, owner by owner; `counts` [owners, buckets] are
        their numbers. Return the memory that `room` made for the rows, which lie there at `places`.
        """
        asked = self._routes.swap_counts(counts, "ask for rows")
        sizes = asked.sum(axis=1)
        wanted = slots.new_empty(int(sizes.sum()))
        self._routes.to_owners(slots, counts.sum(axis=1), wanted, sizes, "ask for rows")
        sent, came = self.places(asked, buckets), self.places(counts, buckets)
        answers = self._device.new(int(sent.sizes.sum()), torch.uint8)
        self._copy_rows(wanted, asked, buckets, sent, answers)
        rows = room(int(came.sizes.sum()))
        outgoing = dict(zip(self._askers, sent.sizes.tolist(), strict=True))
        incoming = dict(zip(self.owners, came.sizes.tolist(), strict=True))
        self._proxies.start(answers, outgoing, rows, incoming, "send rows")()
        self._count("relayed", counts, self._row_bytes[list(buckets)])
        return rows

    def read_there(
        self,
        bases: Ints,
        rows: int,
        owners: Sequence[int],
        buckets: Sequence[int],
        places: RowPlaces,
    ) -> None:
        """Have the arenas of owners begin, in `bases`, at the rows that came from them, which lie
        from address `rows` on."""
        for n, b in enumerate(buckets):
            bases[self._buckets[b].width, list(owners)] = rows + places.arenas[:, n]

    def _copy_rows(
        self,
        slots: torch.Tensor,
        counts: Ints,
        buckets: Sequence[int],
        places: RowPlaces,
        out: torch.Tensor,
    ) -> None:
        """Copy this rank's rows, by their slots, for each asker."""
        row_bytes = np.tile(self._row_bytes[list(buckets)], len(counts))
        own = self._heap.bases_on_host[[self._buckets[b].width for b in buckets], self._node.rank]
        arenas = np.tile(own, len(counts))
        each, ends = counts.reshape(-1), counts.reshape(-1).cumsum()
        self._device.ops().copy_rows(
            slots,
            (ends - each).tolist(),
            each.tolist(),
            arenas.tolist(),
            row_bytes.tolist(),
            out,
            (places.arenas + places.firsts * row_bytes.reshape(counts.shape)).reshape(-1).tolist(),
            stream=self._device.stream,
        )

    # Gradients.

    def carry(self, digests: Ints) -> bool:
        """Let `digests` [ranks] go to all ranks with the numbers of gradients, each rank's from the
        rank itself; return whether gradients are sent."""
        if self._sent:
            self._routes.digests = digests
        return bool(self._sent)

    def exchange_gradients(self, mailbox: Callable[[int], RowGradients], step: int) -> Arrived:
        """Send each owner the gradients of its rows, summed over the ranks for which this one asks,
        and return those of this rank's rows. `mailbox` reads a rank's."""
        if not self._sent:
            return Arrived()
        parts = [mailbox(rank) for rank in self._members]
        dims = [self._buckets[b].dim for b in self._sent]
        groups = groups_of(self.owners, self._sent, self._node.ranks)
        action = f"exchange gradients (step {step})"
        counts, received = self._routes.send_gradients(parts, groups, dims, action)
        self._count("relayed_gradient", counts, 4 * np.array(dims))
        return Arrived(received, self._sent, self._order)

    def _count(self, kind: str, counts: Ints, row_bytes: Ints) -> None:
        count_relayed(self._counters, kind, self._node.ranks, self.owners, counts, row_bytes)


def _rounded_up(bytes: Ints, unit: int) -> Ints:
    """Return bytes, rounded up to multiples of a unit."""
    units: Ints = -(-bytes // unit)
    return units * unit
