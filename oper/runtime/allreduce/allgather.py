"""The AllGather of (id, row): every rank receives all touched replicas of all ranks, and sums them.

Messages are of 4-byte words: for each bucket the numbers of the replicas, then their gradients. A
rank's segment holds a table of how many rows of each bucket each rank has, [ranks, buckets], then
its own message and those of its clients on other nodes (node_representatives.py).
"""

from collections.abc import Sequence

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.runtime.allreduce.method import Tensors
from oper.runtime.allreduce.node_representatives import Proxies
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import Segment
from oper.runtime.tables.row_gradients import RowGradients

_WORD_BYTES = 4
_MAX_REPLICAS = 1 << 31  # that a word can number


class AllGather:
    """Numbers and gradients of all ranks. `replicas` and `dims` are those of each bucket."""

    def __init__(
        self, node: Node, proxies: Proxies, replicas: Sequence[int], dims: Sequence[int]
    ) -> None:
        self.read_bytes = 0
        self._node, self._proxies = node, proxies
        self._replicas, self._dims = list(replicas), list(dims)
        if max(replicas) > _MAX_REPLICAS:
            raise OperError(
                f"{max(replicas):,} replicas of one width, and the allgather of (id, row) takes "
                f"{_MAX_REPLICAS:,}; make the plan with the bitmap method"
            )
        self._row_words = torch.tensor(self._dims) + 1
        self._ranks_held_by = {peer: (peer, *proxies.clients_of(peer)) for peer in node.peers}
        self._start = 8 * node.ranks * len(self._dims)
        words = sum(n * (1 + dim) for n, dim in zip(replicas, dims, strict=True))
        most = max(map(len, self._ranks_held_by.values()))
        own = Segment.create(self._start, self._start + _WORD_BYTES * most * words, "replicas")
        self._segments = node.share(own)
        shape = (node.ranks, len(self._dims))
        self._counts = {p: s.tensor(0, shape, torch.int64) for p, s in self._segments.items()}

    @property
    def shared_bytes(self) -> int:
        return self._segments[self._node.rank].bytes

    def mark(self, numbers: Tensors) -> None:
        pass

    def write(self, numbers: Tensors, grads: Tensors) -> None:
        counts = torch.tensor([len(touched) for touched in numbers])
        self._counts[self._node.rank][self._node.rank] = counts
        native.ops().pack_rows(numbers, grads, self._message(0, self._words(counts)))

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

    def read(self) -> list[RowGradients]:
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
            self._replicas,
            self._dims,
        )
        return [RowGradients(*part) for part in zip(*merged, strict=True)]

    def _words(self, counts: torch.Tensor) -> int:
        return int(counts @ self._row_words)

    def _message(self, begin: int, size: int) -> torch.Tensor:
        """Words [begin, begin + size) of this rank's messages, grown to hold them."""
        own, start = self._segments[self._node.rank], self._start + _WORD_BYTES * begin
        own.grow(start + _WORD_BYTES * size)
        return own.tensor(start, (size,), torch.float32)
