"""Counters of a dispatching loader: what one rank has moved, and how long that took."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

PARTS = ("load", "wait", "gather", "scoring", "exchange")


@dataclass
class Counters:
    """Of the global batches that were dispatched so far.

    Seconds: `load` in the rank's own loader, `wait` for the other ranks' batches, `gather` of what
    scores need, `scoring` with the assignment, `exchange` of the samples.
    """

    batches: int = 0
    samples: int = 0  # that this rank was given to train
    samples_moved: int = 0  # of its own loader's, to other ranks
    bytes_moved: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Count the time of a part."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += perf_counter() - start

    @property
    def dispatching(self) -> float:
        """Seconds of all that dispatch adds."""
        return sum(self.seconds[part] for part in ("gather", "scoring", "exchange"))

    def to_dict(self) -> dict[str, Any]:
        """The counters by name; times in milliseconds of a batch."""
        times = {
            f"{part}_ms": 1e3 * spent / max(self.batches, 1) for part, spent in self.seconds.items()
        }
        return {
            "batches": self.batches,
            "samples": self.samples,
            "samples_moved": self.samples_moved,
            "bytes_moved": self.bytes_moved,
            **times,
        }
