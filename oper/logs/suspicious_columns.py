"""Columns of a log that are times, or that are hardly features.

The first values of a column show whether it is a time or the number of a sample, whatever rule
makes rows of them. Times are left out unless the user names them: texts that are all dates, and
numbers that are all dates in one unit under the name of a time. Under any other name, milliseconds
and microseconds are left out if they also ascend with the log and most of them differ: few logs
have so many ids, and ids that contain a time number the samples. Other numbers are only warned of,
because ids can look like dates: ids that count up reach seconds, and a snowflake id is a date in
nanoseconds. The samples' numbers count up, or, in a shuffled log, all differ.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oper.logs.batches.batch import Jagged
from oper.logs.batches.log_options import TimeUnit
from oper.logs.batches.timestamps import PER_SECOND, UNIT_NAMES, date_text, guess_unit
from oper.logs.log import Log
from oper.logs.row_ids import without

# Fewer values that differ may do so by chance, and fewer hashes of 32 bits may be times close
# together: of ten, one in 100,000.
MANY_VALUES, ALL_DISTINCT = 10_000, 0.9
_LEAST_TIMES, _LONGEST_SECONDS = 10, 25 * 365 * 86_400
# Times in a log's order: least share that is no earlier than the time before, and least share of
# distinct times.
_IN_ORDER, _DIFFERENT = 0.99, 0.5

# The words of a name that is a time's, and those of a name that is not, whatever else is in it.
_TIME_WORDS = re.compile(
    "at|created|date|dates|day|epoch|hour|modified|sec|seconds|t|ts|tstamp|updated|utc|when|"
    ".*(time|times|stamp|stamps|millis)"
)
_ID_WORDS = re.compile("code|hash|id|ids|idx|index|key|no|num|number|uuid")
_ZONE = "(Z|:[0-9.:]+ ?[+-][0-9]{2}(:?[0-9]{2})?)$"
_WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Values that mean "unknown" in columns of times.
_UNKNOWN_TIMES = (0, -1)


@dataclass(frozen=True)
class Look:
    """Kinds of the first values of a column.

    time: the reason for which the column is a time; empty if it is not. finding: the reason for
    which it is hardly a feature; empty if it may be a feature. different: the number of values, if
    nearly all differ (else 0).
    """

    time: str = ""
    finding: str = ""
    different: int = 0


def first_look(log: Log, missing: Mapping[str, str | None]) -> dict[str, Look]:
    """Return the kinds of the first values of columns, by name, each without its value in
    `missing`."""
    batch = next(log.batches(tuple(missing), ids_only=True))
    return {
        name: _look(without(batch.features[name], value), name, name in log.bags)
        for name, value in missing.items()
    }


def is_time_name(name: str) -> bool:
    """Return whether a column's name is that of a time, such as ts, event_time or createdAt."""
    return any(map(_TIME_WORDS.fullmatch, _words(name))) and not _is_id_name(name)


def _is_id_name(name: str) -> bool:
    return any(map(_ID_WORDS.fullmatch, _words(name)))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name)]


def _look(ids: Jagged, name: str, bags: bool) -> Look:
    values = ids.values
    named = is_time_name(name)
    if isinstance(values, pa.DictionaryArray):
        different = len(pc.unique(values.indices))  # its dictionary may have more
        if (named or not bags) and (time := _texts_of_times(values)):
            return Look(time=time)
        finding = ""
    else:
        if named and (time := _named_times(values)):
            return Look(time=time)
        different = len(np.unique(values))
        finding = "" if bags else _times(values)
        if finding and not _is_id_name(name) and _are_in_order(values, different):
            return Look(time=f"times: {finding.removeprefix('its ')}, in the log's order")
        if not (bags or finding) and len(values) > MANY_VALUES and (values[1:] > values[:-1]).all():
            finding = f"its first {len(values):,} values count up, from sample to sample"
    many = different > max(MANY_VALUES, ALL_DISTINCT * len(values))
    return Look(finding=finding, different=len(values) if many else 0)


def _named_times(values: NDArray[np.int64]) -> str:
    """Say that numbers under the name of a time are dates in one unit; empty if they are not.

    Numbers that go up by one from sample to sample are those of the samples.
    """
    known = values[~np.isin(values, _UNKNOWN_TIMES)]
    if not len(known) or (len(known) >= _LEAST_TIMES and (np.diff(known) == 1).all()):
        return ""
    bounds = np.array([known.min(), known.max()], dtype=np.float64)
    unit = guess_unit(bounds)
    return "" if unit is None else f"times: {_dates(bounds, unit, len(values))}"


def _times(values: NDArray[np.int64]) -> str:
    """Say that numbers are dates close together in one unit; empty if they are not, or are few."""
    if len(values) < _LEAST_TIMES:
        return ""
    bounds = np.array([values.min(), values.max()], dtype=np.float64)
    unit = guess_unit(bounds)
    if unit is None or bounds[1] - bounds[0] > _LONGEST_SECONDS * PER_SECOND[unit]:
        return ""
    return f"its {_dates(bounds, unit, len(values))}"


def _are_in_order(values: NDArray[np.int64], different: int) -> bool:
    """Return whether dates are milliseconds or microseconds that go up with the log, not by equal
    steps, and most of them differ."""
    steps = np.diff(values)
    unit = guess_unit(np.array([values.min(), values.max()], dtype=np.float64))
    return bool(
        unit in ("ms", "us")
        and np.mean(steps >= 0) >= _IN_ORDER
        and different >= _DIFFERENT * len(values)
        and steps.min() < steps.max()
    )


def _dates(bounds: NDArray[np.float64], unit: TimeUnit, number: int) -> str:
    first, last = (date_text(bound / PER_SECOND[unit]) for bound in bounds.tolist())
    return (
        f"first {number:,} values are dates from {first} to {last}, in {UNIT_NAMES[unit]} since "
        "1970"
    )


def _texts_of_times(values: pa.DictionaryArray) -> str:
    """Say that texts are dates; empty if one of them is not."""
    texts = pc.take(values.dictionary, pc.unique(values.indices))  # may have others
    zoned = pc.match_substring_regex(texts, _ZONE)
    if not len(texts) or pc.any(zoned).as_py() != pc.all(zoned).as_py():
        return ""
    try:
        texts.cast(pa.timestamp("us", "UTC" if zoned[0].as_py() else None))
    except pa.ArrowInvalid:
        return ""
    return f"times: first {len(values):,} values are dates such as {values[0].as_py()!r}"
