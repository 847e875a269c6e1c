"""Kinds of a CSV file's columns, by the file's beginning: ids, numbers, or neither.

The rule is that of Parquet: a column of whole numbers below 2^64 holds ids. Arrow reads a column in
which one of them is 2^63 or more as floating-point numbers, so such columns are read again as
texts. A column that is not of ids has a reason that names the first invalid value.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from oper.base.spoken import option
from oper.logs.batches.columns import Column
from oper.logs.batches.log_options import LogOptions
from oper.logs.batches.number_texts import (
    ABSENT,
    COMMA,
    SPACES,
    are_integers,
    are_pointed,
    no_plain_number,
)
from oper.logs.batches.timestamps import is_text
from oper.logs.formats.arrow_columns import column_of
from oper.logs.formats.delimiters import ANY

_LEAST, _LIMIT = -(2**63), 2**64
_LIST_SEPARATORS = ("|", ";", "^", "\x02", "\x1d", " ", ",")
_MOST_SHOWN = 80  # characters of a value in a reason


def csv_columns(
    head: bytes,
    names: Sequence[str],
    parse_options: Any,
    line_of: Callable[[int], int],
    options: LogOptions,
) -> tuple[Column, ...]:
    """Return the columns of a file that begins with `head`, UTF-8, whose first line has the names
    unless it is a sample by `options`.

    `line_of` turns a sample's number into its line. Raise pa.ArrowInvalid if Arrow cannot parse it.
    """

    def parse(names: Sequence[str], text: bytes, **convert: Any) -> Any:
        # Arrow parses in this thread: a command that ends at once would abort while others parse.
        return pacsv.read_csv(
            pa.BufferReader(text),
            read_options=pacsv.ReadOptions(
                use_threads=False, block_size=max(len(text), 1), column_names=names
            ),
            parse_options=parse_options,
            convert_options=pacsv.ConvertOptions(null_values=absent, **convert),
        )

    absent = [*ABSENT, *([] if options.missing is None else [options.missing])]
    samples = head if options.no_header else _without_first_line(head)
    if not samples.strip():
        return tuple(replace(column_of(pa.field(n, pa.null())), texts=True) for n in names)
    schema = parse(names, samples).schema
    columns = _columns(schema, partial(parse, names, samples), line_of, options)
    at = next((i for i, c in enumerate(columns) if c.kind == "ids"), None)
    if options.no_header or at is None or columns[at].doubt:
        return tuple(columns)
    # Here the line of names is read as values, under other names.
    if _names_are_alike(schema, parse([str(i) for i in range(len(schema))], head).schema):
        columns[at] = replace(columns[at], doubt=_perhaps_a_sample())
    return tuple(columns)


def _without_first_line(head: bytes) -> bytes:
    """Return the lines below the first one that is not empty."""
    lines = re.match(rb"[\r\n]*[^\n]*\n?", head)
    return head[lines.end() :] if lines else head


def _columns(
    schema: Any, parse: Callable[..., Any], line_of: Callable[[int], int], options: LogOptions
) -> list[Column]:
    """Return the columns of `schema`; `parse` reads the beginning again if necessary."""
    bags = options.list_separator is not None
    # Only the beginning is looked at: later fields of any column may be texts.
    columns = [replace(column_of(field, bags), texts=True) for field in schema]
    unread = ANY.search(columns[0].name) if len(columns) == 1 else None
    if unread and options.delimiter is None:
        columns[0] = replace(columns[0], doubt=_only_column(unread[0]))
    numbers = [c.name for c in columns if c.kind == "dense"]
    texts = [] if bags else [f.name for f in schema if is_text(f.type)]
    if not (numbers or texts) or len({c.name for c in columns}) < len(columns):
        return columns
    table = parse(
        column_types=dict.fromkeys([*numbers, *texts], pa.string()),
        include_columns=[*numbers, *texts],
        strings_can_be_null=True,
    )
    result = []
    for column in columns:
        if column.name in numbers or column.name in texts:
            values = table[column.name].combine_chunks()
            column = _with_other_values(column, values.drop_null())
            if column.name in numbers:
                column = _judged(column, _first_that_is_no_id(values), line_of)
            else:
                doubt = column.doubt or _looks_like_bags(values) or _has_spaces(values.drop_null())
                column = replace(column, doubt=doubt)
        result.append(column)
    return result


def _only_column(unread: str) -> str:
    """Return the doubt about a single column whose lines have a character that separates none."""
    return (
        "is the only one, because no character separates columns in every line; pass "
        f"{option('--delimiter')} if columns are separated by {unread!r}"
    )


def _with_other_values(column: Column, given: Any) -> Column:
    """Return the column with a whole number with a point, if it has many, and with a value that is
    not a whole number."""
    distinct = pc.utf8_trim(given.unique(), SPACES)
    distinct = distinct.filter(pc.not_equal(distinct, ""))
    pointed = are_pointed(distinct)
    other = pc.invert(pc.or_(are_integers(distinct), pointed))
    # Of texts, a few may look like numbers.
    many = column.kind == "dense" or 2 * (pc.sum(pointed).as_py() or 0) > len(distinct)
    return replace(
        column,
        pointed=_first_text(distinct, pointed) if many else "",
        other=_first_text(distinct, other),
    )


def _has_spaces(given: Any) -> str:
    """Return a doubt about texts of which some begin or end with a space."""
    trimmed = pc.utf8_trim(given, SPACES)
    spaced = pc.and_(pc.not_equal(given, trimmed), pc.not_equal(trimmed, ""))
    shown = _first_text(given, pc.and_(spaced, pc.invert(are_integers(trimmed))))
    return (
        f"values such as {shown!r} begin or end with a space, which is part of the id; remove it "
        "from the log unless the model's input has it too"
        if shown
        else ""
    )


def _first_text(texts: Any, mask: Any) -> str:
    selected = texts.filter(mask)
    return str(selected[0].as_py()[:_MOST_SHOWN]) if len(selected) else ""


def _names_are_alike(without: Any, with_names: Any) -> bool:
    """Return whether the first line, of names, is like those below: it is not empty, and has texts
    only in columns in which these have texts.

    These are the types of the columns `without` it and `with_names` as values.
    """
    alike = [
        not is_text(new.type)
        for old, new in zip(without, with_names, strict=True)
        if old.name and not (is_text(old.type) or pa.types.is_null(old.type))
    ]
    return bool(alike) and all(alike)


def _looks_like_bags(texts: Any) -> str:
    """Return why the texts are rather several ids each; nothing if they hardly are.

    Most of them have a bar or the like, or all are whole numbers with spaces or commas between.
    """
    values = texts.drop_null()
    for mark in _LIST_SEPARATORS:
        has = pc.match_substring(values, mark)
        number = pc.sum(has).as_py() or 0
        if mark in " ,":
            form = rf"^[\[({{ ]*[0-9]+ *({re.escape(mark)} *[0-9]+ *)*[\])}} ]*$"
            suspect = number > 0 and pc.all(pc.match_substring_regex(values, form)).as_py()
            # Two ids or a decimal comma: the whole log tells (odd_values.py).
            suspect &= not pc.all(pc.match_substring_regex(values, f"{COMMA}|^[0-9]+$")).as_py()
        else:
            suspect = 2 * number > len(values)
        if suspect:
            shown = values.filter(has)[0].as_py()[:_MOST_SHOWN]
            return (
                f"values such as {shown!r} are one id each; if they are several ids, pass "
                f"{option('--list-separator', mark)}"
            )
    return ""


def _judged(column: Column, odd: tuple[int, str] | None, line_of: Callable[[int], int]) -> Column:
    """Return a column of numbers as one of ids if none of them is `odd`, else with the reason."""
    if odd is None:
        return replace(column, kind="ids", reason="")
    sample, value = odd
    is_not = no_plain_number(value) if re.search("[^0-9+-]", value) else "not a 64-bit number"
    is_not = "not in plain digits" if value.startswith("+") else is_not
    return replace(column, reason=f"{value[:_MOST_SHOWN]!r} in line {line_of(sample)} is {is_not}")


def _first_that_is_no_id(texts: Any) -> tuple[int, str] | None:
    """Return the first of the texts that is not a whole number of 64 bits, and its place."""
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
        f"names of columns, pass {option('--no-header', True)}"
    )
