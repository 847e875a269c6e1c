"""Raw values to row ids, by a table's rule: dense, hash or vocab."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.logs.batches.batch import Jagged, Location
from oper.logs.batches.log_options import OnBadId
from oper.logs.batches.text_numbers import decimals, hash64
from oper.logs.vocabulary import Vocabulary
from oper.tables.table import Table

_DECIMAL = re.compile("-?[0-9]{1,20}")
_WHOLE = re.compile(r"(-?[0-9]{1,15})\.0*")  # as texts that are whole numbers are read


class BadIdError(OperError):
    """Error of an id outside its table: the sentence `found`, and the remedy."""

    def __init__(self, found: str, remedy: str) -> None:
        super().__init__(f"{found}; {remedy}")
        self.found = found


class IdMapper:
    """Mapper of the values of one table's columns; `skipped` counts those left out."""

    def __init__(
        self, table: Table, vocabulary: Vocabulary | None = None, on_bad_id: OnBadId = "error"
    ) -> None:
        if table.ids.kind == "vocab" and vocabulary is None:
            raise OperError(
                f"table {table.name!r}: its ids need a vocabulary, and none was given; pass the "
                "folder of the profile or plan it was saved in"
            )
        if vocabulary is not None and len(vocabulary) > table.rows:
            raise OperError(
                f"table {table.name!r}: has {table.rows:,} rows and its vocabulary "
                f"{len(vocabulary):,}; they are from different profiles"
            )
        self.table = table
        self.skipped = 0
        self._vocabulary = vocabulary
        self._on_bad_id = on_bad_id

    def map(self, raw: Jagged, column: str, location: Location) -> Jagged:
        """Return row ids int64 of a batch's raw values; `location` is the batch's.

        Raise BadIdError if a dense id is not a row of the table, unless such ids are skipped.
        """
        raw = without(raw, self.table.ids.missing)
        match self.table.ids.kind:
            case "dense":
                return self._dense(raw, column, location)
            case "hash":
                return Jagged(self._hash(raw.values), raw.lengths)
            case _:
                return Jagged(self._look_up(raw.values), raw.lengths)

    def _dense(self, raw: Jagged, column: str, location: Location) -> Jagged:
        values = raw.values
        if isinstance(values, pa.DictionaryArray):
            is_integer, integers = decimals(values.dictionary)
            # -1 is not a row of any table, so texts are refused below like other bad ids.
            by_code = np.full(len(is_integer), -1, dtype=np.int64)
            by_code[is_integer] = integers
            values = by_code[values.indices.to_numpy()]
        rows = self.table.rows
        # One comparison checks both ends: negative ids are huge as unsigned integers.
        good: NDArray[np.bool_] = values.view(np.uint64) < np.uint64(rows)
        if good.all():
            return Jagged(values, raw.lengths)
        if self._on_bad_id == "error":
            bad = int(np.argmin(good))
            raise self._complaint(raw, bad, column, location)
        self.skipped += int(len(good) - np.count_nonzero(good))
        return Jagged(values, raw.lengths).keep(good)

    def _complaint(self, raw: Jagged, position: int, column: str, location: Location) -> BadIdError:
        value = raw.values[position]
        value = value.as_py() if isinstance(value, pa.Scalar) else int(value)
        if raw.unsigned:
            value %= 2**64
        shown = raw.shown(position)
        where = location.of(raw.sample_of(position))
        rows = self.table.rows
        if isinstance(value, str) and not _DECIMAL.fullmatch(value):
            remedy = "give the table `ids: hash` or `ids: vocab`"
        elif int(value) < 0:
            remedy = f"{missing_is(value)} if it stands for a missing id"
        elif int(value) < 1 << 31:
            remedy = (
                f"give the table at least {int(value) + 1:,} rows, or `ids: hash` or `ids: vocab`"
            )
        else:
            remedy = "give the table `ids: hash` or `ids: vocab`"
        return BadIdError(
            f"{where}: expected ids from 0 to {rows - 1:,} in column {column!r}, as table "
            f"{self.table.name!r} has {rows:,} rows, got {shown:.200}",
            f"{remedy}, or skip such ids with {option('--on-bad-id', 'skip')}",
        )

    def _hash(self, values: Any) -> Ints:
        rows = self.table.rows
        if not isinstance(values, pa.DictionaryArray):
            return np.remainder(values, rows)
        is_integer, integers = decimals(values.dictionary)
        by_code = np.empty(len(is_integer), dtype=np.int64)
        by_code[is_integer] = np.remainder(integers, rows)
        texts = values.dictionary.filter(pa.array(~is_integer))
        by_code[~is_integer] = (hash64(texts) % np.uint64(rows)).astype(np.int64)
        return by_code[values.indices.to_numpy()]

    def _look_up(self, values: Any) -> Ints:
        assert self._vocabulary is not None
        if not isinstance(values, pa.DictionaryArray):
            # Only distinct values are looked up, because a binary search costs more than the hash
            # that finds them.
            coded = pa.array(values).dictionary_encode()
            return self._vocabulary.rows_of_integers(coded.dictionary.to_numpy())[
                coded.indices.to_numpy()
            ]
        is_integer, integers = decimals(values.dictionary)
        by_code = np.empty(len(is_integer), dtype=np.int64)
        by_code[is_integer] = self._vocabulary.rows_of_integers(integers)
        texts = values.dictionary.filter(pa.array(~is_integer))
        by_code[~is_integer] = self._vocabulary.rows_of_texts(texts)
        return by_code[values.indices.to_numpy()]


def missing_is(value: Any) -> str:
    """Return the remedy for a value that means "no id", for errors."""
    return f"pass {option('--missing', str(value))}"


def without(raw: Jagged, missing: str | None) -> Jagged:
    """Return the ids without those equal to `missing`, the value that means "no id".

    Texts become integers if `missing` was the only one that is not an integer.
    """
    if missing is None:
        return raw
    whole = _WHOLE.fullmatch(missing)
    if whole and not isinstance(raw.values, pa.DictionaryArray):
        missing = whole[1]
    number = int(missing) if _DECIMAL.fullmatch(missing) else None
    if number is not None and not -(2**63) <= number < 2 ** (64 if raw.unsigned else 63):
        number = None
    if isinstance(raw.values, pa.DictionaryArray):
        texts = raw.values.dictionary
        codes_are_integers, numbers = decimals(texts)
        same = np.zeros(len(texts), dtype=bool)
        if number is not None:
            same[codes_are_integers] = numbers == number
        else:
            same = pa.compute.equal(texts, missing).to_numpy(zero_copy_only=False)
        absent = same[raw.values.indices.to_numpy()]
        if (codes_are_integers | same).all():
            by_code = np.zeros(len(same), np.int64)
            by_code[codes_are_integers] = numbers
            raw = replace(raw, values=by_code[raw.values.indices.to_numpy()])
    elif number is not None:
        absent = (raw.values.view(np.uint64) if raw.unsigned else raw.values) == number
    else:
        return raw
    return raw.keep(~absent) if absent.any() else raw
