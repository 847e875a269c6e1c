"""Deadlines of waits between ranks: waits are taken in slices, and pauses of the process do not
count."""

import time

SLICE_SECONDS = 0.1  # of a wait; other ranks and this process's signals are checked in between
HEARTBEAT_SECONDS = 0.5  # between two heartbeats of a rank that waits; marks are more frequent
COMPARE_SECONDS = 1.0  # before a deadline: each rank that waits gives heartbeats from then on
# The longest slice of a wait on a busy machine, with the checks after it: a longer one is a pause.
_MAX_SLICE_SECONDS = 5.0


class Deadline:
    """The seconds that a wait may take. Seconds in which this process did not run do not count: if
    a container or a machine was paused, so were the other ranks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._asked, self._waited = time.monotonic(), 0.0
        # Heartbeats and wait marks of the ranks COMPARE_SECONDS before its end, when they are read.
        self.seen: dict[int, str] | None = None

    def ended(self) -> bool:
        """Say whether the deadline has passed. To be called between the slices of the wait."""
        return self.left() <= 0

    def left(self) -> float:
        """Return the seconds that are left, negative once the deadline has passed. To be called
        between the slices of the wait."""
        now = time.monotonic()
        self._waited += min(now - self._asked, _MAX_SLICE_SECONDS)
        self._asked = now
        return self.seconds - self._waited
