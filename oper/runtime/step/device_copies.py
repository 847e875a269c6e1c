"""Copies on a device of what the host says of batches, which mostly is the same from one to the
next."""

from typing import Any

import torch

from oper.base.errors import OperError
from oper.runtime.memory.device import Device

_KEPT = 8  # copies: of the batches of a few shapes


class DeviceCopies:
    """Copies of small tensors of the host, those of the last few of which are kept."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Each tensor with its copy, and the device's point after that.
        self._kept: list[tuple[torch.Tensor, torch.Tensor, Any]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor, which is not written to any more. What is started on this
        thread's stream comes after it was copied, on whichever stream that was. OperError in a
        step that is captured, if nothing like it was seen before."""
        there, copied = self._known(tensor)
        capture = self._device.capture
        if capture is not None:
            if there is None:
                raise OperError(
                    "a step is captured, and its batches are of other shapes than those of the "
                    "steps before: give the step batches of one shape"
                )
            capture.keep(there)
            return there
        if there is None:
            there = self._device.send(tensor)
            kept = (tensor, there, self._device.point())
            self._kept = [kept, *self._kept[: _KEPT - 1]]
            return there
        self._device.after([copied])
        self._device.keep([there])
        return there

    def _known(self, tensor: torch.Tensor) -> tuple[torch.Tensor | None, Any]:
        for known, there, copied in self._kept:
            if known is tensor or torch.equal(known, tensor):
                return there, copied
        return None, None
