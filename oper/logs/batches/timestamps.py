"""Times of samples: seconds since 1970, from timestamps, dates, texts, and numbers with a unit.

The unit of numbers can be guessed if all of them are between 1990 and 2100 in seconds,
milliseconds, microseconds or nanoseconds since 1970: no number is in that range in two of these
units.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.logs.batches.batch import Location
from oper.logs.batches.log_options import TimeUnit

# Number of each unit in a second, and their names in messages.
PER_SECOND: dict[TimeUnit, int] = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
UNIT_NAMES: dict[TimeUnit, str] = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_EARLIEST, _LATEST = (datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (1990, 2100))
_TEXTS = (pa.int64(), pa.float64(), pa.timestamp("us"), pa.timestamp("us", "UTC"))


def times_of(
    column: Any, name: str, location: Location, unit: TimeUnit | None
) -> tuple[NDArray[np.float64], bool]:
    """Return an Arrow column as seconds since 1970, float64 [n], and whether it is plain numbers
    instead.

    Plain numbers are those without a `unit`; they are returned unchanged.
    """
    try:
        numbers, own_unit = _numbers(column)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise OperError(
            f"{location.file}: expected numbers, timestamps or ISO 8601 texts in column {name!r}, "
            f"got {column.type} that cannot be read as times ({error})"
        ) from error
    if numbers.null_count:
        bad = int(np.argmax(numbers.is_null().to_numpy(zero_copy_only=False)))
        raise OperError(
            f"{location.of(bad)}: column {name!r} has no time; fill it in, or remove the sample"
        )
    values = numbers.to_numpy(zero_copy_only=False)
    unit = own_unit or unit
    if unit is None:
        return values.astype(np.float64), True
    if unit == "ns" and values.dtype == np.int64:
        # A double would round the last nanoseconds of a day up to the next one.
        values, unit = values // 1000, "us"
    return values / PER_SECOND[unit], False


def guess_unit(numbers: NDArray[np.float64]) -> TimeUnit | None:
    """Return the unit in which all numbers are from 1990 to 2100; None without one."""
    return next((unit for unit in PER_SECOND if are_dates(numbers, unit).all()), None)


def are_dates(numbers: NDArray[np.float64], unit: TimeUnit) -> NDArray[np.bool_]:
    """Return whether each number lies between 1990 and 2100 in a unit since 1970."""
    scale = PER_SECOND[unit]
    return (_EARLIEST * scale <= numbers) & (numbers < _LATEST * scale)


def date_text(seconds: float) -> str | None:
    """Return seconds since 1970 as an ISO 8601 text; None outside of the years 1 to 9999."""
    try:
        date = _EPOCH + timedelta(seconds=seconds)
    except OverflowError:
        return None
    return date.isoformat(timespec="milliseconds" if date.microsecond else "seconds")


def _numbers(column: Any) -> tuple[Any, TimeUnit | None]:
    """Return the column as int64 or float64, and its unit if the type has one."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if is_text(column.type):
        column = _of_texts(column.cast(pa.string()))
    if pa.types.is_date(column.type):
        column = column.cast(pa.timestamp("ms"))
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.int64()), column.type.unit
    return column.cast(pa.int64() if pa.types.is_integer(column.type) else pa.float64()), None


def _of_texts(texts: Any) -> Any:
    """Cast texts to the first type, of numbers and timestamps, that all of them allow."""
    for kind in _TEXTS[:-1]:
        try:
            return texts.cast(kind)
        except pa.ArrowInvalid:
            continue
    return texts.cast(_TEXTS[-1])


def is_text(kind: Any) -> bool:
    """Return whether an Arrow type holds texts."""
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_binary_view(kind)
    )
