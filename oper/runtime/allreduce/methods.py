"""The three methods of the replicas' AllReduce (OPER §5.3).

    Dense      every rank sums a gradient of every replica, touched or not
    Bitmap     bitmaps of touched replicas are united, and only those replicas summed: equal bitmaps
               give equal numberings of the touched replicas, so that the ranks' buffers have the
               same rows in the same places
    AllGather  every rank receives the numbers and gradients of all ranks' touched replicas, and
               sums them itself

The first two sum buffers of equal size over all ranks (SlicedSum).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.cost.step_memory import LINE_VALUES
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients


@dataclass(frozen=True)
class Replicas:
    """The replicas of each bucket, as the operators take them. They are numbered in the order of
    their slots."""

    slots: Sequence[torch.Tensor]  # int64 ascending; empty where number n is slot n
    counts: Sequence[int]
    dims: Sequence[int]
    groups: Sequence[int]  # which of a rank's groups are theirs; a bucket of none has no say

    @property
    def rows(self) -> RowGradients:
        """All of them, a bucket each group; without gradients."""
        slots = [
            torch.arange(count) if count > len(given) else given
            for given, count in zip(self.slots, self.counts, strict=True)
        ]
        sizes = [n * dim for n, dim in zip(self.counts, self.dims, strict=True)]
        groups = torch.tensor([[0, *self.counts], [0, *sizes]]).cumsum(1)
        return RowGradients(torch.cat(slots), groups, torch.empty(0))


class Method(Protocol):
    """The parts of a step, between which the ranks of the node wait for each other."""

    @property
    def read_bytes(self) -> int | torch.Tensor:
        """Read in this step from memory that other ranks of the node wrote; on a device int64 [1]
        there."""

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
        """The replicas that any rank touched and their sums, a bucket each group, once all ranks of
        the node have reduced."""


class SlicedSum:
    """The sum over all ranks of buffers of equal size, bit-equal on all of them.

    The buffer is cut into one slice a rank. Over shared memory a rank adds up its slice of all
    ranks' buffers, in the order of ranks, into one buffer that all ranks of the node read. That
    moves as many bytes as a ring AllReduce, 2(P - 1)/P of the buffer for each of P ranks, in one
    hop instead of 2(P - 1). Between nodes (proxies.py) the slice's rank receives one sum from each
    node, adds these in the order of the nodes, and sends the result back to one rank in each.

    Call `buffer(n)` and write there; when all ranks of the node have, `sum(n)`; when all have,
    `total(n)`. Buffers are float32, of up to `most` elements, after `header_bytes` that are the
    caller's own.
    """

    def __init__(self, node: Node, proxies: Proxies, header_bytes: int, most: int) -> None:
        self._node, self._proxies, self._most = node, proxies, most
        self._start = -(-header_bytes // (4 * LINE_VALUES)) * 4 * LINE_VALUES
        own = Segment.create(self._start, self._start + 4 * most, "replicas")
        self._segments = node.share(own)
        # Each rank brings a segment, and all use the first one's; untouched, the others are free.
        self._total_segment = node.share(Segment.create(0, 4 * most, "replicas-sum"))[node.peers[0]]
        self._capacity = 0
        self._buffers: list[torch.Tensor] = []
        self._total = torch.empty(0)

    @property
    def shared_bytes(self) -> int:
        """Bytes of the shared memory that this rank brought and all use."""
        total = self._total_segment.bytes if self._node.rank == self._node.peers[0] else 0
        return self._segments[self._node.rank].bytes + total

    def headers(self, shape: list[int], dtype: torch.dtype) -> dict[int, torch.Tensor]:
        """The header of every rank of the node."""
        return {peer: s.tensor(0, shape, dtype) for peer, s in self._segments.items()}

    def buffer(self, size: int) -> torch.Tensor:
        """Where this rank writes its `size` elements, the same number on all ranks."""
        if size > self._capacity:
            # Every rank of the node computes the same capacity, and touches what others have grown
            # after they have signalled that.
            self._capacity = min(size + size // 4, self._most)
            self._segments[self._node.rank].grow(self._start + 4 * self._capacity)
            if self._node.rank == self._node.peers[0]:
                self._total_segment.grow(4 * self._capacity)
            self._buffers = []
        return self._segments[self._node.rank].tensor(self._start, (size,), torch.float32)

    def sum(self, size: int) -> int:
        """Sum this rank's slice. Returns the bytes read here, by the time the total is, that others
        of the node wrote."""
        if not self._buffers:
            shape = (self._capacity,)
            self._buffers = [
                s.tensor(self._start, shape, torch.float32) for s in self._segments.values()
            ]
            self._total = self._total_segment.tensor(0, shape, torch.float32)
        if size == 0:
            return 0
        # Slices begin at lines: else two ranks would write to one.
        step = -(-size // (LINE_VALUES * self._node.ranks)) * LINE_VALUES
        cuts = [min(step * r, size) for r in range(self._node.ranks + 1)]
        mine = self._total[cuts[self._node.rank] : cuts[self._node.rank + 1]]
        written = len(mine)
        if not self._proxies.proxies:
            self._sum_node(cuts, self._node.rank, mine)
        else:
            written += self._sum_nodes(cuts, mine)
        others = len(self._buffers) - 1
        return 4 * (others * written + size - written)

    def total(self, size: int) -> torch.Tensor:
        """The sum, until the next one is written."""
        return self._total[:size]

    def _sum_node(self, cuts: list[int], rank: int, out: torch.Tensor) -> None:
        """This node's sum of the slice of a rank."""
        first, last = cuts[rank], cuts[rank + 1]
        native.ops().sum_buffers([buffer[first:last] for buffer in self._buffers], out)

    def _sum_nodes(self, cuts: list[int], mine: torch.Tensor) -> int:
        """Sum this rank's slice over all nodes, and its clients' slices over this node; returns the
        size of the latter."""
        proxies, clients, action = self._proxies.proxies, self._proxies.clients, "sum replicas"
        sizes = {r: cuts[r + 1] - cuts[r] for r in clients}
        sums = {r: torch.empty(n) for r, n in sizes.items()}
        for r, out in sums.items():
            self._sum_node(cuts, r, out)
        received = self._proxies.exchange(
            sums, dict.fromkeys(proxies, len(mine)), mine.dtype, action
        )
        received[self._node.rank] = torch.empty(len(mine))
        self._sum_node(cuts, self._node.rank, received[self._node.rank])
        in_order = [
            received[r] for members in self._proxies.nodes for r in members if r in received
        ]
        native.ops().sum_buffers(in_order, mine)
        received = self._proxies.exchange(dict.fromkeys(proxies, mine), sizes, mine.dtype, action)
        for r, part in received.items():
            self._total[cuts[r] : cuts[r + 1]] = part
        return sum(sizes.values())


class Dense:
    """A gradient of every replica. Untouched ones are told by their padding (gradient_buffers.h).

    `header_bytes` are kept free before the gradients.
    """

    def __init__(
        self, node: Node, proxies: Proxies, replicas: Replicas, header_bytes: int = 0
    ) -> None:
        self.read_bytes = 0
        self._replicas, self._rows = replicas, replicas.rows
        self._sum = SlicedSum(node, proxies, header_bytes, self._size)

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
        found, dims = self._sums(), self._replicas.dims
        touched = native.ops().touched_rows(found.groups, found.values, dims)
        if len(touched) == len(found.slots):
            return found
        taken = native.ops().take_rows(found.slots, found.groups, found.values, touched, dims)
        return RowGradients(*taken)

    @property
    def _size(self) -> int:
        """Elements of the buffers."""
        return int(self._rows.groups[1, -1])

    def _sums(self) -> RowGradients:
        """The rows of the buffers, and their sums."""
        return RowGradients(self._rows.slots, self._rows.groups, self._sum.total(self._size))


class Bitmap(Dense):
    """A gradient of every replica that any rank touched."""

    def __init__(self, node: Node, proxies: Proxies, replicas: Replicas) -> None:
        words = sum(-(-n // 64) for n in replicas.counts)
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


class AllGather:
    """The numbers and gradients of all ranks.

    Messages are of 4-byte words: for each bucket the numbers of the replicas, then their gradients.
    A rank's segment holds a table of how many rows of each bucket each rank has, [ranks, buckets],
    then its own message and those of its clients on other nodes (proxies.py).
    """

    def __init__(self, node: Node, proxies: Proxies, replicas: Replicas) -> None:
        self.read_bytes = 0
        self._node, self._proxies, self._replicas = node, proxies, replicas
        most, dims = max(replicas.counts), replicas.dims
        if most > _MAX_REPLICAS:
            raise OperError(
                f"{most:,} replicas of one width, and the allgather of (id, row) takes "
                f"{_MAX_REPLICAS:,}; make the plan with the bitmap method"
            )
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
        messages = self._proxies.exchange(
            dict.fromkeys(proxies, self._message(0, end)), sizes, torch.float32, action
        )
        for r, message in messages.items():
            self._message(end, sizes[r]).copy_(message)
            end += sizes[r]

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
        """Words [begin, begin + size) of this rank's messages, grown to hold them."""
        own, start = self._segments[self._node.rank], self._start + _WORD_BYTES * begin
        own.grow(start + _WORD_BYTES * size)
        return own.tensor(start, (size,), torch.float32)
