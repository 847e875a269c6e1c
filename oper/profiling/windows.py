"""Windows of a log, each with a profile of its own: by number of samples, or by a column of times.
A log of which the last part is held out has two.

Windows by times are found in one pass over their column alone. It finds, before hours of counting,
the faults that would make them useless: missing times, numbers whose unit cannot be guessed, and
far too many windows.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.defaults import MAX_WINDOWS
from oper.base.errors import OperError, OperNotice
from oper.base.spoken import option
from oper.base.units import parse_seconds
from oper.logs.batches.batch import Batch
from oper.logs.batches.log_options import TimeUnit
from oper.logs.batches.timestamps import PER_SECOND, UNIT_NAMES, are_dates, date_text, guess_unit
from oper.logs.log import Log
from oper.profiling.profile import HELD_OUT, window_name

Times = NDArray[np.float64]
# Share of a window's samples in its first part, from which plans are made to be judged on the
# rest: with a half they were so much worse than plans from the whole window that keeping old plans
# was advised too often (docs/design/judged-in-time.md).
FIRST_SHARE = 2 / 3
# Share of the samples that may be earlier than the sample before them in a log whose windows are
# split: logs of several writers are nearly in order, and in a shuffled one half of them are.
_MOST_FALLS = 0.1


class Windows(Protocol):
    """Assigns each sample to a window; windows are ordered by their numbers."""

    def of(self, batch: Batch, position: int) -> Ints:
        """Return the window of each sample of a batch, int64 [samples].

        `position` is that of the batch's first sample in the log.
        """

    def describe(self, window: int) -> dict[str, Any]:
        """Return the bounds of a window, for the profile."""

    def folder(self, number: int) -> str:
        """Return the folder of the window that is `number` of those with samples, below the
        profile's."""

    def first_part(self, window: int) -> int | None:
        """Return the samples of a window's first part; None if the window is not split in time."""


@dataclass(frozen=True)
class EqualWindows:
    """`count` windows of equally many samples (up to rounding), in the order of the log."""

    count: int
    samples: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.samples:
            raise OperError(
                f"{option('--windows', self.count)}: expected 1 to {self.samples:,} windows, as "
                f"the log has {self.samples:,} samples"
            )

    def of(self, batch: Batch, position: int) -> Ints:
        sample = np.arange(position, position + batch.samples, dtype=np.int64)
        # Window w is [first(w), first(w + 1)), first(w) = ⌈w · samples / count⌉.
        return sample * self.count // self.samples

    def describe(self, window: int) -> dict[str, Any]:
        first, last = (-(-w * self.samples // self.count) for w in (window, window + 1))
        return {"from_sample": first, "to_sample": last}

    def folder(self, number: int) -> str:
        return window_name(number)

    def first_part(self, window: int) -> int | None:
        bounds = self.describe(window)
        return int(FIRST_SHARE * (bounds["to_sample"] - bounds["from_sample"]))


@dataclass(frozen=True)
class HeldOutWindows:
    """The first part of a log and its last one, which has the share `held_out` of the samples."""

    held_out: float
    samples: int

    def __post_init__(self) -> None:
        if not 0 < self._first < self.samples:
            raise OperError(
                f"{option('--hold-out', self.held_out)}: expected a share that leaves samples on "
                f"both sides, such as 20%, as the log has {self.samples:,}"
            )

    @property
    def _first(self) -> int:
        return self.samples - round(self.held_out * self.samples)

    def of(self, batch: Batch, position: int) -> Ints:
        sample = np.arange(position, position + batch.samples, dtype=np.int64)
        return (sample >= self._first).astype(np.int64)

    def describe(self, window: int) -> dict[str, Any]:
        first, last = ((0, self._first), (self._first, self.samples))[window]
        return {"from_sample": first, "to_sample": last}

    def folder(self, number: int) -> str:
        return (".", HELD_OUT)[number]

    def first_part(self, window: int) -> int | None:
        return None


def refuse_too_many(windows: int, most: int, source: str, reach: str = "") -> None:
    """Raise OperError if there are more than `most` windows, which option `source` asks for."""
    if windows > most:
        raise OperError(
            f"{source}: gives more than {most:,} windows{reach}, each with counters of all rows; "
            f"choose fewer and longer ones, or allow more with {option('--max-windows')}"
        )


@dataclass(frozen=True)
class TimeWindows:
    """Windows of `every` seconds since 1970, or in the column's own unit if it is `plain`.

    unit: the unit of the column's numbers, in which bounds are reported. samples: number of samples
    of each window, by which windows are split in time; None if the log is not in the order of the
    column.
    """

    column: str
    every: float
    unit: TimeUnit = "s"
    plain: bool = False
    samples: Mapping[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.every < float("inf"):
            raise OperError(
                f"{option('--every', self.every)}: expected a positive span, such as 1d"
            )

    def of(self, batch: Batch, position: int) -> Ints:
        if batch.plain_time != self.plain:
            got, expected = ("plain numbers", "times")[:: 1 if batch.plain_time else -1]
            raise OperError(
                f"{batch.location.of(0)}: expected {expected} in column {self.column!r}, got "
                f"{got}; give the unit of the numbers with {option('--time-unit')} s, ms, us or ns"
            )
        return np.floor(checked_times(batch, self.column) / self.every).astype(np.int64)

    def describe(self, window: int) -> dict[str, Any]:
        bounds = [window * self.every, (window + 1) * self.every]
        scale = 1 if self.plain else PER_SECOND[self.unit]
        first, last = (scale * bound for bound in bounds)
        span: dict[str, Any] = {"column": self.column, "from_value": first, "to_value": last}
        # The bounds may be rounded: these two tell exactly which samples are in the window.
        span |= {"every": self.every, "number": window}
        dates = [None] if self.plain else [date_text(bound) for bound in bounds]
        if None not in dates:
            span["from"], span["to"] = dates
        return span

    def folder(self, number: int) -> str:
        return window_name(number)

    def first_part(self, window: int) -> int | None:
        return None if self.samples is None else int(FIRST_SHARE * self.samples.get(window, 0))


def find_time_windows(
    log: Log,
    every: str,
    max_windows: int = MAX_WINDOWS,
    *,
    advance: Callable[[int], None] = lambda samples: None,
) -> tuple[Log, TimeWindows]:
    """Return the windows of a log by its `options.time`, and the log with the unit of that column.

    `every` is a span such as 1d, or a number: of seconds, or in the column's own unit if its
    numbers are not times. The unit of numbers is `options.time_unit`, or guessed and told by an
    OperNotice. `advance` is called with the number of samples read.
    """
    column, stated = log.options.time, log.options.time_unit
    if column is None:
        raise OperError("LogOptions(time=None): expected the name of a column of times")
    span = parse_seconds(every, option("--every"))
    windows: TimeWindows | None = None
    numbers = (
        False  # whether the column has numbers, rather than timestamps, dates or texts of them
    )
    seen: Counter[int] = Counter()  # samples of each window
    falls = 0  # of the time from one sample to the next
    low, high = np.inf, -np.inf
    for batch in log.in_unit(None).batches((), ids_only=True):
        times = checked_times(batch, column)
        if windows is None:
            numbers = batch.plain_time
            unit: TimeUnit | None = stated or "s"
            if numbers and stated is None:
                unit = _guessed(batch, times, column, every)
            elif not numbers and stated is not None:
                _tell(
                    f"{option('--time-unit', stated)}: has no effect, as column {column!r} holds "
                    "times"
                )
                unit = "s"
            windows = TimeWindows(column, span, unit or "s", plain=unit is None)
        if batch.plain_time != numbers:
            kinds = ("numbers", "times")[:: -1 if numbers else 1]
            raise OperError(
                f"{batch.location.of(0)}: from here on column {column!r} holds {kinds[0]}, and "
                f"{kinds[1]} before; use one of them throughout"
            )
        if numbers and not windows.plain:
            _check(batch, times, windows, stated)
            times = times / PER_SECOND[windows.unit]
        low, high = min(low, times.min()), max(high, times.max())
        falls += int(np.count_nonzero(np.diff(times) < 0))
        window_numbers, samples = np.unique(np.floor(times / windows.every), return_counts=True)
        seen.update(dict(zip(map(int, window_numbers.tolist()), samples.tolist(), strict=True)))
        reach = f" from {_bound(low, windows)} to {_bound(high, windows)}"
        refuse_too_many(
            len(seen),
            max_windows,
            f"{option('--by-column', column)} {option('--every', every)}",
            reach,
        )
        advance(batch.samples)
    assert windows is not None, "a log without samples is an error when it is read"
    if falls <= _MOST_FALLS * seen.total():
        windows = replace(windows, samples=seen)
    return log.in_unit(windows.unit if numbers and not windows.plain else None), windows


def checked_times(batch: Batch, column: str) -> NDArray[np.float64]:
    """Return a batch's times; raise OperError if it has none, or a sample has none."""
    times = batch.time
    if times is None:
        raise OperError(
            f"{option('--by-column', column)}: {batch.location.file} cannot have times; CSV and "
            "Parquet files can"
        )
    if not np.isfinite(times).all():
        sample = int(np.argmin(np.isfinite(times)))
        raise OperError(
            f"{batch.location.of(sample)}: column {column!r} has no time; fill it in, or leave the "
            f"sample out with {option('--rows')}"
        )
    return times


def _guessed(batch: Batch, times: Times, column: str, every: str) -> TimeUnit | None:
    """Return the unit of a log's first numbers; None if they are not times and `every` is a
    number."""
    unit = guess_unit(times)
    if unit is not None:
        first = float(times[0])
        _tell(
            f"{column}: numbers around {_short(first)} are read as {UNIT_NAMES[unit]} since 1970, "
            f"the first one as {date_text(first / PER_SECOND[unit])}; choose another unit with "
            f"{option('--time-unit')}"
        )
        return unit
    if _is_number(every):
        return None
    if usual := guess_unit(np.median(times, keepdims=True)):
        _refuse_mixed(batch, times, column, usual)
    raise OperError(
        f"{option('--every', every)}: column {column!r} of {batch.location.file} holds numbers "
        f"from {times.min():,.10g} to {times.max():,.10g}, which are not dates from 1990 to 2100 "
        f"in any unit; give their unit with {option('--time-unit')} s, ms, us or ns, or give "
        f"{option('--every')} as a number in the column's own unit"
    )


def _check(batch: Batch, times: Times, windows: TimeWindows, stated: str | None) -> None:
    """Raise OperError if numbers are not in the guessed unit, or cannot be in the given one."""
    if stated is None:
        if not are_dates(times, windows.unit).all():
            _refuse_mixed(batch, times, windows.column, windows.unit)
        return
    for sample in (int(np.argmin(times)), int(np.argmax(times))):
        number = float(times[sample])
        if date_text(number / PER_SECOND[windows.unit]) is None:
            likely = guess_unit(np.array([number]))
            advice = (
                f"{option('--time-unit', likely)} would fit" if likely else "choose another unit"
            )
            raise OperError(
                f"{batch.location.of(sample)}: column {windows.column!r} is {number:,.20g}, not a "
                f"date in the years 1 to 9999 as {UNIT_NAMES[windows.unit]} since 1970; {advice}"
            )


def _refuse_mixed(batch: Batch, times: Times, column: str, unit: TimeUnit) -> None:
    sample = int(np.argmin(are_dates(times, unit)))
    raise OperError(
        f"{batch.location.of(sample)}: column {column!r} is {times[sample]:,.20g}, and other "
        f"samples have {UNIT_NAMES[unit]} since 1970, from 1990 to 2100; correct it, or pass "
        f"{option('--time-unit', unit)} if it is right"
    )


def _bound(value: float, windows: TimeWindows) -> str:
    return (None if windows.plain else date_text(value)) or f"{value:,.10g}"


def _short(number: float) -> str:
    return f"{number:.2g}".replace("e+", "e")  # 1.6e12


def _is_number(every: str) -> bool:
    return every.strip()[-1:].isdigit()


def _tell(sentence: str) -> None:
    warnings.warn(sentence, OperNotice, stacklevel=2)
