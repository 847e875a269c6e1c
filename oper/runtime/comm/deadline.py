"""Deadlines: how long a wait may take, time in which this process was paused not counted."""

import time

_LONGEST_SLICE_SECONDS = 5.0  # that one may come to on a busy machine, with what is asked after it


class Deadline:
    """The seconds that a wait may take. Those in which this process did not run do not count: where
    a container or a machine was paused, so were the others."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._asked, self._waited = time.monotonic(), 0.0

    def ended(self) -> bool:
        """To be asked between the slices of the wait."""
        now = time.monotonic()
        self._waited += min(now - self._asked, _LONGEST_SLICE_SECONDS)
        self._asked = now
        return self._waited >= self.seconds
