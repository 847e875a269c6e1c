"""Options of reading a log: columns, rows, and the value that means "no id"."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict, get_args

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.base.units import whole_number
from oper.logs.batches.separators import separator

OnBadId = Literal["error", "skip"]
TimeUnit = Literal["s", "ms", "us", "ns"]

_SEVERAL = ("columns", "dense", "values", "lengths")  # options that take several names


class LogKeywords(TypedDict, total=False):
    """The keywords of all functions that read a log, with the commands' names: see `LogOptions`.

    A setting that takes several names also takes one name as a text.
    """

    columns: str | Sequence[str]
    dense: str | Sequence[str] | None
    label: str | None
    time: str | None
    missing: str | int | None
    rows: str | None
    values: str | Sequence[str]
    lengths: str | Sequence[str]
    no_header: bool
    delimiter: str | None
    list_separator: str | None
    on_bad_id: OnBadId


@dataclass(frozen=True)
class LogOptions:
    """Options of reading a log, which all commands and functions that read a log share.

    columns: names and patterns of the columns that hold ids; () means all that look like ids.
    dense: names and patterns of the columns of numbers; None means all that look like floats.
    label, time: columns of the label and of the time; a column `label` is the label by default.
    time_unit: unit of the time column's numbers since 1970; ignored for timestamps.
    missing: a value that means "no id", besides nulls and empty fields.
    rows: "FROM:TO" of all files' samples together, each a number or a percentage.
    values, lengths: names of the arrays of a jagged .npz, a pair for each feature.
    no_header: the first line of a CSV file is a sample; its columns are column_1, column_2, …
    delimiter: separator of a CSV file's columns, such as ";", "::", "tab" or "\\x01"; a space
        stands for a run of them. None: found in the file's first lines.
    list_separator: separator of the ids of a bag within a field of a CSV file.
    on_bad_id: stop at an id that its table has no row for, or skip and count it.
    batch_rows: the most samples in a batch of a log.
    """

    columns: tuple[str, ...] = ()
    dense: tuple[str, ...] | None = None
    label: str | None = None
    time: str | None = None
    time_unit: TimeUnit | None = None
    missing: str | None = None
    rows: str | None = None
    values: tuple[str, ...] = ()
    lengths: tuple[str, ...] = ()
    no_header: bool = False
    delimiter: str | None = None
    list_separator: str | None = None
    on_bad_id: OnBadId = "error"
    batch_rows: int = 1 << 16

    def __post_init__(self) -> None:
        if self.on_bad_id not in ("error", "skip"):
            raise OperError(f"{option('--on-bad-id', self.on_bad_id)}: expected error or skip")
        if self.time_unit not in (None, *get_args(TimeUnit)):
            raise OperError(f"{option('--time-unit', self.time_unit)}: expected s, ms, us or ns")
        if whole_number(self.batch_rows, "batch_rows") < 1:
            raise OperError(f"batch_rows: expected at least 1, got {self.batch_rows}")
        if len(self.values) != len(self.lengths):
            raise OperError(
                f"{option('--values')} names {len(self.values)} arrays and {option('--lengths')} "
                f"{len(self.lengths)}; each feature needs one of each"
            )
        if self.rows is not None:
            _bounds(self.rows)
        for name in ("delimiter", "list_separator"):
            if (value := getattr(self, name)) is not None:
                separator(value, option(f"--{name.replace('_', '-')}"))
        if self.delimiter is not None and self.delimiter == self.list_separator:
            raise OperError(
                f"{option('--delimiter')} and {option('--list-separator')} are both "
                f"{self.delimiter!r}: expected different separators of columns and of the ids "
                "within one"
            )

    @classmethod
    def of(cls, keywords: Mapping[str, Any]) -> "LogOptions":
        """Return the options that `LogKeywords` give. OperError names a keyword that is unknown."""
        unknown = keywords.keys() - {option.name for option in fields(cls)}
        if unknown:
            known = ", ".join(option.name for option in fields(cls))
            raise OperError(f"{min(unknown)}: is no option of reading a log; known are {known}")
        settings = dict(keywords)
        for name in _SEVERAL:
            if (names := settings.get(name)) is not None:
                settings[name] = (names,) if isinstance(names, str) else tuple(names)
        if settings.get("missing") is not None:
            settings["missing"] = str(settings["missing"])
        return cls(**settings)

    @property
    def rows_need_total(self) -> bool:
        """True if `rows` can be resolved only once the number of samples is known."""
        return self.rows is not None and "%" in self.rows

    def row_range(self, samples: int | None) -> tuple[int, int | None]:
        """Return the first sample and the one after the last (None: to the end).

        `samples` is the number of samples in the log, needed if `rows` has a percentage.
        """
        if self.rows is None:
            return 0, None
        first, last = (_resolve(bound, samples) for bound in _bounds(self.rows))
        if last is not None and last <= (first or 0):
            raise OperError(
                f"{option('--rows', self.rows)}: selects no sample"
                + (f" of the log's {samples:,}" if samples is not None else "")
                + "; FROM must be below TO"
            )
        return first or 0, last


_BOUND = r"([0-9]{1,3}(?:\.[0-9]{1,30})?%|[0-9]{0,18})"
_ROWS = re.compile(rf"\s*{_BOUND}\s*:\s*{_BOUND}\s*")


def _bounds(rows: str) -> tuple[str, str]:
    match = _ROWS.fullmatch(rows)
    if not match or any(b.endswith("%") and float(b[:-1]) > 100 for b in match.groups()):
        raise OperError(
            f"{option('--rows', rows)}: expected a range such as 0:64000, 64000: or 0:80%"
        )
    return match[1], match[2]


def _resolve(bound: str, samples: int | None) -> int | None:
    if not bound:
        return None
    if not bound.endswith("%"):
        return int(bound)
    assert samples is not None, "a percentage needs the number of samples"
    return round(float(bound[:-1]) / 100 * samples)
