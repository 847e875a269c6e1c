"""plan.json: what a plan states beside its arrays, as typed objects, and as JSON.

`Stated` is the file's schema: its fields are the file's keys, and msgspec derives reading, writing
and validation from their types. A field that its class has in `WHERE_ANY` has a key only where it
is not empty: files of plans without it are as they were before there was such a field, and who does
not know it refuses the others. What follows from other figures (`DERIVED` of their class) is
written for readers of the file, and compared when it is read. What other commands print as JSON is
written and read in this way too.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    NotRequired,
    TypedDict,
    TypeVar,
    get_args,
    get_type_hints,
)

import msgspec
import numpy as np

from oper.base.arrays import OverRanks
from oper.base.errors import OperError
from oper.cost.step_time import StepTime
from oper.cost.workload import Workload
from oper.plan.certificate import Certificate
from oper.plan.memories import Memory
from oper.plan.reference_figures import HeldOut, SimplePlan
from oper.plan.settings import Limits, PlanSettings

_T = TypeVar("_T")
_OF_FOLDER = {"schema", "version", "files"}  # keys of plan.json beside those of `Stated`

Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class SampleWindow(TypedDict):
    """A window of samples, by their numbers."""

    from_sample: Whole
    to_sample: Whole


# The keys `from` and `to` are words of Python.
DrawnWindow = TypedDict("DrawnWindow", {"from": Whole, "to": Whole})  # that `oper synth` drew
TimeBounds = TypedDict(
    "TimeBounds",
    {
        "column": str,
        "from_value": float,
        "to_value": float,
        "from": NotRequired[str],
        "to": NotRequired[str],
    },
)


class TimeWindow(TimeBounds):
    """A window of times; those of profiles of before have bounds alone."""

    every: Positive
    number: Whole


class Sampled(TypedDict):
    """A share of the samples, drawn by a seed."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    seed: Annotated[int, msgspec.Meta(ge=0)]


class LogPart(TypedDict, total=False):
    """The part of a log that was profiled: without any key all of it, or it is not known."""

    rows: str
    time_unit: str
    window: dict[str, Any]
    sampled: Sampled


@dataclass(frozen=True)
class RowKinds:
    """How many rows a plan has, and how many of them have an entry of their own in the address
    map; the others are striped. Those `everywhere` have a mark for an entry."""

    total: int
    listed: int
    striped: int
    everywhere: int


@dataclass(frozen=True)
class Stated:
    """The content of plan.json but for what describes the folder itself (oper/files/manifest.py).

    `topology` and `tables` are as their own files have them. `certificate` is that of several
    memories together.
    """

    WHERE_ANY: ClassVar = ("pooled_tables", "vector_ratio")

    fingerprint: str  # of the tables
    profile: str  # digest of the profile
    samples: int
    log_part: LogPart
    workload: Workload
    asked: PlanSettings
    limits: Limits | None
    distinct_ratio: list[tuple[float, float]] | None
    certificate: Certificate | None
    held_out: HeldOut | None
    simple_plans: tuple[SimplePlan, ...]
    memories: tuple[Memory, ...]
    rows: RowKinds
    arena_slots: list[list[int]]
    topology: dict[str, Any]
    tables: list[dict[str, Any]]
    step_time: StepTime | None
    unread_step_seconds: float | None
    pooled_tables: tuple[str, ...] = ()
    vector_ratio: tuple[float, ...] | None = None


def to_json(value: Any) -> Any:
    """A typed object as JSON has it, with what is derived from its fields."""
    return _to_json(value, np.ndarray.tolist)


def to_json_file(value: Any) -> Any:
    """The same with arrays as they are, for `json_file.write_json`."""
    return _to_json(value, lambda array: array)


def _to_json(value: Any, of_array: Callable[[Any], Any]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        content = {name: _to_json(getattr(value, name), of_array) for name in _keys(value)}
        return content | {name: getattr(value, name) for name in _derived(type(value))}
    if isinstance(value, np.ndarray):
        return of_array(value)
    if isinstance(value, tuple | list):
        return [_to_json(item, of_array) for item in value]
    return value


def from_json(content: Mapping[str, Any], ranks: int) -> Stated:
    """Read plan.json back; ValueError, which names the place, where a value is not what it should
    be."""
    try:
        stated = msgspec.convert(content, Stated, dec_hook=_array)
        _check(stated, content, ranks, "$")
        _check_log_part(stated.log_part, content["log_part"])
    except (msgspec.ValidationError, OperError) as error:
        raise ValueError(str(error)) from error
    if stated.workload.fetch in (None, "auto"):
        raise ValueError("Expected how rows are fetched - at `$.workload.fetch`")
    return stated


def typed(content: Any, kind: type[_T], ranks: int) -> _T:
    """What `to_json` made of an object of this kind, whose arrays are over so many ranks, read back
    from among the keys of a larger JSON object.

    Raises ValueError, which names the place, where a value is not what it should be.
    """
    own = content
    if is_dataclass(kind) and isinstance(content, Mapping):
        keys = {field.name for field in fields(kind)} | {*_derived(kind)}
        own = {name: value for name, value in content.items() if name in keys}
    try:
        found = msgspec.convert(own, kind, dec_hook=_array)
    except (msgspec.ValidationError, OperError) as error:
        raise ValueError(str(error)) from error
    _check(found, own, ranks, "$")
    return found


def _keys(value: Any) -> list[str]:
    """The names of the fields of a dataclass's object that its JSON has."""
    where_any = getattr(type(value), "WHERE_ANY", ())
    names = [field.name for field in fields(value)]
    return [name for name in names if name not in where_any or getattr(value, name)]


def _derived(kind: type) -> tuple[str, ...]:
    """The names of the figures that follow from the fields of a dataclass."""
    return getattr(kind, "DERIVED", ())


def _array(kind: Any, content: Any) -> Any:
    """An array of the numbers of a list, or of a list of lists."""
    element = get_args(get_args(kind)[1])[0]
    number: Any = int if element is np.int64 else float
    of_lists = isinstance(content, list) and any(isinstance(row, list) for row in content)
    try:
        numbers = msgspec.convert(content, list[list[number]] if of_lists else list[number])
        return np.array(numbers, dtype=element)
    except (msgspec.ValidationError, OverflowError) as error:
        needed = "integers of 64 bits" if number is int else "numbers"
        raise ValueError(f"Expected {needed}") from error  # msgspec adds the place


def _check(value: Any, content: Any, ranks: int, place: str) -> None:
    """Compares arrays with the number of ranks, keys with fields, and what is derived with what it
    follows from; all numbers must be finite, and integers of 64 bits."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no number that a plan has - at `{place}`")
    if isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError(f"Expected an integer of 64 bits - at `{place}`")
    if isinstance(value, tuple | list):
        for number, item in enumerate(value):
            _check(item, content[number], ranks, f"{place}[{number}]")
    if not is_dataclass(value):
        return
    derived = _derived(type(value))
    # A key that is left out would have what is usual, and the plan was not made for that.
    keys = {*_keys(value), *derived}
    if different := keys ^ (content.keys() - (_OF_FOLDER if place == "$" else ())):
        name = min(different)
        wrong = "is missing" if name in keys else "is no key of a plan"
        raise ValueError(f"`{name}` {wrong} - at `{place}`")
    hints = get_type_hints(type(value), include_extras=True)
    for field in fields(value):
        inner, at = getattr(value, field.name), f"{place}.{field.name}"
        if not isinstance(inner, np.ndarray):
            _check(inner, content.get(field.name, ()), ranks, at)
            continue
        if not np.isfinite(inner).all():
            raise ValueError(f"Expected finite numbers - at `{at}`")
        for over in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(over, OverRanks) and inner.shape != (ranks,) * over.axes:
                expected = (
                    "a number for each rank" if over.axes == 1 else "one for each pair of ranks"
                )
                raise ValueError(
                    f"expected {expected}, got {list(inner.shape)} numbers - at `{at}`"
                )
    for name in derived:
        found, said = getattr(value, name), content[name]
        if type(said) is not type(found) or said != found:
            raise ValueError(
                f"{str(said)[:40]}, and {found} follows from other figures - at `{place}.{name}`"
            )


def _check_log_part(part: LogPart, content: Any) -> None:
    """Whether a window is described whole, and all numbers are such as a part of a log has."""
    if part != content:
        raise ValueError("Expected no other keys - at `$.log_part`")
    sampled = part.get("sampled")
    if sampled is not None and sampled["seed"] >= 1 << 64:
        raise ValueError("Expected `int` of 64 bits - at `$.log_part.sampled.seed`")
    window = part.get("window")
    if window is None:
        return
    kind: Any = SampleWindow
    if not window.keys().isdisjoint(TimeBounds.__annotations__.keys() - {"from", "to"}):
        exact = not window.keys().isdisjoint(("every", "number"))
        kind = TimeWindow if exact else TimeBounds
    elif not window.keys().isdisjoint(("from", "to")):
        kind = DrawnWindow
    try:
        known = msgspec.convert(window, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"{error} of log_part.window") from error
    if known.keys() != window.keys():
        raise ValueError("Expected no other keys - at `$.log_part.window`")
    for name, value in window.items():
        if isinstance(value, float) and not np.isfinite(value):
            raise ValueError(f"{value} is no bound of a window - at `$.log_part.window.{name}`")
