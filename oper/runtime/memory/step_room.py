"""Errors of a device without memory for a step: the bytes that it lacks, and the memory that a step
takes (oper/cost/step_memory.py)."""

from collections.abc import Sequence

import torch

from oper.base.errors import OperError, first_line
from oper.base.spoken import option
from oper.cost.step_memory import DeviceStep, mailbox_row_bytes
from oper.runtime.comm.shared_segment import DeviceSegment
from oper.runtime.memory.device import Cuda


class NoRoomError(OperError):
    """A device has less memory left than a step needs of it."""


def device_segment(device: Cuda, what: str, bytes: int) -> DeviceSegment:
    """Return memory of a device for `what`, to be shared with the node's other ranks; its content
    is undefined. Raise OperError while a step is captured."""
    if device.capture is not None:
        raise OperError(
            f"expected a step that needs no new memory while it is captured, got one that needs "
            f"{bytes:,} bytes for {what}: after rows have moved, or for a larger batch, call the "
            "step as it is before it is captured"
        )
    for left in device.free_memory():
        if bytes > left.free_bytes:
            raise NoRoomError(
                f"{what}: expected {bytes:,} free bytes, got {left.free_bytes:,} of "
                f"{left.limited_by}"
            )
    return DeviceSegment.create(bytes, device.torch_device)


# Errors of a step for which memory is short: shared memory, and torch's.
NO_ROOM = (NoRoomError, torch.OutOfMemoryError)


class StepRoom:
    """The steps of an engine whose rows have up to `dims` values."""

    def __init__(
        self,
        dims: Sequence[int],
        ranks: int,
        training: bool,
        sends: bool = False,
        fetched_row_bytes: int = 0,
    ) -> None:
        """`sends`: rows of other nodes, or their gradients, travel in messages.
        `fetched_row_bytes`: see DeviceStep."""
        self._dim, self._ranks, self._training = max(dims, default=0), ranks, training
        self._sends, self._fetched_row_bytes = sends, fetched_row_bytes

    def error(self, error: Exception, accesses: int) -> OperError:
        """Return the error of a batch of so many accesses for which there was no room."""
        sent = accesses * mailbox_row_bytes(self._dim) if self._sends else 0.0
        step = DeviceStep(
            accesses,
            self._dim,
            self._ranks,
            self._training,
            fetched_row_bytes=self._fetched_row_bytes,
            sent_bytes=sent,
        )
        return NoRoomError(
            f"{first_line(error)}; a step of {accesses:,} accesses takes up to "
            f"{round(step.batch_bytes):,} bytes of a device beside rows, replicas' sums and the "
            f"model: make batches smaller, plan with a larger {option('--reserve')}, or for more "
            "ranks"
        )
