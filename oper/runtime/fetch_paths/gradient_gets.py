"""Gradients of rows of other nodes, which their owners bring by NVSHMEM's gets (§5: one-sided).

A rank leaves its gradients for all owners of other nodes in its OUTBOX, in symmetric memory, one
message after another (device_messages.py). Nothing orders a get after the write that it reads, so
the hosts do, by two exchanges of all ranks:

    told      each rank knows the number of gradients that others have for it, and their places; and
              outboxes are as long as the longest needs: all ranks replace them together
    written   all outboxes are written, and lookups have read their rows (kernel_gets.py)

Then kernels bring the messages. Outboxes are written again in the next step, before which all ranks
have said that they updated their rows.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from oper.base.arrays import Ints
from oper.runtime.comm.node import Node
from oper.runtime.fetch_paths.device_messages import DeviceMessages
from oper.runtime.memory.device import Cuda
from oper.runtime.memory.symmetric_memory import SymmetricMemory
from oper.runtime.tables.row_gradients import RowGradients

# The bytes that one warp gets at once: enough to use a network well, and few enough that many warps
# have something to get. Not measured on any network.
PIECE_BYTES = 1 << 16


class GradientGets:
    """The messages of gradients between this rank and those of other nodes, its `others`,
    ascending. All ranks of the group call each of these together."""

    def __init__(
        self, node: Node, symmetric: SymmetricMemory, others: Sequence[int], device: Cuda
    ) -> None:
        self._node, self._symmetric, self._others = node, symmetric, list(others)
        self._device = device
        self._messages = DeviceMessages(device)

    def offer_gradients(
        self, parts: Sequence[RowGradients], groups: Sequence[int], dims: Sequence[int], action: str
    ) -> tuple[Ints, Callable[[], dict[int, RowGradients]]]:
        """Leave the gradients of some rows for their owners: groups of the parts, owner by owner,
        summed over the parts in their order. Return the rows for each owner, [others, buckets], and
        a function that brings the gradients of this rank's rows, by the rank that left them. It may
        be called once all ranks have left theirs, and their devices have done so."""
        rows, messages = self._messages.summed(parts, groups, dims)
        counts = rows.reshape(-1, len(dims))
        sizes = self._messages.bytes(counts, dims)
        told = np.zeros((self._node.ranks, 2 + len(dims)), dtype=np.int64)
        told[:, 0] = sizes.sum()
        told[self._others, 1] = sizes.cumsum() - sizes
        told[self._others, 2:] = counts
        given, theirs = torch.from_numpy(told), torch.empty(told.shape, dtype=torch.int64)
        assert self._node.group is not None
        self._node.group.run(dist.all_to_all_single, theirs, given, action=action)
        outbox = self._symmetric.outbox(int(theirs[:, 0].max()))
        outbox[: len(messages)].copy_(messages)
        of_others = theirs.numpy()[self._others]
        return counts, partial(self._bring, outbox, of_others[:, 1], of_others[:, 2:], dims)

    def _bring(
        self, outbox: torch.Tensor, begins: Ints, counts: Ints, dims: Sequence[int]
    ) -> dict[int, RowGradients]:
        sizes = self._messages.bytes(counts, dims)
        pieces = torch.from_numpy(pieces_of(self._others, begins, sizes))
        with self._symmetric.reading():
            inbox = self._symmetric.inbox.of(int(sizes.sum()))
            there = pieces.to(inbox.device, non_blocking=True)
            self._device.ops().get_pieces(there, outbox, inbox, self._device.stream)
        came = inbox[: int(sizes.sum())].split(sizes.tolist())
        return {
            rank: self._messages.read(message, of_message, dims)
            for rank, message, of_message in zip(self._others, came, counts, strict=True)
        }


def pieces_of(ranks: Sequence[int], begins: Ints, sizes: Ints) -> Ints:
    """Return the pieces of ranks' messages, int64 [pieces, 4]: rank, begin there, begin here,
    bytes. Messages begin at `begins` there, and come here one after another."""
    numbers = -(-sizes // PIECE_BYTES)
    message = np.repeat(np.arange(len(sizes)), numbers)
    inside = PIECE_BYTES * (np.arange(numbers.sum()) - (numbers.cumsum() - numbers)[message])
    here = (sizes.cumsum() - sizes)[message] + inside
    bytes = np.minimum(sizes[message] - inside, PIECE_BYTES)
    sender = np.asarray(ranks, dtype=np.int64)[message]
    return np.stack([sender, begins[message] + inside, here, bytes], axis=1)
