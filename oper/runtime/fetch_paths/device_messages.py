"""Messages of gradients between nodes, made and read on a device (row_messages.py).

Slots, and then the gradients of each bucket, begin at cache lines, because the kernels read
gradients by words of 16 bytes. The number of rows comes to the host, because the network must be
told the length of a message, which is that of its content.
"""

from collections.abc import Sequence

import numpy as np
import torch

from oper.base import native
from oper.base.arrays import Ints
from oper.cost.step_memory import LINE_VALUES
from oper.runtime.comm.shared_segment import LINE_BYTES
from oper.runtime.memory.device import Cuda
from oper.runtime.tables.row_gradients import (
    Piece,
    RowGradients,
    groups_on_host,
    laid_out_on_host,
    merged,
)

_MOST_GROUPS = native.shared("buckets of a device's step", 960)  # that are laid out at once


class DeviceMessages:
    """Messages in a device's memory."""

    def __init__(self, device: Cuda) -> None:
        self._device = device

    def summed(
        self, parts: Sequence[RowGradients], groups: Sequence[int], dims: Sequence[int]
    ) -> tuple[Ints, torch.Tensor]:
        """See Messages."""
        most = _MOST_GROUPS // len(dims) * len(dims)
        made = [
            self._messages(parts, groups[first : first + most], dims)
            for first in range(0, max(len(groups), 1), most)
        ]
        counts, messages = zip(*made, strict=True)
        return np.concatenate(counts), torch.cat(messages)

    def _messages(
        self, parts: Sequence[RowGradients], groups: Sequence[int], dims: Sequence[int]
    ) -> tuple[Ints, torch.Tensor]:
        """Return rows and messages of as many groups as are merged at once."""
        each = [*dims] * (len(groups) // len(dims))
        of_parts = [
            [part.piece(g, dim, at) for g, dim in zip(groups, each, strict=True)]
            for part, at in zip(parts, groups_on_host(parts), strict=True)
        ]
        pieces = of_parts[0] if len(parts) == 1 else self._merged(of_parts, each)
        nothing = torch.zeros(LINE_BYTES, dtype=torch.uint8, device=self._device.torch_device)
        made = [nothing[:0]]
        for first in range(0, len(groups), len(dims)):
            message = pieces[first : first + len(dims)]
            slots = [slots.view(torch.uint8) for slots, _ in message]
            made += [*slots, nothing[: -sum(map(len, slots)) % LINE_BYTES]]
            for _, gradients in message:
                made += [gradients.reshape(-1).view(torch.uint8)]
                made += [nothing[: -gradients.nbytes % LINE_BYTES]]
        return np.array([len(slots) for slots, _ in pieces], dtype=np.int64), torch.cat(made)

    def _merged(self, of_parts: Sequence[Sequence[Piece]], each: Sequence[int]) -> list[Piece]:
        """Return the rows of each group in any of the parts, with the sums of their gradients."""
        device = self._device
        place = device.torch_device
        chosen = [RowGradients.of_pieces(pieces, each, place) for pieces in of_parts]
        sums = merged(chosen, each, device)
        (groups,) = groups_on_host([sums])
        return [sums.piece(group, dim, groups) for group, dim in enumerate(each)]

    def bytes(self, counts: Ints, dims: Sequence[int]) -> Ints:
        """See Messages."""
        lines = _lines(8 * counts.sum(axis=1), LINE_BYTES)
        for n, dim in enumerate(dims):
            lines = lines + _lines(counts[:, n] * dim, LINE_VALUES)
        return LINE_BYTES * lines

    def read(self, message: torch.Tensor, counts: Ints, dims: Sequence[int]) -> RowGradients:
        """See Messages."""
        before = torch.from_numpy(np.concatenate([[0], counts]).cumsum())
        groups = self._device.send(laid_out_on_host(before, dims))
        rows = int(before[-1])
        values_at = LINE_BYTES * int(_lines(np.array(8 * rows), LINE_BYTES))
        return RowGradients(
            message[: 8 * rows].view(torch.int64), groups, message[values_at:].view(torch.float32)
        )


def _lines(sizes: Ints, unit: int) -> Ints:
    """Return the number of lines of `unit` each that hold so much."""
    lines: Ints = -(-sizes // unit)
    return lines
