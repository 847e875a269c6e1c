"""The sparse AllReduce of the replicas' gradients, locally aggregated (OPER §5.3).

Rows with a copy on every rank are updated by every rank, with the sum of all ranks' gradients. Of R
replicas a rank touches u in a step, all P ranks together U. Three methods, of which the plan names
one, and what they let a rank read that another wrote (ring(x) = 2(P - 1)/P · x; gradients are
float32, so that a row is 4 · dim bytes):

    bitmap     P · R/8 + ring(U · row)   marks of touched replicas, united: equal bitmaps give equal
               numberings, in which all sum buffers of one row for each touched replica
               (sliced_sum.py)
    dense      ring(R · row)             the same with a row for every replica
    allgather  (P - 1) · u (row + 4)     everyone gets everyone's slots and rows, and merges them

A bucket's replicas are numbered in the order of their slots, among which those of other buckets
may lie. The sums are equal bit by bit on all ranks, and for all methods within one node. A rank's
own bitmap is counted, as by the formula; headers of a few numbers are not. Over several nodes each
rank's own figure depends on what it carries for its node (proxies.py); where every rank is a node,
all of the formula comes over the network.

Two counters of the engine's board order the ranks of a node: `marked`, which says that a rank has
done with the last step's sums and that its bitmap is written, and `reduced`; a third, `published`,
the engine posts between `contribute` and `reduce`, and waits for.
"""

import functools
from collections.abc import Sequence
from typing import Protocol

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.allreduce.sliced_sum import SlicedSum
from oper.runtime.comm.node import Node
from oper.runtime.comm.proxies import Proxies
from oper.runtime.comm.shared_segment import Segment
from oper.runtime.comm.signals import Signals

Tensors = list[torch.Tensor]
_FLOAT_BYTES = 4
_MOST_SLOTS = 1 << 31  # that the allgather sends as 4 bytes


class ReplicaReduce:
    """One engine's AllReduce. `buckets`: of each the slots of its replicas, int64, ascending, and
    its dim.

    All ranks of the group make it together, and go through begin, contribute, reduce and result
    once a step.
    """

    def __init__(
        self,
        method: str,
        node: Node,
        board: Signals,
        buckets: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        methods: dict[str, type[_Dense] | type[_AllGather]] = {
            "bitmap": _Bitmap,
            "dense": _Dense,
            "allgather": _AllGather,
        }
        self._board = board
        self._method: _Method | None = None
        self._partners: Proxies | None = None
        self._slots: Tensors = []
        self._grads: Tensors = []
        self._numberings = [_Numbering(replicas) for replicas, _ in buckets]
        self._numbers: Tensors = []
        if node.ranks == 1 or not any(len(replicas) for replicas, _ in buckets):
            return  # own gradients are the sums
        if method not in methods:
            raise OperError(
                f"the plan's AllReduce method is {method!r}, and it has replicas; "
                f"{', '.join(methods)} are known: make the plan again"
            )
        self._partners = Proxies(node)
        self._method = methods[method](
            node, self._partners, [(len(replicas), dim) for replicas, dim in buckets]
        )

    @property
    def bytes(self) -> int:
        """What this rank read in the last step that others wrote, as the methods are charged."""
        return 0 if self._method is None else self._method.read_bytes + self.network_bytes

    @property
    def network_bytes(self) -> int:
        """The part of `bytes` that came from other nodes."""
        return 0 if self._partners is None else self._partners.received_bytes

    @property
    def shared_bytes(self) -> int:
        """Of this rank's shared memory; it grows with what is touched in a step and is kept."""
        return 0 if self._method is None else self._method.shared_bytes

    def begin(self, step: int, slots: Tensors) -> None:
        """The replicas touched here, of each bucket: int64, ascending. The tensors that `result`
        gave in the last step are no longer used."""
        self._slots = slots
        if self._method is not None and self._partners is not None:
            self._method.read_bytes = self._partners.received_bytes = 0
            self._numbers = [n.numbers(s) for n, s in zip(self._numberings, slots, strict=True)]
            self._method.mark(self._numbers)
            self._board.post("marked", step)

    def contribute(self, step: int, grads: Tensors) -> None:
        """Their gradients, float32 [touched, dim], for the others to read when `published`."""
        self._grads = grads
        if self._method is not None:
            self._board.wait("marked", step, f"mark its replicas (step {step})")
            self._method.write(self._numbers, grads)

    def reduce(self, step: int) -> None:
        """Sum this rank's part, once all ranks of the node have published."""
        if self._method is not None:
            self._method.reduce()
            self._board.post("reduced", step)

    def result(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of each bucket the slots that any rank touched, ascending, and their summed gradients;
        they may lie in shared memory, and are to be used before the next `begin`."""
        if self._method is None:
            return list(zip(self._slots, self._grads, strict=True))
        self._board.wait("reduced", step, f"sum replicas' gradients (step {step})")
        sums = zip(self._numberings, self._method.read(), strict=True)
        return [(numbering.slots(numbers), grads) for numbering, (numbers, grads) in sums]


class _Numbering:
    """The replicas of a bucket, by number and by slot."""

    def __init__(self, slots: torch.Tensor) -> None:
        # Alone in its arena's first slots, as where a width has one bucket, they are their numbers.
        alone = not len(slots) or int(slots[-1]) == len(slots) - 1
        self._slots = None if alone else slots

    def numbers(self, slots: torch.Tensor) -> torch.Tensor:
        return slots if self._slots is None else torch.searchsorted(self._slots, slots)

    def slots(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers if self._slots is None else self._slots[numbers]


class _Method(Protocol):
    """The parts of a step, between which the ranks of the node wait for each other. Replicas are
    given by number."""

    read_bytes: int  # from memory that others of the node wrote

    @property
    def shared_bytes(self) -> int: ...

    def mark(self, slots: Tensors) -> None: ...
    def write(self, slots: Tensors, grads: Tensors) -> None: ...
    def reduce(self) -> None: ...
    def read(self) -> list[tuple[torch.Tensor, torch.Tensor]]: ...


class _Dense:
    """A row for every replica. The padding tells which rows nobody touched (aggregate.h)."""

    def __init__(self, node: Node, partners: Proxies, buckets: Sequence[tuple[int, int]]) -> None:
        self.read_bytes = 0
        self._rows = [replicas for replicas, _ in buckets]
        self._dims = [dim for _, dim in buckets]
        self._size = self._floats(self._rows)
        self._ring = SlicedSum(node, partners, self._header_bytes(), self._size)

    @property
    def shared_bytes(self) -> int:
        return self._ring.shared_bytes

    def mark(self, slots: Tensors) -> None:
        pass

    def write(self, slots: Tensors, grads: Tensors) -> None:
        native.ops().aggregate_rows(slots, grads, [], self._rows, self._ring.buffer(self._size))

    def reduce(self) -> None:
        self.read_bytes += self._ring.sum(self._size)

    def read(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        result = []
        for sums in self._sums(self._rows):
            slots = native.ops().touched_rows(sums)
            result.append((slots, sums if len(slots) == len(sums) else sums[slots]))
        return result

    def _header_bytes(self) -> int:
        return 0

    def _floats(self, rows: Sequence[int]) -> int:
        return sum(n * dim for n, dim in zip(rows, self._dims, strict=True))

    def _sums(self, rows: Sequence[int]) -> Tensors:
        """The sums of each bucket, [rows, dim]."""
        sizes = [n * dim for n, dim in zip(rows, self._dims, strict=True)]
        parts = self._ring.total(sum(sizes)).split(sizes)
        return [part.view(-1, dim) for part, dim in zip(parts, self._dims, strict=True)]


class _Bitmap(_Dense):
    """A row for every replica of the union, which bitmaps tell."""

    def __init__(self, node: Node, partners: Proxies, buckets: Sequence[tuple[int, int]]) -> None:
        super().__init__(node, partners, buckets)
        bitmaps = self._ring.headers([self._words()], torch.int64)
        self._bitmap, self._bitmaps = bitmaps[node.rank], list(bitmaps.values())
        self._partners = partners
        self._union: Tensors = []

    def mark(self, slots: Tensors) -> None:
        native.ops().mark_slots(slots, self._rows, self._bitmap)

    def write(self, slots: Tensors, grads: Tensors) -> None:
        bitmaps = self._bitmaps
        self.read_bytes += sum(bitmap.nbytes for bitmap in bitmaps)
        if self._partners.partners:
            of_node = functools.reduce(torch.bitwise_or, bitmaps)
            sizes = dict.fromkeys(self._partners.partners, len(of_node))
            to_wards = dict.fromkeys(self._partners.wards, of_node)
            received = self._partners.exchange(
                to_wards, sizes, torch.int64, "unite touched replicas"
            )
            bitmaps = [of_node, *received.values()]
        self._union = native.ops().unite_slots(bitmaps, self._rows)
        self._size = self._floats([len(s) for s in self._union])
        buffer = self._ring.buffer(self._size)
        native.ops().aggregate_rows(slots, grads, self._union, self._rows, buffer)

    def read(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        sums = self._sums([len(slots) for slots in self._union])
        return list(zip(self._union, sums, strict=True))

    def _header_bytes(self) -> int:
        return 8 * self._words()

    def _words(self) -> int:
        return sum(-(-replicas // 64) for replicas in self._rows)


class _AllGather:
    """Everyone's slots and rows, as messages of 4-byte words: for each bucket its slots, then its
    rows. A rank's segment holds its own message and, below it, those of its wards, after a table of
    how many rows of each bucket each has."""

    def __init__(self, node: Node, partners: Proxies, buckets: Sequence[tuple[int, int]]) -> None:
        self.read_bytes = 0
        self._node, self._partners = node, partners
        self._rows = [replicas for replicas, _ in buckets]
        self._dims = [dim for _, dim in buckets]
        if max(self._rows) > _MOST_SLOTS:
            raise OperError(
                f"{max(self._rows):,} replicas of one width, and the allgather of (id, row) takes "
                f"{_MOST_SLOTS:,}; make the plan with the bitmap method"
            )
        self._row_words = torch.tensor(self._dims) + 1
        self._held_by = {p: (p, *partners.wards_of(p)) for p in node.peers}
        self._start = 8 * node.ranks * len(buckets)
        words = sum(n * (1 + dim) for n, dim in buckets)
        most = max(map(len, self._held_by.values()))
        own = Segment.create(self._start, self._start + 4 * most * words, "replicas")
        self._segments = node.share(own)
        shape = (node.ranks, len(buckets))
        self._counts = {p: s.tensor(0, shape, torch.int64) for p, s in self._segments.items()}

    @property
    def shared_bytes(self) -> int:
        return self._segments[self._node.rank].bytes

    def mark(self, slots: Tensors) -> None:
        pass

    def write(self, slots: Tensors, grads: Tensors) -> None:
        counts = torch.tensor([len(s) for s in slots])
        self._counts[self._node.rank][self._node.rank] = counts
        native.ops().pack_rows(slots, grads, self._message(0, self._words(counts)))

    def reduce(self) -> None:
        if not self._partners.partners:
            return
        partners, wards = self._partners.partners, self._partners.wards
        doing, counts = "gather replicas' gradients", self._counts[self._node.rank]
        own = counts[self._node.rank]
        received = self._partners.exchange(
            dict.fromkeys(partners, own), dict.fromkeys(wards, len(own)), torch.int64, doing
        )
        self._partners.received_bytes = 0  # the counts' are not charged
        for r, theirs in received.items():
            counts[r] = theirs
        end = self._words(own)
        sizes = {r: self._words(counts[r]) for r in wards}
        messages = self._partners.exchange(
            dict.fromkeys(partners, self._message(0, end)), sizes, torch.float32, doing
        )
        for r, message in messages.items():
            self._message(end, sizes[r]).copy_(message)
            end += sizes[r]

    def read(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        messages, counts = {}, {}
        for peer, ranks in self._held_by.items():
            begin = 0
            for r in ranks:
                counts[r] = self._counts[peer][r]
                size = self._words(counts[r])
                messages[r] = self._segments[peer].tensor(
                    self._start + _FLOAT_BYTES * begin, (size,), torch.float32
                )
                begin += size
            if peer != self._node.rank:
                self.read_bytes += _FLOAT_BYTES * begin
        merged = native.ops().merge_messages(
            [messages[r] for r in sorted(messages)],
            torch.stack([counts[r] for r in sorted(counts)]),
            self._rows,
            self._dims,
        )
        return list(zip(*merged, strict=True))

    def _words(self, counts: torch.Tensor) -> int:
        return int(counts @ self._row_words)

    def _message(self, begin: int, size: int) -> torch.Tensor:
        """Words [begin, begin + size) of this rank's messages, grown to hold them."""
        own, start = self._segments[self._node.rank], self._start + _FLOAT_BYTES * begin
        own.grow(start + _FLOAT_BYTES * size)
        return own.tensor(start, (size,), torch.float32)
