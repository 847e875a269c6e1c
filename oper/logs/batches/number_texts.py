"""Numbers in text files: spaces around them, and whole numbers that are written with a point.

Pandas writes a column of integers with missing values as `1.0,,3.0`, because it holds them as
floating-point numbers; numpy.savetxt writes `1.000000e+00`. If all values of a column are whole
numbers, the column has the integers, like for the same floats in Parquet. If some are not, `6.0` is
a text like the others.

A text file is read as a stream, so a column is judged by the beginning of its files, and each pass
over the log watches the rest: a log is refused if both a whole number with a point and another
value occur in a column only after the beginnings. Rows therefore never depend on the place of a
value in the log.
"""

import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from oper.base.errors import OperError
from oper.base.spoken import option

SPACES = " \t"
# An exponent needs its sign, because `12e4` may be hexadecimal digits.
_POINTED = r"^-?[0-9]+(\.[0-9]*([eE][+-][0-9]{1,3})?|[eE][+-][0-9]{1,3})$"
_INTEGER = "^-?[0-9]+$"
COMMA = "^[+-]?[0-9]+,[0-9]+$"  # a decimal comma, or two ids
_MOST_EXACT = 2.0**53  # A float from here on may stand for several integers.
ABSENT = tuple(pacsv.ConvertOptions().null_values)  # "NaN", "NULL", "N/A" and others


def are_integers(texts: Any) -> Any:
    """Return a mask of the texts that are integers as they stand."""
    return pc.match_substring_regex(texts, _INTEGER)


def are_pointed(texts: Any) -> Any:
    """Return a mask of the texts that are whole numbers with a point or an exponent."""
    mask = pc.fill_null(pc.match_substring_regex(texts, _POINTED), False)
    mask = mask.to_numpy(zero_copy_only=False).copy()
    values = texts.filter(pa.array(mask)).cast(pa.float64()).to_numpy(zero_copy_only=False)
    mask[mask] = values == np.floor(values)
    return pa.array(mask)


def no_plain_number(text: str) -> str:
    """Return the reason that a value is not a whole number in plain digits."""
    if are_pointed(pa.array([text]))[0].as_py():
        return f"a whole number with a point; {option('--columns')} reads a column of such as ids"
    return "not a whole number"


class NumberTexts:
    """The numbers in the texts of columns, over one pass of a log."""

    def __init__(self, as_texts: Collection[str], missing: str | None) -> None:
        """Begin a pass. `as_texts`: columns whose beginnings have values that are not whole
        numbers. `missing`: the value that means "no id", which is ignored."""
        self._as_texts = as_texts
        self._absent = pa.array([*ABSENT, *([] if missing is None else [missing])])
        # A number may be an id of a table that has another missing value.
        self._missing = missing if missing and not re.fullmatch("-?[0-9]+", missing) else None
        self._pointed: dict[str, str] = {}  # the place of the first such value, by column
        self._other: dict[str, str] = {}

    def read(self, texts: Any, name: str, place: Callable[[int], str]) -> Any:
        """Return the distinct texts of a column with its numbers as plain integers.

        Missing values become empty texts. `place` returns the place of a text in the log, by its
        number. Raise OperError if the column mixes whole numbers with a point and other values, or
        such a number is too large to be exact.
        """
        trimmed = pc.utf8_trim(texts, SPACES)
        integers = are_integers(trimmed)
        blank = pc.equal(pc.binary_length(trimmed), 0)
        texts = pc.if_else(pc.or_(integers, blank), trimmed, texts)
        if name in self._as_texts:
            return texts
        is_absent = pc.match_substring_regex(trimmed, "^[+-]?(nan|NaN|NAN)$")
        pointed = are_pointed(trimmed)
        known = pc.or_(pc.or_(integers, pointed), pc.is_in(trimmed, self._absent))
        for mask, first in ((pointed, self._pointed), (pc.invert(known), self._other)):
            if name not in first and pc.any(mask).as_py():
                first[name] = _first(texts, mask, place)
        if name in self._pointed and name in self._other:
            raise OperError(
                f"column {name!r} has {self._pointed[name]}, and {self._other[name]}: a column of "
                "whole numbers that are written with a point must have no other values; correct "
                f"the log, pass {option('--missing')} if a value stands for a missing id, or "
                "write the column to Parquet as integers or as texts"
            )
        if self._missing is not None:
            is_absent = pc.or_(is_absent, pc.equal(trimmed, self._missing))
            pointed = pc.and_(pointed, pc.invert(is_absent))
        texts = pc.if_else(is_absent, "", texts)
        if not pc.any(pointed).as_py():
            return texts
        values = trimmed.filter(pointed).cast(pa.float64()).to_numpy(zero_copy_only=False)
        if np.abs(values).max() >= _MOST_EXACT:
            inexact = np.zeros(len(trimmed), bool)
            inexact[np.flatnonzero(pointed)] = np.abs(values) >= _MOST_EXACT
            raise OperError(
                f"column {name!r} has {_first(texts, pa.array(inexact), place)}, a floating-point "
                "number of 2^53 or more, which may stand for several ids; write the ids as "
                f"integers, or leave the column out with {option('--columns')}"
            )
        plain = pa.array(values.astype(np.int64)).cast(pa.string())
        return pc.replace_with_mask(texts, pointed, plain)


def _first(texts: Any, mask: Any, place: Callable[[int], str]) -> str:
    position = int(np.argmax(mask.to_numpy(zero_copy_only=False)))
    return f"{texts[position].as_py()[:80]!r} in {place(position)}"
