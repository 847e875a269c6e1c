"""Messages about rows between ranks of several nodes: their layout, senders and receivers.

A rank gets one message for all widths together, because messages take most of the time on a
network. The number of rows of each bucket goes first; a message of gradients then has the slots of
the rows, and after them the gradients, bucket after bucket.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import Ints
from oper.runtime.allreduce.proxies import Proxies
from oper.runtime.fetch_paths.device_messages import DeviceMessages
from oper.runtime.memory.device import Cuda, Device
from oper.runtime.tables.row_gradients import RowGradients

_WORD_BYTES = 8  # the length of a message of gradients is a multiple


class Messages(Protocol):
    """Messages of gradients, in the memory of one kind of device, which all ranks that exchange
    messages have."""

    def summed(
        self, parts: Sequence[RowGradients], groups: Sequence[int], dims: Sequence[int]
    ) -> tuple[Ints, torch.Tensor]:
        """Return the number of rows of some groups of the parts, [groups], and messages with the
        sum of each row's gradients in the order of the parts; a message has a group for each of
        these dims."""

    def bytes(self, counts: Ints, dims: Sequence[int]) -> Ints:
        """Return the bytes of messages with so many rows of each bucket, [messages, buckets]."""

    def read(self, message: torch.Tensor, counts: Ints, dims: Sequence[int]) -> RowGradients:
        """Return the gradients of a message, a group for each bucket: so many rows of each, of
        these dims."""


class HostMessages:
    """Messages in the host's memory: all slots, then all gradients."""

    def summed(
        self, parts: Sequence[RowGradients], groups: Sequence[int], dims: Sequence[int]
    ) -> tuple[Ints, torch.Tensor]:
        """See Messages."""
        rows, messages = native.ops().relay_gradients(
            [part.slots for part in parts],
            [part.values for part in parts],
            [part.groups for part in parts],
            list(groups),
            list(dims),
        )
        return rows.numpy(), messages

    def bytes(self, counts: Ints, dims: Sequence[int]) -> Ints:
        """See Messages."""
        units: Ints = -(-(counts @ (8 + 4 * np.array(dims, dtype=np.int64))) // _WORD_BYTES)
        return units * _WORD_BYTES

    def read(self, message: torch.Tensor, counts: Ints, dims: Sequence[int]) -> RowGradients:
        """See Messages."""
        ends = np.zeros((2, len(dims) + 1), dtype=np.int64)
        ends[:, 1:] = np.cumsum([counts, counts * dims], axis=1)
        slot_bytes = 8 * int(ends[0, -1])
        slots, values = message.split([slot_bytes, len(message) - slot_bytes])
        groups = torch.from_numpy(ends)
        return RowGradients(slots.view(torch.int64), groups, values.view(torch.float32))


class Routes:
    """Messages about rows between this rank and those that it asks, its `owners`, and those that
    ask it, its `askers`, both ascending. All ranks of the group make each call together."""

    def __init__(
        self, proxies: Proxies, owners: Sequence[int], askers: Sequence[int], device: Device
    ) -> None:
        self._proxies, self.owners, self.askers = proxies, owners, askers
        self._device = device
        self._rank = proxies.rank
        self._others = sorted({rank for of in proxies.nodes for rank in of} - {proxies.rank})
        self.digests: Ints | None = None  # of all ranks; they go with the numbers of gradients
        self.messages: Messages = HostMessages()
        if isinstance(device, Cuda):
            self.messages = DeviceMessages(device)

    def send_gradients(
        self, parts: Sequence[RowGradients], groups: Sequence[int], dims: Sequence[int], action: str
    ) -> tuple[Ints, dict[int, RowGradients]]:
        """Send each owner the gradients of some rows, summed over the parts in their order: owner
        by owner, one of the `groups` of the parts for each bucket, of such a dim. Return the rows
        sent, [owners, buckets], and the gradients of each asker, a group for each bucket. Errors
        name the `action` for which ranks waited."""
        rows, messages = self.messages.summed(parts, groups, dims)
        counts = rows.reshape(-1, len(dims))
        return counts, self.exchange_gradients(counts, messages, dims, action)

    def exchange_gradients(
        self, counts: Ints, messages: torch.Tensor, dims: Sequence[int], action: str
    ) -> dict[int, RowGradients]:
        """Send each owner its message, with so many rows of each bucket, [owners, buckets], and
        return the gradients of each asker."""
        swap = self.swap_counts if self.digests is None else self._swap_counts_and_digests
        asked = swap(counts, action)
        sizes = self.messages.bytes(asked, dims)
        came = self._device.new(int(sizes.sum()), torch.uint8)
        self.to_owners(messages, self.messages.bytes(counts, dims), came, sizes, action)
        of_askers = zip(self.askers, came.split(sizes.tolist()), asked, strict=True)
        return {asker: self.messages.read(message, of, dims) for asker, message, of in of_askers}

    def swap_counts(self, counts: Ints, action: str) -> Ints:
        """Tell owners their counts, [owners, buckets]; return the askers', [askers, buckets]."""
        buckets = counts.shape[1]
        theirs = np.empty((len(self.askers), buckets), dtype=np.int64)
        sizes, incoming = (np.full(len(part), buckets) for part in (counts, theirs))
        outgoing = torch.from_numpy(counts).reshape(-1)
        self.to_owners(outgoing, sizes, torch.from_numpy(theirs).view(-1), incoming, action)
        return theirs

    def _swap_counts_and_digests(self, counts: Ints, action: str) -> Ints:
        """Swap counts, and tell every rank this rank's digest: gloo has a message for each rank
        anyway."""
        assert self.digests is not None
        mine, buckets = self.digests[self._rank : self._rank + 1], counts.shape[1]
        parts = dict.fromkeys(self._others, mine)
        for owner, of_owner in zip(self.owners, counts, strict=True):
            parts[owner] = np.concatenate([mine, of_owner])
        sizes = {rank: 1 + buckets * (rank in self.askers) for rank in self._others}
        outgoing = torch.from_numpy(np.concatenate([parts[rank] for rank in self._others]))
        outgoing_sizes = {rank: len(part) for rank, part in parts.items()}
        # On the host, wherever rows are.
        incoming = torch.empty(sum(sizes.values()), dtype=torch.int64)
        came = self._proxies.start(outgoing, outgoing_sizes, incoming, sizes, action)()
        for rank, part in came.items():
            self.digests[rank] = int(part[0])
        theirs = [came[asker][1:].numpy() for asker in self.askers]
        return np.array(theirs, dtype=np.int64).reshape(len(theirs), buckets)

    def to_owners(
        self, outgoing: torch.Tensor, sizes: Ints, incoming: torch.Tensor, theirs: Ints, action: str
    ) -> None:
        """Send each owner so much of the outgoing tensor, and receive `theirs` of each asker."""
        sent = dict(zip(self.owners, sizes.tolist(), strict=True))
        came = dict(zip(self.askers, theirs.tolist(), strict=True))
        self._proxies.start(outgoing, sent, incoming, came, action)()
