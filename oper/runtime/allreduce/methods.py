"""The three methods of the replicas' AllReduce (OPER §5.3).

    Dense      every rank sums a gradient of every replica, touched or not
    Bitmap     bitmaps of touched replicas are united, and only those replicas summed: equal bitmaps
               give equal numberings of the touched replicas, so that the ranks' buffers have the
               same rows in the same places
    AllGather  every rank receives the numbers and gradients of all ranks' touched replicas, and
               sums them itself

The first two sum buffers of equal size over all ranks (sliced_sum.py).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.cost.allreduce import NodeSum
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.allreduce.sliced_sum import SlicedSum
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients


@dataclass(frozen=True)
class Replicas:
    """The replicas of each bucket, as the operators take them. They are numbered in the order of
    their slots."""

    slots: Sequence[torch.Tensor]  # int64 ascending; empty if number n is slot n
    counts: Sequence[int]
    dims: Sequence[int]
    groups: Sequence[int]  # each bucket's number among a rank's groups; unused without replicas
    node_sum: NodeSum  # the way to sum their gradients over nodes

    @property
    def words(self) -> list[int]:
        """The words of a bitmap of each bucket."""
        return [-(-count // 64) for count in self.counts]

    def on(self, device: torch.device) -> "Replicas":
        """Return the replicas with their slots on a device."""
        return replace(self, slots=[slots.to(device) for slots in self.slots])

    @property
    def rows(self) -> RowGradients:
        """All replicas, one group per bucket, without gradients."""
        slots = [
            torch.arange(count) if count > len(of_bucket) else of_bucket
            for of_bucket, count in zip(self.slots, self.counts, strict=True)
        ]
        sizes = [n * dim for n, dim in zip(self.counts, self.dims, strict=True)]
        groups = torch.tensor([[0, *self.counts], [0, *sizes]]).cumsum(1)
        return RowGradients(torch.cat(slots), groups, torch.empty(0))


class Method(Protocol):
    """The parts of a step, between which the ranks of the node wait for each other."""

    @property
    def read_bytes(self) -> int | torch.Tensor:
        """Bytes read in this step from memory that other ranks of the node wrote; on a device int64
        [1] there."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of this rank's shared memory."""

    def mark(self, rows: SortedRows) -> None:
        """Begin a step: let the other ranks know which replicas were touched here."""

    def write(self, sums: RowGradients) -> None:
        """Let the other ranks read the gradients of these rows' replicas, once all have marked."""

    def reduce(self) -> None:
        """Do this rank's part of the sums, once all ranks of the node have written."""

    def read(self) -> RowGradients:
        """Return the replicas that any rank touched and their sums, one group per bucket, once all
        ranks of the node have reduced."""


class Dense:
    """A gradient of every replica. Untouched replicas are recognized by their padding
    (gradient_buffers.h).

    `header_bytes` are kept free before the gradients.
    """

    def __init__(
        self, node: Node, proxies: Proxies, replicas: Replicas, header_bytes: int = 0
    ) -> None:
        self.read_bytes = 0
        self._replicas, self._rows = replicas, replicas.rows
        self._sum = SlicedSum(node, proxies, header_bytes, self._size, replicas.node_sum)

    @property
    def shared_bytes(self) -> int:
        return self._sum.shared_bytes

    def mark(self, rows: SortedRows) -> None:
        self.read_bytes = 0

    def write(self, sums: RowGradients) -> None:
        native.ops().aggregate_rows(
            sums.slots,
            sums.groups,
            sums.values,
            self._replicas.groups,
            self._replicas.counts,
            self._rows.slots,
            self._rows.groups,
            self._replicas.dims,
            self._sum.buffer(self._size),
        )

    def reduce(self) -> None:
        self.read_bytes += self._sum.sum(self._size)

    def read(self) -> RowGradients:
        sums, dims = self._sums(), self._replicas.dims
        touched = native.ops().touched_rows(sums.groups, sums.values, dims)
        if len(touched) == len(sums.slots):
            return sums
        taken = native.ops().take_rows(sums.slots, sums.groups, sums.values, touched, dims)
        return RowGradients(*taken)

    @property
    def _size(self) -> int:
        """Elements of the buffers."""
        return int(self._rows.groups[1, -1])

    def _sums(self) -> RowGradients:
        """Return the rows of the buffers and their sums."""
        return RowGradients(self._rows.slots, self._rows.groups, self._sum.total(self._size))


class Bitmap(Dense):
    """A gradient of every replica that any rank touched."""

    def __init__(self, node: Node, proxies: Proxies, replicas: Replicas) -> None:
        words = sum(replicas.words)
        super().__init__(node, proxies, replicas, header_bytes=8 * words)
        bitmaps = self._sum.headers([words], torch.int64)
        self._bitmap, self._bitmaps = bitmaps[node.rank], list(bitmaps.values())
        self._proxies = proxies

    def mark(self, rows: SortedRows) -> None:
        super().mark(rows)
        replicas = self._replicas
        native.ops().mark_replicas(
            rows.slots,
            rows.before,
            replicas.groups,
            replicas.slots,
            replicas.counts,
            self._bitmap,
        )

    def write(self, sums: RowGradients) -> None:
        bitmaps = self._bitmaps
        self.read_bytes += sum(bitmap.nbytes for bitmap in bitmaps)
        if self._proxies.proxies:
            of_node = functools.reduce(torch.bitwise_or, bitmaps)
            received = self._proxies.exchange(
                dict.fromkeys(self._proxies.clients, of_node),
                dict.fromkeys(self._proxies.proxies, len(of_node)),
                torch.int64,
                "unite touched replicas",
            )
            bitmaps = [of_node, *received.values()]
        replicas = self._replicas
        slots, groups = native.ops().unite_replicas(
            bitmaps, replicas.slots, replicas.counts, replicas.dims, sum(replicas.counts)
        )
        self._rows = RowGradients(slots, groups, torch.empty(0))
        super().write(sums)

    def read(self) -> RowGradients:
        return self._sums()


_WORD_BYTES = 4
_MAX_REPLICAS = 1 << 31  # that a word can number


def check_numbered(counts: Sequence[int]) -> None:
    """Raise OperError if messages cannot number the replicas of a bucket."""
    if max(counts) > _MAX_REPLICAS:
        raise OperError(
            f"expected up to {_MAX_REPLICAS:,} replicas of one width for the allgather of "
            f"(id, row), got {max(counts):,}: make the plan with the bitmap method"
        )


class AllGather:
    """The numbers and gradients of all ranks.

    Messages consist of 4-byte words: for each bucket the numbers of the replicas, then their
    gradients. A rank's segment holds a table of row counts, [ranks, buckets], then its own message
    and those of its clients on other nodes (proxies.py).
    """

    def __init__(self, node: Node, proxies: Proxies, replicas: Replicas) -> None:
        self.read_bytes = 0
        self._node, self._proxies, self._replicas = node, proxies, replicas
        dims = replicas.dims
        check_numbered(replicas.counts)
        self._row_words = torch.tensor(dims) + 1
        self._groups = torch.tensor(replicas.groups)
        self._takes_part = torch.tensor(replicas.counts) > 0
        self._ranks_held_by = {peer: (peer, *proxies.clients_of(peer)) for peer in node.peers}
        self._start = 8 * node.ranks * len(dims)
        words = sum(n * (1 + dim) for n, dim in zip(replicas.counts, dims, strict=True))
        messages = max(map(len, self._ranks_held_by.values()))
        end = self._start + _WORD_BYTES * messages * words
        self._segments = node.share(Segment.create(self._start, end, "replicas"))
        shape = (node.ranks, len(dims))
        self._counts = {p: s.tensor(0, shape, torch.int64) for p, s in self._segments.items()}

    @property
    def shared_bytes(self) -> int:
        return self._segments[self._node.rank].bytes

    def mark(self, rows: SortedRows) -> None:
        self.read_bytes = 0

    def write(self, sums: RowGradients) -> None:
        counts = sums.groups[0].diff()[self._groups] * self._takes_part
        self._counts[self._node.rank][self._node.rank] = counts
        native.ops().pack_rows(
            sums.slots,
            sums.groups,
            sums.values,
            self._replicas.groups,
            self._replicas.slots,
            self._replicas.counts,
            self._replicas.dims,
            self._message(0, self._words(counts)),
        )

    def reduce(self) -> None:
        if not self._proxies.proxies:
            return
        proxies, clients = self._proxies.proxies, self._proxies.clients
        action, counts = "gather replicas' gradients", self._counts[self._node.rank]
        own = counts[self._node.rank]
        received = self._proxies.exchange(
            dict.fromkeys(proxies, own), dict.fromkeys(clients, len(own)), torch.int64, action
        )
        self._proxies.received_bytes = 0  # the counts' are not charged
        for r, theirs in received.items():
            counts[r] = theirs
        end = self._words(own)
        sizes = {r: self._words(counts[r]) for r in clients}
        theirs = self._message(end, sum(sizes.values()))
        self._proxies.exchange_into(
            theirs, dict.fromkeys(proxies, self._message(0, end)), sizes, action
        )

    def read(self) -> RowGradients:
        messages, counts = {}, {}
        for peer, ranks in self._ranks_held_by.items():
            begin = 0
            for r in ranks:
                counts[r] = self._counts[peer][r]
                size = self._words(counts[r])
                messages[r] = self._segments[peer].tensor(
                    self._start + _WORD_BYTES * begin, (size,), torch.float32
                )
                begin += size
            if peer != self._node.rank:
                self.read_bytes += _WORD_BYTES * begin
        merged = native.ops().merge_messages(
            [messages[r] for r in sorted(messages)],
            torch.stack([counts[r] for r in sorted(counts)]),
            self._replicas.slots,
            self._replicas.counts,
            self._replicas.dims,
        )
        return RowGradients(*merged)

    def _words(self, counts: torch.Tensor) -> int:
        return int(counts @ self._row_words)

    def _message(self, begin: int, size: int) -> torch.Tensor:
        """Return words [begin, begin + size) of this rank's messages, grown to hold them."""
        own, start = self._segments[self._node.rank], self._start + _WORD_BYTES * begin
        own.grow(start + _WORD_BYTES * size)
        return own.tensor(start, (size,), torch.float32)
