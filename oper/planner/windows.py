"""Time windows of a log, each with a profile of its own: equal numbers of samples, or spans."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oper.errors import OperError
from oper.logs.batch import Batch

Ints = NDArray[np.int64]

_UNIT_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class Windows(Protocol):
    """A rule that gives each sample its window; windows are ordered by their numbers."""

    def of(self, batch: Batch, position: int) -> Ints:
        """The window of each sample of a batch whose first one is the log's `position`-th."""

    def describe(self, window: int) -> dict[str, Any]:
        """What a window spans, for the profile."""


@dataclass(frozen=True)
class EqualWindows:
    """`count` windows of a log of `samples` samples, equal but for rounding, in its order."""

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


@dataclass(frozen=True)
class TimeWindows:
    """Windows of `every` seconds since 1970 (or units of the column, where it is a number)."""

    column: str
    every: float

    def __post_init__(self) -> None:
        if not 0 < self.every < float("inf"):
            raise OperError(f"--every {self.every:g}: a positive span was needed, such as 1d")

    def of(self, batch: Batch, position: int) -> Ints:
        time = batch.time
        if time is None:
            raise OperError(f"--by-column {self.column!r}: {batch.place.file} has no such column")
        if not np.isfinite(time).all():
            sample = int(np.argmin(np.isfinite(time)))
            raise OperError(
                f"{batch.place.of(sample)}: column {self.column!r} has no time; fill it in, or "
                "leave the sample out with --rows"
            )
        return np.floor(time / self.every).astype(np.int64)

    def describe(self, window: int) -> dict[str, Any]:
        first, last = window * self.every, (window + 1) * self.every
        span: dict[str, Any] = {"column": self.column, "from_value": first, "to_value": last}
        # Numbers before 1971 are no seconds since 1970, but days, hours or ticks of some clock.
        if 3e7 < first < 2e11:
            span["from"], span["to"] = (
                datetime.fromtimestamp(t, UTC).isoformat(timespec="seconds") for t in (first, last)
            )
        return span


def parse_span(text: str) -> float:
    """`1d`, `12h`, `30m`, `90s` or a bare number -> seconds."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)\s*", text)
    if not match or float(match[1]) == 0:
        raise OperError(f"--every {text!r}: a span was needed, such as 1d, 12h or a number")
    return float(match[1]) * _UNIT_SECONDS[match[2]]
