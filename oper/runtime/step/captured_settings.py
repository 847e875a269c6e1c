"""The optimizers' settings of a captured step, in a device's memory.

Kernels take the settings as arguments, which stay as they were captured; but learning rates change,
and Adam's settings and random bits depend on the number of the step. So the kernels of a captured
step read the settings from memory, which the host fills before the step is run.
"""

from collections.abc import Sequence

import torch

from oper.base.errors import OperError
from oper.runtime.memory.device import Device
from oper.runtime.tables.optimizer_buckets import Bucket
from oper.runtime.tables.optimizers import Optimizer, packed_settings

_MOST_UPDATES = 16  # of a step; it has one, unless it trains several batches


class CapturedSettings:
    """The settings of all updates of one step of some buckets, the first of which is number
    `first`."""

    def __init__(self, buckets: Sequence[Bucket], device: Device, first: int) -> None:
        self._trained = {b: bucket.optimizer for b, bucket in enumerate(buckets) if bucket.trained}
        self._place = dict(zip(self._trained, range(len(buckets)), strict=False))
        self._counts_steps = any(of.counts_steps for of in self._trained.values())
        self._device, self._first = device, first
        # Made before the capture: memory allocated inside holds other tensors later in the step.
        words = len(packed_settings(Optimizer("sgd").settings(0.0, 1)))
        shape = (_MOST_UPDATES, len(self._trained), words)
        self._all = torch.zeros(shape, dtype=torch.int64, device=device.torch_device)
        self._updates = 0  # of the step
        self._ended = False  # whether learning rates were taken after one of them
        self._filled: tuple[object, ...] = ()

    def of(self, bucket: int, number: int) -> torch.Tensor:
        """Return the place of a bucket's settings for update `number` in the step that is
        captured."""
        later = number - self._first
        if self._ended and later >= self._updates:
            raise OperError(
                "a step was to be captured that takes the tables' learning rates between two of "
                "their updates, by step() or zero_grad() of their optimizer: call these before the "
                "first, or after the last"
            )
        if later >= _MOST_UPDATES:
            raise OperError(
                f"a step was to be captured that has more than {_MOST_UPDATES} updates of the "
                "tables: capture fewer batches at a time"
            )
        self._updates = max(self._updates, later + 1)
        return self._all[later, self._place[bucket]]

    def rates_are_used(self) -> bool:
        """Return whether there was an update. If so, let no other update follow."""
        self._ended = self._updates > 0
        return self._ended

    def fill(self, learning_rates: Sequence[float], first: int) -> None:
        """Write the settings of a step that is about to be run, given the learning rates of all
        buckets and the number of its first update. Work that was started before still finds its own
        settings."""
        now = (*learning_rates, first * self._counts_steps)
        if now == self._filled:
            return
        for later in range(self._updates):
            settings = self._settings(learning_rates, first + later)
            self._all[later].copy_(self._device.send(settings))
        self._filled = now

    def _settings(self, learning_rates: Sequence[float], number: int) -> torch.Tensor:
        return torch.stack(
            [
                packed_settings(optimizer.settings(learning_rates[b], number))
                for b, optimizer in self._trained.items()
            ]
        )
