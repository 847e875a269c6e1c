"""The order of a device's streams at the rows of one engine.

Pipelines look a batch up on one stream while another trains the batch before. On one stream work
goes on in the order of its start, and ranks wait for each other by signals. It remains to keep the
streams of a rank apart: an update comes after all reads that were started before it, and a read
after the last update.

A captured step is not kept in order with work outside: it reads and writes as one, and its caller
reports that when it is run.
"""

from typing import Any

from oper.runtime.memory.device import Device


class StreamOrder:
    """The streams that read and wrote the rows on a device; nothing to do on the CPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._reads: dict[int, Any] = {}  # by stream, the last one
        self._write: list[Any] = []

    @property
    def _kept(self) -> bool:
        return self._device.kind != "cpu" and self._device.capture is None

    def before_read(self, fetches: bool) -> None:
        """Let a read that is about to start come after the last update. `fetches`: ranks fetch some
        rows together before, to the place of the last fetch; this rank says thereby that it has
        read those."""
        if self._kept:
            self._device.after([*self._write, *(self._reads.values() if fetches else ())])

    def after_read(self) -> None:
        """Take note of a read that was started."""
        if self._kept:
            self._reads[self._device.stream] = self._device.point()

    def before_write(self) -> None:
        """Let later work come after all reads and the last update. To be called before others are
        told that this rank has read its rows, and before any are written."""
        if self._kept:
            self._device.after([*self._reads.values(), *self._write])
            self._reads.clear()

    def after_write(self) -> Any:
        """Take note of an update that was started. Return the point after it, if it is kept in
        order."""
        if not self._kept:
            return None
        self._write = [self._device.point()]
        return self._write[0]
