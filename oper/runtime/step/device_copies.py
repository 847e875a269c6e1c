"""Copies on a device of what the host says of batches, which mostly is the same from one to the
next."""

import torch

from oper.base.errors import OperError
from oper.runtime.memory.device import Device

_KEPT = 8  # copies: of the batches of a few shapes


class DeviceCopies:
    """Copies of small tensors of the host, those of the last few of which are kept."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """One of a tensor, which is not written to any more. OperError in a step that is captured,
        where nothing like it was seen before."""
        there = self._known(tensor)
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
            self._kept = [(tensor, there), *self._kept[: _KEPT - 1]]
        return there

    def _known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        for known, there in self._kept:
            if known is tensor or torch.equal(known, tensor):
                return there
        return None
