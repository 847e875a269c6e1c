"""The columns of a log's files, and the choice among them that the options make."""

import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.logs.batches.batch import Batch
from oper.logs.batches.log_options import LogOptions, TimeUnit
from oper.logs.batches.number_texts import NumberTexts

_PLAIN = re.compile(r"[^*?\[]*")  # a name without wildcards


@dataclass(frozen=True)
class Column:
    """A column of a file.

    kind: its use by default: ids, dense (numbers that are not ids), or other. bags: a sample may
    have several ids. raw: its integers are raw values, not row ids, so that tables inferred from it
    need a vocabulary. texts: it may hold texts. reason: the reason for which it is not ids. doubt:
    a reason for which its ids may be misread. pointed, other: values of a text file's column, if
    its beginning shows both: a whole number with a point, and a value that is not a whole number.
    floats: its numbers are of a type that may have fractions. blank: the file shows no value of it.
    """

    name: str
    kind: Literal["ids", "dense", "other"] = "ids"
    bags: bool = False
    raw: bool = False
    texts: bool = False
    reason: str = ""
    doubt: str = ""
    pointed: str = ""
    other: str = ""
    floats: bool = False
    blank: bool = False


@dataclass(frozen=True)
class Selection:
    """The columns to read as features, dense values, label and time, and the size of batches."""

    features: tuple[str, ...]
    dense: tuple[str, ...]
    label: str | None
    time: str | None
    batch_rows: int
    time_unit: TimeUnit | None = None
    numbers: NumberTexts | None = field(default=None, compare=False)  # of one pass over text files


class Source(Protocol):
    """One file of a log, or one stream of batches."""

    name: str
    columns: tuple[Column, ...]

    @property
    def samples(self) -> int | None:
        """Number of samples; None if only reading the source tells."""

    def count(self) -> int:
        """Return the number of samples, for which the source is read through if necessary."""

    def estimate(self) -> int | None:
        """Return an estimate of the number of samples, from the beginning; None if unknown."""

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Return the samples in order, at most `selection.batch_rows` at a time."""


class NoSuchColumnError(OperError):
    """A log has no column of a name or a pattern."""

    def __init__(self, text: str, wanted: str, known: str) -> None:
        super().__init__(text)
        self.wanted = wanted
        self.known = known  # the columns of the log, for a sentence


class KnownSize:
    """Base of sources whose files state their number of samples."""

    samples: int

    def count(self) -> int:
        return self.samples

    def estimate(self) -> int:
        return self.samples


def choose(source: Source, options: LogOptions) -> Selection:
    """Return the columns that `options` select, by default those that look like ids.

    Raise OperError if a name or pattern matches none.
    """
    columns = source.columns
    names = [c.name for c in columns]

    def only(name: str | None, setting: str) -> str | None:
        if name is not None and name not in names:
            raise OperError(f"{setting} {name!r}: {source.name} has no such column; {_list(names)}")
        return name

    label = only(options.label, option("--label")) or ("label" if "label" in names else None)
    time = only(options.time, f"the time column ({option('--time')}, {option('--by-column')})")
    reserved = {label, time}
    dense_names = (
        None if options.dense is None else _match(source, names, options.dense, option("--dense"))
    )
    if options.columns:
        features = _match(source, names, options.columns, option("--columns"))
    else:
        taken = reserved | set(dense_names or ())
        # pandas writes its index as a column without a name.
        features = tuple(
            c.name for c in columns if c.kind == "ids" and c.name and c.name not in taken
        )
    if dense_names is None:
        taken = reserved | set(features)
        dense_names = tuple(c.name for c in columns if c.kind == "dense" and c.name not in taken)
    wanted = {*features, *dense_names, label, time}
    repeated = [n for n, number in Counter(names).items() if number > 1 and n in wanted]
    if repeated:
        raise OperError(
            f"{source.name}: two columns are called {repeated[0]!r}; rename one, or leave them out "
            f"with {option('--columns')}"
        )
    both = sorted(set(features) & set(dense_names))
    if both:
        raise OperError(
            f"{option('--columns')} and {option('--dense')}: both name {', '.join(both)} of "
            f"{source.name}, and a column is read as one of them; remove it from the other"
        )
    return Selection(features, dense_names, label, time, options.batch_rows, options.time_unit)


def no_ids(source: Source) -> OperError:
    """Return the error of a file without columns that look like ids."""
    names = [c.name for c in source.columns]
    return OperError(
        f"{source.name}: no column looks like ids; name them with {option('--columns')}; "
        f"{_list(names)}"
    )


def left_out(source: Source, options: LogOptions, selection: Selection) -> dict[str, str]:
    """Return the columns that were left out by default: name -> reason.

    Nothing if `options` name the columns of ids: the others are left out by choice.
    """
    if options.columns:
        return {}
    chosen = {*selection.features, options.label, options.time}
    chosen |= set(selection.dense) if options.dense is not None else set()
    reasons = {c.name: c.reason or "it has no name" for c in source.columns if c.name not in chosen}
    if selection.label in reasons:
        reasons[selection.label] = "the label"
    return reasons


def match_feature(wanted: str, names: Collection[str]) -> str | None:
    """Return the column of a table's feature, by its name or by the other name of Criteo's columns.

    Criteo's categories are C1 … C26 in its files, and cat_0 … cat_25 in TorchRec.
    """
    if wanted in names:
        return wanted
    if match := re.fullmatch(r"cat_([0-9]+)", wanted):
        other = f"C{int(match[1]) + 1}"
    elif match := re.fullmatch(r"C([1-9][0-9]*)", wanted):
        other = f"cat_{int(match[1]) - 1}"
    else:
        return None
    return other if other in names else None


def _match(
    source: Source, names: Sequence[str], patterns: Sequence[str], setting: str
) -> tuple[str, ...]:
    chosen: dict[str, None] = {}
    known = set(names)
    for pattern in patterns:
        # `--columns "user, item"` has a space after its comma.
        pattern = pattern if pattern in known else pattern.strip()
        matches = [pattern] if pattern in known else []
        if not _PLAIN.fullmatch(pattern):
            matches += [n for n in names if fnmatch.fnmatchcase(n, pattern)]
        if not matches:
            text = f"{setting} {pattern!r}: matches no column of {source.name}; {_list(names)}"
            raise NoSuchColumnError(text, pattern, _list(names))
        chosen.update(dict.fromkeys(matches))
    # The file's order is kept, so that the order of the patterns does not matter.
    return tuple(n for n in names if n in chosen)


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:45]) + (", …" if len(names) > 45 else "")
    return f"it has {shown}" if names else "it has none"
