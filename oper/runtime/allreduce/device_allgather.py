"""The AllGather of replicas' gradients on devices (OPER §5.3), with the bits of the processor's
sums (methods.py).

The memory of a rank that the others read holds its own message and the messages of its clients on
other nodes (proxies.py), one after another. It is replaced when it must grow
(gradient_segments.py):

    int64    [messages, 2, buckets + 1]  rows before each bucket of a message, and the values before
                                         its gradients
    float32  [values], int32 [rows]      gradients of a message's replicas, bucket after bucket
                                         without gaps, then their numbers

Within a node counts stay on the devices: a rank has room for a message of as many rows as its
batch has accesses, and for sums of as many rows as all ranks have accesses. Ranks copy the others'
numbers, and read each gradient of the others once, from the others' memory, while they sum. Between
nodes the host must know the number of words to send.
"""

from itertools import accumulate

import torch

from oper.cost.step_memory import LINE_VALUES, most_values, with_slack
from oper.runtime.allreduce.methods import Replicas, check_numbered
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.allreduce.rank_accesses import RankAccesses
from oper.runtime.comm.node import Node
from oper.runtime.comm.shared_segment import LINE_BYTES, aligned
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.gradient_segments import GradientSegments
from oper.runtime.memory.prepared_batch import SortedRows
from oper.runtime.tables.row_gradients import RowGradients

_WORD_BYTES = 4


class DeviceAllGather:
    """The numbers and gradients of all ranks, on the ranks' devices."""

    def __init__(self, node: Node, proxies: Proxies, device: Cuda, replicas: Replicas) -> None:
        check_numbered(replicas.counts)
        on = device.torch_device
        self._device, self._node, self._proxies = device, node, proxies
        self._replicas = replicas.on(on)
        counts, dims, buckets = replicas.counts, replicas.dims, len(replicas.counts)
        self._rows = sum(counts)
        self._most_words = sum(n * (1 + dim) for n, dim in zip(counts, dims, strict=True))
        self._most_values = most_values(self._rows, dims)
        groups = [g if n else -1 for n, g in zip(counts, replicas.groups, strict=True)]
        self._groups = torch.tensor(groups, device=on)
        self._dims = torch.tensor(dims, device=on)
        *first_words, self._bitmap_words = accumulate(replicas.words, initial=0)
        self._first_words = torch.tensor(first_words, device=on)
        # The places of the ranks' messages: the holder's position in the node, and the message's
        # number there.
        held = [(peer, *proxies.clients_of(peer)) for peer in node.peers]
        place = {r: (n, ranks.index(r)) for n, ranks in enumerate(held) for r in ranks}
        places = [place[r] for r in range(node.ranks)]
        self._holders = torch.tensor([holder for holder, _ in places], device=on)
        self._held_as = torch.tensor([held_as for _, held_as in places], device=on)
        self._headers = [max(map(len, held)), 2, buckets + 1]
        self._start = aligned(8 * self._headers[0] * 2 * (buckets + 1))
        self.segments = GradientSegments(node, device, self._start + LINE_BYTES)
        self._most_numbers = node.ranks * self._rows  # of all messages
        self._accesses = RankAccesses(node, device, self._most_numbers)
        self._own_accesses = 0
        self.read_bytes = torch.zeros(1, dtype=torch.int64, device=on)

    @property
    def shared_bytes(self) -> int:
        return self.segments.bytes

    def mark(self, rows: SortedRows) -> None:
        self._own_accesses = len(rows.slots)
        self.read_bytes = self._dims.new_zeros(1)

    def write(self, sums: RowGradients) -> None:
        replicas, rows = self._replicas, min(self._rows, self._own_accesses)
        words = min(rows * (1 + max(replicas.dims)), self._most_words)
        self._grow(words)
        self._device.ops().write_message(
            sums.slots,
            sums.groups,
            sums.values,
            self._groups,
            replicas.groups,
            replicas.slots,
            replicas.counts,
            self._dims,
            replicas.dims,
            self._own_headers[0],
            self._message(0, words),
            self._device.stream,
        )

    def reduce(self) -> None:
        received = self._receive() if self._proxies.proxies else 0
        self._accesses.say(self._own_accesses + received)

    def _receive(self) -> int:
        """Exchange messages with other nodes. Return the number of rows in the received
        messages."""
        proxies, clients = self._proxies.proxies, self._proxies.clients
        action, own = "gather replicas' gradients", self._own_headers[0].cpu()
        known = self._proxies.received_bytes  # headers are not charged
        headers = self._proxies.exchange_into(
            torch.empty(own.numel() * len(clients), dtype=torch.int64),
            dict.fromkeys(proxies, own.view(-1)),
            dict.fromkeys(clients, own.numel()),
            action,
        )
        self._proxies.received_bytes = known
        ends = {r: headers[r].view(own.shape)[:, -1] for r in clients}
        sizes, end = {r: int(of.sum()) for r, of in ends.items()}, int(own[:, -1].sum())
        message = self._message(0, end)
        if self._grow(end + sum(sizes.values())):
            # Nobody reads the old memory: the others read messages once all ranks have reduced.
            self._own_headers[0].copy_(self._device.send(own))
            self._message(0, end).copy_(message)
        if clients:
            of_clients = self._device.send(torch.cat([headers[r] for r in clients]))
            self._own_headers[1 : 1 + len(clients)] = of_clients.view(-1, *own.shape)
        received, sent = self._message(end, sum(sizes.values())), self._message(0, end)
        self._proxies.exchange_into(received, dict.fromkeys(proxies, sent), sizes, action)
        return sum(int(of[0]) for of in ends.values())

    def read(self) -> RowGradients:
        replicas, ops, stream = self._replicas, self._device.ops(), self._device.stream
        segments = [self._segment(peer) for peer in self._node.peers]
        held = (segments, self._start // _WORD_BYTES, self._holders)
        accesses = self._accesses.of_node()
        bitmap = self._device.new(self._bitmap_words, torch.int64)
        headers, begins, numbers = ops.take_numbers(
            *held,
            self._held_as,
            self._node.peers.index(self._node.rank),
            self._first_words,
            min(accesses, self._most_numbers),
            bitmap,
            self.read_bytes,
            stream,
        )
        rows = min(self._rows, accesses)
        counts, dims = replicas.counts, replicas.dims
        slots, groups = ops.unite_replicas([bitmap], replicas.slots, counts, dims, rows, stream)
        values = min(self._most_values, most_values(rows, dims))
        total = self._device.new(-(-values // LINE_VALUES) * LINE_VALUES, torch.float32)
        ops.add_messages(
            *held, headers, begins, numbers, replicas.slots, counts, dims, slots, groups, total,
            stream,
        )  # fmt: skip
        return RowGradients(slots, groups, total)

    def _segment(self, peer: int) -> torch.Tensor:
        """Return all of a rank's memory, as words of 8 bytes."""
        segment = self.segments.of_step(peer)
        return segment.tensor(0, [segment.reserve_bytes // 8], torch.int64)

    @property
    def _own_headers(self) -> torch.Tensor:
        """The headers of the messages that this rank holds, its own first."""
        return self.segments.mine.tensor(0, self._headers, torch.int64)

    def _message(self, begin: int, size: int) -> torch.Tensor:
        """Return words [begin, begin + size) of this rank's messages."""
        start = self._start + _WORD_BYTES * begin
        return self.segments.mine.tensor(start, [size], torch.float32)

    def _grow(self, words: int) -> bool:
        """Make room for so many words of messages. Return whether the memory was replaced: its
        content is then undefined."""
        needed = self._start + _WORD_BYTES * words
        if needed <= self.segments.bytes:
            return False
        most = self._headers[0] * self._most_words
        self.segments.grow(self._start + _WORD_BYTES * min(with_slack(words), most))
        return True
