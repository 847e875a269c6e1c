"""What the columns of a CSV file are, by the file's beginning: ids, numbers, or neither.

The rule is that of Parquet: a column of whole numbers below 2^64 holds ids. Arrow reads a column
in which one of them is 2^63 or more as floating-point numbers, so such columns are read again as
texts. A column that is not of ids has a reason that names the first value which is none.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from oper.logs.batches.columns import Column
from oper.logs.batches.timestamps import is_text
from oper.logs.formats.parquet import column_of

_LEAST, _LIMIT = -(2**63), 2**64
_ONE_COLUMN = (
    "is the only one; columns are separated by commas or tabs, so convert the file if it has more, "
    "separated by"
)
_MOST_SHOWN = 80  # characters of a value in a reason


def csv_columns(
    head: bytes, parse_options: Any, line_of: Callable[[int], int], bags: bool
) -> tuple[Column, ...]:
    """The columns of a file that begins with `head`, UTF-8 with a line of names.

    `line_of` turns a sample's number into its line. pa.ArrowInvalid where Arrow cannot parse it.
    """
    read = pacsv.ReadOptions(block_size=max(len(head), 1))
    schema = pacsv.open_csv(
        pa.BufferReader(head), read_options=read, parse_options=parse_options
    ).schema
    # Only the beginning is looked at: later fields of any column may be texts.
    columns = [replace(column_of(field, bags), texts=True) for field in schema]
    if len(columns) == 1 and (found := re.search(r"[;|\t]", columns[0].name)):
        columns[0] = replace(columns[0], doubt=f"{_ONE_COLUMN} {found[0]!r}")
    numbers = [c.name for c in columns if c.kind == "dense"]
    texts = [] if bags else [f.name for f in schema if is_text(f.type)]
    if not (numbers or texts) or len({c.name for c in columns}) < len(columns):
        return tuple(columns)
    table = pacsv.read_csv(
        pa.BufferReader(head),
        read_options=read,
        parse_options=parse_options,
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys([*numbers, *texts], pa.string()),
            include_columns=[*numbers, *texts],
            strings_can_be_null=True,
        ),
    )
    odd = {name: _first_that_is_no_id(table[name].combine_chunks()) for name in numbers}
    doubts = {name: _looks_like_bags(table[name].combine_chunks()) for name in texts}
    return tuple(
        _judged(c, odd[c.name], line_of)
        if c.name in odd
        else replace(c, doubt=c.doubt or doubts.get(c.name, ""))
        for c in columns
    )


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
                f"--list-separator {mark!r}"
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
