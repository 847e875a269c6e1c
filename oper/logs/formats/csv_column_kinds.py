"""What the columns of a CSV file are, by the file's beginning: ids, numbers, or neither.

The rule is that of Parquet: a column of whole numbers below 2^64 holds ids. Arrow reads a column
in which one of them is 2^63 or more as floating-point numbers, so such columns are read again as
texts. A column that is not of ids has a reason that names the first value which is none.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from oper.base.spoken import spoken
from oper.logs.batches.columns import Column
from oper.logs.batches.timestamps import is_text
from oper.logs.formats.arrow_columns import column_of

_LEAST, _LIMIT = -(2**63), 2**64
_ONE_COLUMN = (
    "is the only one; columns are separated by commas or tabs, so convert the file if it has more, "
    "separated by"
)
_MOST_SHOWN = 80  # characters of a value in a reason
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LETTER = re.compile(r"[^\W\d]")


def csv_columns(
    head: bytes,
    parse_options: Any,
    line_of: Callable[[int], int],
    bags: bool,
    names: Sequence[str] = (),
) -> tuple[Column, ...]:
    """The columns of a file that begins with `head`, UTF-8 with a line of names if none are given.

    `line_of` turns a sample's number into its line. pa.ArrowInvalid where Arrow cannot parse it.
    """

    def parse(names: Sequence[str], **convert: Any) -> Any:
        # Arrow parses in this thread: a command that ends at once would abort while others parse.
        return pacsv.read_csv(
            pa.BufferReader(head),
            read_options=pacsv.ReadOptions(
                use_threads=False, block_size=max(len(head), 1), column_names=names
            ),
            parse_options=parse_options,
            convert_options=pacsv.ConvertOptions(**convert),
        )

    schema = parse(names).schema
    columns = _columns(schema, parse, names, line_of, bags)
    at = next((i for i, c in enumerate(columns) if c.kind == "ids"), None)
    if names or at is None or columns[at].doubt:
        return tuple(columns)
    # Here the line of names is read as values, under names by which nobody asks for them.
    if _names_are_alike(schema, parse([str(i) for i in range(len(schema))]).schema):
        columns[at] = replace(columns[at], doubt=_perhaps_a_sample())
    return tuple(columns)


def _columns(
    schema: Any,
    parse: Callable[..., Any],
    names: Sequence[str],
    line_of: Callable[[int], int],
    bags: bool,
) -> list[Column]:
    """The columns of `schema`, for which `parse` reads the beginning again where it must."""
    # Only the beginning is looked at: later fields of any column may be texts.
    columns = [replace(column_of(field, bags), texts=True) for field in schema]
    if len(columns) == 1 and (found := re.search(r"[;|\t]", columns[0].name)):
        columns[0] = replace(columns[0], doubt=f"{_ONE_COLUMN} {found[0]!r}")
    numbers = [c.name for c in columns if c.kind == "dense"]
    texts = [] if bags else [f.name for f in schema if is_text(f.type)]
    if not (numbers or texts) or len({c.name for c in columns}) < len(columns):
        return columns
    table = parse(
        names,
        column_types=dict.fromkeys([*numbers, *texts], pa.string()),
        include_columns=[*numbers, *texts],
        strings_can_be_null=True,
    )
    odd = {name: _first_that_is_no_id(table[name].combine_chunks()) for name in numbers}
    doubts = {name: _looks_like_bags(table[name].combine_chunks()) for name in texts}
    return [
        _judged(c, odd[c.name], line_of)
        if c.name in odd
        else replace(c, doubt=c.doubt or doubts.get(c.name, ""))
        for c in columns
    ]


def are_values(names: Sequence[str]) -> bool:
    """Whether the fields of a file's first line are rather values than names: numbers, dates and
    others without a letter, and empty ones."""
    given = [name.strip() for name in names if name.strip()]
    return bool(given) and all(_NUMBER.fullmatch(n) or not _LETTER.search(n) for n in given)


def _names_are_alike(without: Any, with_names: Any) -> bool:
    """Whether the first line, of names, is like those below: where these have no texts, it has none
    either, and somewhere it is not empty.

    These are the types of the columns `without` it and `with_names` as values.
    """
    alike = [
        not is_text(new.type)
        for old, new in zip(without, with_names, strict=True)
        if old.name and not (is_text(old.type) or pa.types.is_null(old.type))
    ]
    return bool(alike) and all(alike)


def _looks_like_bags(texts: Any) -> str:
    """Why the texts are rather several ids each; nothing where they are hardly so.

    Most of them have a bar or a semicolon, or all are whole numbers with spaces or commas between.
    """
    given = texts.drop_null()
    for mark in "|; ,":
        has = pc.match_substring(given, mark)
        number = pc.sum(has).as_py() or 0
        if mark in " ,":
            form = rf"^[\[({{ ]*[0-9]+ *({re.escape(mark)} *[0-9]+ *)*[\])}} ]*$"
            suspect = number > 0 and pc.all(pc.match_substring_regex(given, form)).as_py()
        else:
            suspect = 2 * number > len(given)
        if suspect:
            shown = given.filter(has)[0].as_py()[:_MOST_SHOWN]
            return (
                f"values such as {shown!r} are one id each; if they are several ids, pass "
                f"{spoken(f'--list-separator {mark!r}', f'list_separator={mark!r}')}"
            )
    return ""


def _judged(column: Column, odd: tuple[int, str] | None, line_of: Callable[[int], int]) -> Column:
    """A column of numbers as one of ids where none of them is `odd`, else with the reason."""
    if odd is None:
        return replace(column, kind="ids", reason="")
    sample, value = odd
    needed = "no whole number" if re.search("[^0-9+-]", value) else "no 64-bit number"
    return replace(column, reason=f"{value[:_MOST_SHOWN]!r} in line {line_of(sample)} is {needed}")


def _first_that_is_no_id(texts: Any) -> tuple[int, str] | None:
    """The first of the texts that is no whole number of 64 bits, and its place; nulls are none."""
    trimmed = pc.utf8_trim_whitespace(texts)
    short = pc.match_substring_regex(trimmed, "^-?[0-9]{1,18}$")
    for sample in np.flatnonzero(~pc.fill_null(short, True).to_numpy(zero_copy_only=False)):
        value = trimmed[int(sample)].as_py()
        if not re.fullmatch("-?[0-9]{19,20}", value) or not _LEAST <= int(value) < _LIMIT:
            return int(sample), value
    return None


def _perhaps_a_sample() -> str:
    """Return the doubt about a column whose name is like its values."""
    return (
        "is named by the first line, which is like those below it; if it is a sample, not the "
        f"names of columns, pass {spoken('--no-header', 'no_header=True')}"
    )
