"""plan.json: what a plan states beside its arrays, as typed objects, and as JSON.

`Stated` is the file's schema: its fields are the file's keys, and msgspec derives reading, writing
and validation from their types. What follows from other figures (`DERIVED` of their class) is
written for readers of the file, and compared when it is read. What other commands print as JSON is
written and read in this way too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypedDict, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from oper.base.arrays import OverRanks
from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.plan.certificate import Certificate
from oper.plan.memories import Memory
from oper.plan.settings import Limits, PlanSettings

_T = TypeVar("_T")

Window = TypedDict(
    "Window",
    {
        "from_sample": int,
        "to_sample": int,
        "column": str,
        "from_value": float,
        "to_value": float,
        "every": float,
        "number": int,
        "from": str | int,
        "to": str | int,
    },
    total=False,
)
# What describes a window whole: of samples, of times, and of counts that `oper synth` drew.
_WINDOWS = (
    ("from_sample", "to_sample"),
    ("column", "from_value", "to_value", "every", "number"),
    ("from", "to"),
)


class Sampled(TypedDict):
    """A share of the samples, drawn by a seed."""

    share: float
    seed: int


class LogPart(TypedDict, total=False):
    """The part of a log that was profiled: without any key all of it, or it is not known."""

    rows: str
    time_unit: str
    window: Window
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

    fingerprint: str  # of the tables
    profile: str  # digest of the profile
    samples: int
    log_part: LogPart
    workload: Workload
    asked: PlanSettings
    limits: Limits | None
    distinct_ratio: list[tuple[float, float]] | None
    certificate: Certificate | None
    memories: tuple[Memory, ...]
    rows: RowKinds
    arena_slots: list[list[int]]
    topology: dict[str, Any]
    tables: list[dict[str, Any]]


def to_json(value: Any) -> Any:
    """A typed object as JSON has it, with what is derived from its fields."""
    if is_dataclass(value) and not isinstance(value, type):
        content = {f.name: to_json(getattr(value, f.name)) for f in fields(value)}
        return content | {name: to_json(getattr(value, name)) for name in _derived(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def from_json(content: Mapping[str, Any], ranks: int) -> Stated:
    """Read plan.json back; ValueError, which names the place, where a value is not what it should
    be."""
    stated = typed(content, Stated, ranks)
    _check_log_part(stated.log_part)
    return stated


def typed(content: Mapping[str, Any], kind: type[_T], ranks: int) -> _T:
    """JSON as the dataclass that `to_json` was given, whose arrays are over so many ranks; keys
    that are no field of it are left out.

    Raises ValueError, which names the place, where a value is not what it should be.
    """
    try:
        found = msgspec.convert(content, kind, dec_hook=_array)
    except (msgspec.ValidationError, OperError) as error:
        raise ValueError(str(error)) from error
    _check(found, content, ranks, "$")
    return found


def _derived(value: Any) -> tuple[str, ...]:
    """The names of the figures that follow from the fields of a dataclass."""
    return getattr(type(value), "DERIVED", ())


def _array(kind: Any, content: Any) -> Any:
    """An array of the numbers of a list."""
    element = get_args(get_args(kind)[1])[0]
    found = np.array(content)
    if found.dtype.kind not in ("i" if element is np.int64 else "if") and found.size:
        raise ValueError(f"Expected numbers as {element.__name__} has them")
    return found.astype(element)


def _check(value: Any, content: Any, ranks: int, place: str) -> None:
    """Compares arrays with the number of ranks, and what is derived with what it follows from; all
    numbers must be finite."""
    if isinstance(value, float) and not np.isfinite(value):
        raise ValueError(f"{value} is no number that a plan has - at `{place}`")
    if isinstance(value, tuple | list):
        for number, item in enumerate(value):
            _check(item, content[number], ranks, f"{place}[{number}]")
    if not is_dataclass(value):
        return
    hints = get_type_hints(type(value), include_extras=True)
    for field in fields(value):
        inner, at = getattr(value, field.name), f"{place}.{field.name}"
        if not isinstance(inner, np.ndarray):
            _check(inner, content.get(field.name), ranks, at)
            continue
        if not np.isfinite(inner).all():
            raise ValueError(f"Expected finite numbers - at `{at}`")
        for over in getattr(hints[field.name], "__metadata__", ()):
            if isinstance(over, OverRanks) and inner.shape != (ranks,) * over.axes:
                needed = (
                    "a number for each rank" if over.axes == 1 else "one for each pair of ranks"
                )
                raise ValueError(
                    f"{list(inner.shape)} numbers, and {needed} was needed - at `{at}`"
                )
    for name in _derived(value):
        found, said = getattr(value, name), content.get(name)
        if type(said) is not type(found) or said != found:
            raise ValueError(
                f"{str(said)[:40]}, and {found} follows from other figures - at `{place}.{name}`"
            )


def _check_log_part(part: LogPart) -> None:
    """Whether a window is described whole, and a sample is a share of the log."""
    window, sampled = part.get("window"), part.get("sampled")
    if window is not None and not any(set(keys) <= window.keys() for keys in _WINDOWS):
        raise ValueError("Expected a window of samples or of times, whole - at `$.log_part.window`")
    if sampled is not None and not (0 < sampled["share"] <= 1 and 0 <= sampled["seed"] < 1 << 64):
        raise ValueError(
            "Expected a share above 0, and a seed of 64 bits - at `$.log_part.sampled`"
        )
