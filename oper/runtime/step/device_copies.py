"""Copies on a device of the host's tensors of batches, which are mostly equal from one batch to the
next."""

from typing import Any

import torch

from oper.base.errors import OperError
from oper.runtime.memory.device import Device

_KEPT = 8  # copies: of the batches of a few shapes


class DeviceCopies:
    """Copies of small tensors of the host; the last few are kept."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Each tensor with its copy, and the device's point after that.
        self._kept: list[tuple[torch.Tensor, torch.Tensor, Any]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor, which is not written to any more. Later work on this
        thread's stream comes after the copy, whichever stream made it. Raise OperError in a step
        that is captured, if no equal tensor was seen before."""
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
