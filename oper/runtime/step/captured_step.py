"""The host's part in a captured step of one engine: when it is captured, and each time it is run.

To capture a step the host goes through all of its part once: steps and accesses are counted as if
the step had been taken. These counts are taken back, and added each time the step is run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from oper.base.errors import OperError
from oper.runtime.comm.engine_lifetime import EngineGuard
from oper.runtime.fetch_paths.access_counters import Counters
from oper.runtime.memory.placement import Placement
from oper.runtime.memory.stream_order import StreamOrder
from oper.runtime.step.apply_gradients import Gradients
from oper.runtime.step.captured_settings import CapturedSettings
from oper.runtime.step.device_signals import DeviceSignals
from oper.runtime.step.fixed_rows import FixedRows
from oper.runtime.step.late_checks import CapturedCheck, LateChecks


class CapturedStep:
    """A step of one engine that is captured inside of `capturing`, and then run any number of
    times."""

    def __init__(
        self,
        guard: EngineGuard,
        signals: DeviceSignals,
        placement: Placement,
        order: StreamOrder,
        late: LateChecks,
        counters: Counters,
        gradients: Gradients | FixedRows,
    ) -> None:
        self._guard, self._signals, self._placement = guard, signals, placement
        self._order, self._late, self._counters = order, late, counters
        self._gradients = gradients
        self._checks: list[CapturedCheck] = []
        self._settings: CapturedSettings | None = None
        self._began = self._steps = self._updates = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a step inside: its counts are set aside."""
        with self._guard.failing_together():
            self._late.tell(all_of_them=True)
        self._late.begin_capture()
        gradients = self._gradients
        self._check_nothing_is_held()
        self._began, began = gradients.steps, gradients.optimizer_steps
        gradients.captured = self._settings = gradients.settings_to_come()
        try:
            with self._counters.setting_aside() as self._counted:
                yield
            self._check_nothing_is_held()
            self._steps = gradients.steps - self._began
            self._updates = gradients.optimizer_steps - began
        finally:
            self._checks = self._late.take_captured()
            gradients.captured = None
            gradients.drop_held()  # of a capture that failed, whose sums nobody has made
            gradients.steps, gradients.optimizer_steps = self._began, began

    def before(self) -> None:
        """Prepare a run of the step, inside of `failing_together`."""
        self._late.tell()
        self._order.before_write()
        gradients = self._gradients
        self._check_nothing_is_held()
        assert self._settings is not None
        self._signals.steps_later = gradients.steps - self._began
        self._settings.fill(gradients.learning_rates, gradients.optimizer_steps + 1)

    def _check_nothing_is_held(self) -> None:
        if self._gradients.holding:
            raise OperError(
                "gradients of earlier batches are held back, which a captured step does not add, "
                "and cannot leave: let the step itself have all batches that are accumulated"
            )

    def after(self, given: Mapping[int, Any]) -> None:
        """Count a run of the step that was started. `given` has the batches that took the place of
        those with which it was captured, by their `id`."""
        self._gradients.steps += self._steps
        self._gradients.optimizer_steps += self._updates
        done = self._order.after_write()
        self._counters.add(**self._counted)
        for check in self._checks:
            self._late.expect_again(check, given, done)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Keep rows at their places inside, and let failures there fail on all ranks."""
        self._guard.check()
        with self._placement.reading, self._guard.failing_together(), self._counters.adding():
            yield
