"""plan.json: the content of a plan except its arrays, as typed objects and as JSON.

`Stated` is the file's schema: its fields are the file's keys, and msgspec derives reading, writing
and validation from their types. A field in its class's `WHERE_ANY` has a key only if it is not
empty: plans without it keep the file format from before the field, and older readers refuse the
others. Figures that follow from other figures (`DERIVED` of their class) are written for readers of
the file, and compared when it is read. Other commands write and read their JSON in this way too.
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
_OF_FOLDER = {"schema", "version", "files"}  # keys of plan.json that `Stated` does not have

Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]


class SampleWindow(TypedDict):
    """Window of samples, by their numbers."""

    from_sample: Whole
    to_sample: Whole


# The key `from` is a keyword of Python.
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
    """Window of times; older profiles have only bounds."""

    every: Positive
    number: Whole


class Sampled(TypedDict):
    """Share of the samples, drawn with a seed."""

    share: Annotated[float, msgspec.Meta(gt=0, le=1)]
    seed: Annotated[int, msgspec.Meta(ge=0)]


class LogPart(TypedDict, total=False):
    """Part of a log that was profiled; without keys: all of it, or unknown."""

    rows: str
    time_unit: str
    window: dict[str, Any]
    sampled: Sampled


@dataclass(frozen=True)
class RowKinds:
    """Numbers of a plan's rows: all, those with an entry in the address map (listed), and the
    others (striped). The listed rows `everywhere` have a mark instead of a code."""

    total: int
    listed: int
    striped: int
    everywhere: int


@dataclass(frozen=True)
class Stated:
    """Content of plan.json except the description of the folder itself (oper/files/manifest.py).

    `topology` and `tables` have the format of their own files. `certificate` is that of several
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
    """Return a typed object as JSON, with the figures derived from its fields."""
    return _to_json(value, np.ndarray.tolist)


def to_json_file(value: Any) -> Any:
    """Return the content of `to_json` with arrays unconverted, for `json_file.write_json`."""
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
    """Read plan.json back; raise ValueError, which names the place, if a value is invalid."""
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
    """Return an object of type `kind`, whose arrays are over `ranks` ranks, from the JSON that
    `to_json` made of it, ignoring other keys of a larger JSON object.

    Raise ValueError, which names the place, if a value is invalid.
    """
    known = content
    if is_dataclass(kind) and isinstance(content, Mapping):
        keys = {field.name for field in fields(kind)} | {*_derived(kind)}
        known = {name: value for name, value in content.items() if name in keys}
    try:
        typed_value = msgspec.convert(known, kind, dec_hook=_array)
    except (msgspec.ValidationError, OperError) as error:
        raise ValueError(str(error)) from error
    _check(typed_value, known, ranks, "$")
    return typed_value


def _keys(value: Any) -> list[str]:
    """Return the names of the dataclass fields of `value` that its JSON has."""
    where_any = getattr(type(value), "WHERE_ANY", ())
    names = [field.name for field in fields(value)]
    return [name for name in names if name not in where_any or getattr(value, name)]


def _derived(kind: type) -> tuple[str, ...]:
    """Return the names of the figures derived from the fields of a dataclass."""
    return getattr(kind, "DERIVED", ())


def _array(kind: Any, content: Any) -> Any:
    """Return an array of the numbers of a list, or of a list of lists."""
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
    """Compare arrays with the number of ranks, keys with fields, and derived figures with their
    fields; all numbers must be finite, and integers of 64 bits."""
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
    # A missing key would get its default, for which the plan was not made.
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
        figure, said = getattr(value, name), content[name]
        if type(said) is not type(figure) or said != figure:
            raise ValueError(
                f"{str(said)[:40]}, and {figure} follows from other figures - at `{place}.{name}`"
            )


def _check_log_part(part: LogPart, content: Any) -> None:
    """Raise ValueError unless the part of a log has all keys of its kind of window, no others, and
    valid numbers."""
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
