"""A training step of engines on a device, captured as CUDA graphs (memory/step_capture.py) and then
run again and again, with other values in the tensors that it reads.

An operator takes the host some microseconds to start, and a step of a small batch is dozens of
them, for which the device waits; a graph starts them all at once.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from oper.base.errors import OperError
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import Cuda


class StepGraph:
    """One step of engines on one device, as `step` starts it: `result` is the return value of
    `step`, and has its values each time the step was run.

    The step must have been run uncaptured before, with batches of the same shapes, since the memory
    that it reads was last replaced (`out_of_date`). Raises OperError if a step of such engines
    cannot be captured.
    """

    def __init__(self, engines: Sequence[EmbeddingEngine], step: Callable[[], Any]) -> None:
        self._engines = list(engines)
        self._device = device_of(engines)
        self._steps = [engine.training_step.to_capture() for engine in engines]
        self._memory = memory_of(engines)
        self._settle()
        with self._device.beside(), ExitStack() as stack:
            for captured in self._steps:
                stack.enter_context(captured.capturing())
            self._capture, self.result = self._device.captured(step)

    @property
    def pieces(self) -> int:
        """The number of graphs: ranks wait for each other between them."""
        return self._capture.pieces

    @property
    def out_of_date(self) -> bool:
        """True if rows, gradients or their addresses lie elsewhere now."""
        return not same_memory(memory_of(self._engines), self._memory)

    def run(
        self,
        fill: Callable[[], Mapping[int, Any]] = dict,
        take: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """Run one step, and return what `take` makes of its result. `fill` puts values into the
        tensors that the step reads. For batches it returns, by the `id` of each captured batch, the
        batch that was put there, for errors that name something in it.

        Raise the errors of tables that the step itself would have raised; those of earlier batches
        as well.
        """
        self._settle()
        self._capture.run_before()
        with ExitStack() as stack:
            for captured in self._steps:
                stack.enter_context(captured.failing_together())
                captured.before()
            batches = fill()
            self._capture.run()
            try:
                return take(self.result)
            finally:  # the step is taken, even if there is no memory for its result
                for captured in self._steps:
                    captured.after(batches)
                self._capture.run_after()

    def _settle(self) -> None:
        for engine in self._engines:
            if engine.before_use is not None:
                engine.before_use()


def memory_of(engines: Sequence[EmbeddingEngine]) -> list[object]:
    """Return the objects that steps of these engines read, write and find rows by now."""
    return [part for engine in engines for part in engine.training_step.memory]


def same_memory(one: Sequence[object], other: Sequence[object]) -> bool:
    """Say whether two steps have the same memory: the very objects."""
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(new is old for new, old in pairs)


def device_of(engines: Sequence[EmbeddingEngine]) -> Cuda:
    """Return the device that engines share. Raise OperError if it is not one CUDA device."""
    device = engines[0].device
    places = {str(engine.device.torch_device) for engine in engines}
    if not isinstance(device, Cuda) or len(places) > 1:
        raise OperError(
            f"the tables are on {', '.join(sorted(places))}, and a step is captured on one CUDA "
            'device: shard the model with device="cuda:0", or call the step as it is'
        )
    return device
