"""Fixed rows: the rows of an engine for inference, which no gradient changes."""

import torch

from oper.runtime.memory.heap import Heap
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.step.captured_settings import CapturedSettings


class FixedRows:
    """The counterpart of Gradients (apply_gradients.py) in inference: there are no steps."""

    trains = holding = False
    steps = optimizer_steps = 0
    captured: CapturedSettings | None = None
    frozen: tuple[str, ...] = ()

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self.learning_rates: list[float] = []
        self.memory: list[object] = []
        self.shared_bytes: dict[str, int] = {}

    def wait_for_rows(self) -> None:
        """Make the rows read-only, unless they are being written."""
        self._heap.seal()

    def step(self, batch: PreparedBatch, grad: torch.Tensor) -> None:
        """Take no step."""

    def rates_are_used(self) -> bool:
        """Return False: a captured step updates no rows."""
        return False

    def settings_to_come(self) -> CapturedSettings:
        """Return the settings of a step that is going to be captured, of no buckets."""
        return CapturedSettings([], self._heap.device, 1)

    def drop_held(self) -> None:
        """Forget the gradients that are held back: there are none."""
