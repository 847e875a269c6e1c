"""Time windows of a log, each with a profile of its own: equal numbers of samples, or spans."""

import re
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.logs.batches.batch import Batch
from oper.logs.batches.options import TimeUnit
from oper.logs.batches.times import PER_SECOND, date_text

# A profile of so many is no accident yet; each has counters of all rows.
MAX_WINDOWS = 1000

_SPAN_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


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
    """Windows of `every` seconds since 1970, or of the column's own numbers where it is `plain`.

    `unit` is what the column counts, for the bounds as it would write them.
    """

    column: str
    every: float
    unit: TimeUnit = "s"
    plain: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.every < float("inf"):
            raise OperError(f"--every {self.every:g}: a positive span was needed, such as 1d")

    def of(self, batch: Batch, position: int) -> Ints:
        if batch.plain_time != self.plain:
            has, needed = ("plain numbers", "times")[:: 1 if batch.plain_time else -1]
            raise OperError(
                f"{batch.place.of(0)}: column {self.column!r} has {has}, and {needed} were needed; "
                "say what the numbers count with --time-unit s, ms, us or ns"
            )
        return np.floor(checked_times(batch, self.column) / self.every).astype(np.int64)

    def describe(self, window: int) -> dict[str, Any]:
        bounds = [window * self.every, (window + 1) * self.every]
        scale = 1 if self.plain else PER_SECOND[self.unit]
        first, last = (scale * bound for bound in bounds)
        span: dict[str, Any] = {"column": self.column, "from_value": first, "to_value": last}
        dates = [None] if self.plain else [date_text(bound) for bound in bounds]
        if None not in dates:
            span["from"], span["to"] = dates
        return span


def checked_times(batch: Batch, column: str) -> NDArray[np.float64]:
    """A batch's times; OperError where it has none, or a sample has none."""
    times = batch.time
    if times is None:
        raise OperError(
            f"--by-column {column!r}: {batch.place.file} gives no times; CSV and Parquet files do"
        )
    if not np.isfinite(times).all():
        sample = int(np.argmin(np.isfinite(times)))
        raise OperError(
            f"{batch.place.of(sample)}: column {column!r} has no time; fill it in, or leave the "
            "sample out with --rows"
        )
    return times


def refuse_too_many(windows: int, most: int, source: str, reach: str = "") -> None:
    """OperError where there are more than `most` windows; `source` is the option behind them."""
    if windows > most:
        raise OperError(
            f"{source}: makes more than {most:,} windows{reach}, each with counters of all rows; "
            "take fewer and longer ones, or allow more with --max-windows"
        )


def parse_span(text: str) -> float:
    """`1d`, `12h`, `30m`, `90s` or a bare number -> seconds."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw]?)\s*", text)
    if not match or float(match[1]) == 0:
        raise OperError(f"--every {text!r}: a span was needed, such as 1d, 12h or a number")
    return float(match[1]) * _SPAN_SECONDS[match[2]]
