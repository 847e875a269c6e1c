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
from oper.logs.formats.parquet import column_of

_LEAST, _LIMIT = -(2**63), 2**64
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
    numbers = [c.name for c in columns if c.kind == "dense"]
    if not numbers or len({c.name for c in columns}) < len(columns):
        return tuple(columns)
    table = pacsv.read_csv(
        pa.BufferReader(head),
        read_options=read,
        parse_options=parse_options,
        convert_options=pacsv.ConvertOptions(
            column_types=dict.fromkeys(numbers, pa.string()),
            include_columns=numbers,
            strings_can_be_null=True,
        ),
    )
    odd = {name: _first_that_is_no_id(table[name].combine_chunks()) for name in numbers}
    return tuple(_judged(c, odd[c.name], line_of) if c.name in odd else c for c in columns)


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
