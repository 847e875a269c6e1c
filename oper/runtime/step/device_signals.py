"""Signals of an engine on a device, whose steps may be captured (memory/step_capture.py): the host
then posts and waits at the same places of the step, each time it is run, with its number."""

import weakref
from collections.abc import Sequence

from oper.runtime.comm.node import Node
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.memory.device import Device
from oper.runtime.memory.step_capture import StepCapture


class DeviceSignals(Signals):
    """The signals of one engine. `steps_later` is the number of the step that is run minus the
    number of the step that was captured."""

    def __init__(self, node: Node, counters: Sequence[str], device: Device) -> None:
        super().__init__(node, counters, device.done)
        self._device, self.steps_later = device, 0
        self._alone = len(node.peers) == 1  # then steps are not cut into pieces
        # The waits of the step that is captured, or was last. The reference is weak: otherwise the
        # last capture, with its memory, would be released while the next one is made.
        self._waited: tuple[weakref.ref[StepCapture] | None, dict[str, int]] = (None, {})

    def post(self, counter: str, value: int) -> None:
        capture = self._device.capture
        if capture is None:
            super().post(counter, value)
            return
        post = super().post

        def post_later() -> None:
            post(counter, value + self.steps_later)

        if self._alone:
            capture.check(post_later)
        else:
            capture.here(post_later)

    def wait(self, counter: str, value: int, action: str) -> None:
        capture = self._device.capture
        if capture is None:
            super().wait(counter, value, action)
            return
        known, waited = self._waited
        if known is None or known() is not capture:
            waited = {}
            self._waited = (weakref.ref(capture), waited)
        if self._alone or waited.get(counter, -1) >= value:
            return
        waited[counter] = value
        wait = super().wait

        def wait_later() -> None:
            now = value + self.steps_later
            wait(counter, now, action.replace(f"(step {value})", f"(step {now})"))

        capture.here(wait_later)
