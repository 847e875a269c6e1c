"""Windows of a log, each with a profile of its own: the rule, and windows of equally many samples.

Windows by a column of times are in time_windows.py.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.logs.batches.batch import Batch

# Above any use that we know (a day a window is three years); while the log is counted each has
# counters of all rows, so a wrong unit of time would fill the disk. --max-windows allows more.
MAX_WINDOWS = 1000


class Windows(Protocol):
    """Assigns each sample to a window; windows are ordered by their numbers."""

    def of(self, batch: Batch, position: int) -> Ints:
        """The window of each sample of a batch, int64 [samples].

        `position` is that of the batch's first sample in the log.
        """

    def describe(self, window: int) -> dict[str, Any]:
        """The bounds of a window, for the profile."""


@dataclass(frozen=True)
class EqualWindows:
    """`count` windows of equally many samples (up to rounding), in the order of the log."""

    count: int
    samples: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.samples:
            raise OperError(
                f"--windows {self.count}: from 1 to {self.samples:,} windows were needed, as the "
                f"log has {self.samples:,} samples"
            )

    def of(self, batch: Batch, position: int) -> Ints:
        sample = np.arange(position, position + batch.samples, dtype=np.int64)
        # Window w is [first(w), first(w + 1)), first(w) = ⌈w · samples / count⌉.
        return sample * self.count // self.samples

    def describe(self, window: int) -> dict[str, Any]:
        first, last = (-(-w * self.samples // self.count) for w in (window, window + 1))
        return {"from_sample": first, "to_sample": last}


def refuse_too_many(windows: int, most: int, source: str, reach: str = "") -> None:
    """OperError where there are more than `most` windows, which option `source` asks for."""
    if windows > most:
        raise OperError(
            f"{source}: gives more than {most:,} windows{reach}, each with counters of all rows; "
            "choose fewer and longer ones, or allow more with --max-windows"
        )
