"""Deadlines: how long a wait may take, not counting time in which this process was paused."""

import time

# That a slice of a wait may take on a busy machine, with the checks after it. Longer ones are
# pauses.
_MAX_SLICE_SECONDS = 5.0


class Deadline:
    """The seconds that a wait may take. Those in which this process did not run do not count: where
    a container or a machine was paused, so were the other ranks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._asked, self._waited = time.monotonic(), 0.0

    def ended(self) -> bool:
        """Whether it has passed. To be called between the slices of the wait."""
        return self.left() <= 0

    def left(self) -> float:
        """The seconds that are left, negative once it has passed. To be called as `ended` is."""
        now = time.monotonic()
        self._waited += min(now - self._asked, _MAX_SLICE_SECONDS)
        self._asked = now
        return self.seconds - self._waited
