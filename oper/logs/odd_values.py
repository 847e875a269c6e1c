"""Odd values of a column: values that are not whole numbers, in a column of numbers.

A single odd value turns all ids of its column into texts, and their vocabulary gives them other
rows than the model has. Usually the value is not an id: a line of types below the names, a line of
totals, `NULL`, a number with a point or a thousands separator. The distinct values of each column
of texts are therefore checked, over the whole log if it is read before it is counted:

- stray: all but one of the values, or all but 1 in 20, are numbers;
- fraction: all are numbers, and some have a point, an exponent or a decimal comma;
- form: the others are numbers in another form than plain digits, such as `1_000` or `'1'`;
- large: there are no texts, and all integers except a few are row ids.

Other columns hold text ids: words, hashes, UUIDs, codes of letters and digits. Hexadecimal digits
without `0x`, or more than 7 of them, are taken for hashes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oper.base.spoken import option
from oper.logs.batches.batch import Batch, Jagged
from oper.logs.batches.number_texts import ABSENT, COMMA, SPACES, no_plain_number
from oper.logs.row_ids import without
from oper.logs.vocabulary import ValueCounter

_FEW = 20  # A column has few odd values if it has at least so many numbers per odd value.
_LEAST_NUMBERS, _CERTAIN_NUMBERS = 2, 3  # with a single odd value
_FRACTION = r"^[+-]?([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)$"
# Around the digits: spaces and characters of no width, of all scripts, and quotes.
_AROUND = r"[\s\pZ\p{Cf}='\"`‘’“”«»]*"
_DIGITS = r"0[xX][0-9a-fA-F]{1,7}|0[bB][01]+|0[oO][0-7]+|\p{Nd}+|\p{Nd}{1,3}([_.,'’\pZ]\p{Nd}{3})+"
_FORM = rf"^{_AROUND}[+−-]?({_DIGITS})[lL]?{_AROUND}$"

Kind = Literal["stray", "fraction", "form", "large"]


@dataclass(frozen=True)
class OddValues:
    """The distinct values of a column that are odd, as texts or int64.

    certain: too few for a column of texts.
    """

    kind: Kind
    values: Any
    certain: bool = False

    def first(self, batches: Iterator[Batch], missing: str | None) -> tuple[str, str]:
        """Return the first odd value in the batches, and its place."""
        for batch in batches:
            for raw in batch.features.values():
                ids = without(raw, missing)
                odd = self._are_odd(ids)
                if odd.any():
                    position = int(np.argmax(odd))
                    place = batch.location.of(ids.sample_of(position))
                    value = ids.values[position]
                    text = isinstance(value, pa.Scalar)
                    return value.as_py() if text else ids.shown(position), place
        raise AssertionError("the log has changed since its values were counted")

    def _are_odd(self, ids: Jagged) -> NDArray[np.bool_]:
        values = ids.values
        if not isinstance(values, pa.DictionaryArray):
            return np.isin(values, self.values if self.kind == "large" else [])
        if self.kind == "large":
            return np.zeros(len(values), bool)
        odd = pc.is_in(values.dictionary, self.values).to_numpy(zero_copy_only=False)
        return np.asarray(odd[values.indices.to_numpy()])

    def reason(self, value: str, place: str) -> str:
        """Return the reason to leave a column of fractions out."""
        if "," in value:
            return (
                f"{value[:80]!r} in {place}, is a number with a comma, or several ids, for which "
                f"pass {option('--list-separator', ',')}"
            )
        return f"{value[:80]!r} in {place}, is {no_plain_number(value)}"

    def refusal(self, column: str, value: str, place: str) -> str:
        """Return the error of a column with a stray value."""
        return (
            f"{place}: column {column!r} is {value[:80]!r}, and nearly all of its different "
            f"values are numbers; correct or remove the line, pass {_missing(value)} if the value "
            f"stands for a missing id, or name the column with {option('--columns')} if its ids "
            "are texts"
        )

    def warning(self, value: str, place: str) -> str:
        """Return the effect of an odd value on a column that is read all the same."""
        match self.kind:
            case "stray":
                return (
                    f"{value[:80]!r} in {place}, stands among numbers, so that all values are read "
                    f"as texts; correct or remove the line, or pass {_missing(value)} if the value "
                    "stands for a missing id"
                )
            case "fraction":
                return f"{self.reason(value, place)}; all values are read as texts"
            case "form":
                return (
                    f"{value[:80]!r} in {place}, and values like it look like numbers and are read "
                    "as texts; if they are numbers, write them in plain digits"
                )
            case "large":
                return (
                    f"{value[:80]} in {place}, is not a row id below 2^31, so that all values get "
                    "a vocabulary and its row numbers; if the value is wrong, correct the log, or "
                    f"pass {option('--missing')} if it stands for a missing id"
                )


def _missing(value: str) -> str:
    return option("--missing", value[:80])


def odd_values(counter: ValueCounter, most_rows: int) -> OddValues | None:
    """Return the odd values of a column, by its distinct values; None if it has none.

    `most_rows`: integers from 0 to most_rows − 1 are row ids.
    """
    integers, _ = counter.totals("integers")
    texts, _ = counter.totals("texts")
    if not len(texts):
        return _large(integers.to_numpy(), counter.unsigned, most_rows)
    trimmed = pc.utf8_trim(texts, SPACES)

    def matches(pattern: str) -> NDArray[np.bool_]:
        mask = pc.match_substring_regex(trimmed, pattern)
        return np.asarray(mask.to_numpy(zero_copy_only=False))

    fraction, comma = matches(_FRACTION), matches(COMMA)
    large = matches("^(-?[0-9]{19}|1[0-9]{19})$")
    large[large] = [_has_64_bits(text) for text in trimmed.filter(pa.array(large)).to_pylist()]
    absent = pc.is_in(trimmed, pa.array(ABSENT)).to_numpy(zero_copy_only=False)
    point = fraction | comma
    if (point | large | absent).all() and (point.any() or not absent.any()):
        return OddValues("fraction", texts.filter(pa.array(point))) if point.any() else None
    numbers = len(integers) + int(np.count_nonzero(fraction | large))
    other = ~(fraction | large | absent)
    # All words for a missing value count as one.
    strays = int(np.count_nonzero(other)) or 1
    if (strays == 1 and numbers >= _LEAST_NUMBERS) or _FEW * strays <= numbers:
        odd = other | absent
        return OddValues("stray", texts.filter(pa.array(odd)), numbers >= _CERTAIN_NUMBERS)
    form = (matches(_FORM) & ~matches("^-?[0-9]+$")) | comma
    if (form | fraction | large | absent).all():
        return OddValues("form", texts.filter(pa.array(form)))
    return None


def _has_64_bits(digits: str) -> bool:
    return -(2**63) <= int(digits) < 2**64


def _large(
    integers: NDArray[np.int64] | NDArray[np.uint64], unsigned: bool, most_rows: int
) -> OddValues | None:
    is_large = integers.view(np.uint64) >= most_rows
    # Negative ids stop the command or are skipped, and make no vocabulary.
    is_large &= (integers.view(np.int64) >= 0) | unsigned
    large = integers[is_large]
    small = len(integers) - len(large)
    few = (len(large) == 1 and small >= _LEAST_NUMBERS) or 0 < _FEW * len(large) <= small
    return OddValues("large", large) if few else None
