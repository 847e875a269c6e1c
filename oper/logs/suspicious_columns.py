"""Which columns of a log are hardly features, or not as they were meant, by their values.

Whatever rule makes rows of a column's values, its beginning shows whether it is a time or the
number of a sample: times are dates in one unit, close together; the samples' numbers count up, or,
in a log that was shuffled, all differ. A column of row ids with a stray value that is none would
become another table altogether.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oper.base.spoken import option
from oper.logs.batches.batch import Jagged, Location
from oper.logs.batches.text_numbers import decimals
from oper.logs.batches.timestamps import PER_SECOND, UNIT_NAMES, date_text, guess_unit
from oper.logs.log import Log
from oper.logs.row_ids import without

# Fewer values that differ may do so by chance, and fewer hashes of 32 bits may be times close
# together: of ten, one in 100,000.
MANY_VALUES, ALL_DISTINCT = 10_000, 0.9
_LEAST_TIMES, _LONGEST_SECONDS = 10, 25 * 365 * 86_400
# A column has a stray value if such a share of its values is row ids, up to the first batch with
# another one.
_STRAY = 0.9


@dataclass(frozen=True)
class Look:
    """What the first values of a column are: `finding`, if they are hardly a feature's, and how
    many there are, if nearly all differ (else 0)."""

    finding: str = ""
    different: int = 0


def first_look(log: Log, missing: Mapping[str, str | None]) -> dict[str, Look]:
    """The first values of columns, each without its value in `missing`, by name."""
    batch = next(log.batches(tuple(missing), ids_only=True))
    return {
        name: _look(without(batch.features[name], value), name in log.bags)
        for name, value in missing.items()
    }


def _look(ids: Jagged, bags: bool) -> Look:
    values = ids.values
    if isinstance(values, pa.DictionaryArray):
        different = len(pc.unique(values.indices))  # its dictionary may have more
        finding = "" if bags else _texts_of_times(values)
    else:
        different = len(np.unique(values))
        finding = "" if bags else _times(values)
        if not (bags or finding) and len(values) > MANY_VALUES and (values[1:] > values[:-1]).all():
            finding = f"its first {len(values):,} values count up, from sample to sample"
    many = different > max(MANY_VALUES, ALL_DISTINCT * len(values))
    return Look(finding, len(values) if many else 0)


def _times(values: NDArray[np.int64]) -> str:
    if len(values) < _LEAST_TIMES:
        return ""
    bounds = np.array([values.min(), values.max()], dtype=np.float64)
    unit = guess_unit(bounds)
    if unit is None or bounds[1] - bounds[0] > _LONGEST_SECONDS * PER_SECOND[unit]:
        return ""
    first, last = (date_text(bound / PER_SECOND[unit]) for bound in bounds.tolist())
    return (
        f"its first {len(values):,} values are dates from {first} to {last}, in {UNIT_NAMES[unit]} "
        "since 1970"
    )


def _texts_of_times(values: pa.DictionaryArray) -> str:
    if len(values) < _LEAST_TIMES:
        return ""
    try:
        values.dictionary.cast(pa.timestamp("us", "UTC" if _has_zone(values) else None))
    except pa.ArrowInvalid:
        return ""
    return f"its first {len(values):,} values are dates such as {values[0].as_py()!r}"


def _has_zone(values: pa.DictionaryArray) -> bool:
    text = values[0].as_py()
    return text.endswith("Z") or "+" in text


class StrayValue:
    """Finds the first value of a column that is no row id, batch by batch, and looks at nothing
    after the batch that has it.

    A column of texts or of hashes has no stray value: few of its values are row ids.
    """

    def __init__(self, rows: int) -> None:
        """`rows`: integers from 0 to rows − 1 are row ids."""
        self._rows = rows
        self._good = self._bad = 0
        self._first = ""

    def add(self, ids: Jagged, location: Location) -> None:
        """Look at a batch's values, of which there may be none."""
        if self._bad or not len(ids.values):
            return
        good = self._are_rows(ids)
        self._good += int(np.count_nonzero(good))
        self._bad += len(good) - int(np.count_nonzero(good))
        if self._bad:
            position = int(np.argmin(good))
            where = location.of(ids.sample_of(position))
            self._first = f"{ids.shown(position):.100} in {where}"

    def sentence(self) -> str:
        """What the stray value made of the column; empty where there is none."""
        if not self._bad or self._good < _STRAY * (self._good + self._bad):
            return ""
        return (
            f"{self._first}, is no row id from 0 to {self._rows - 1:,}, so all values of the "
            "column get a vocabulary and its row numbers; if the value is wrong, correct the log, "
            f"or pass {option('--missing')} where it means that there is no id"
        )

    def _are_rows(self, ids: Jagged) -> NDArray[np.bool_]:
        values = ids.values
        if not isinstance(values, pa.DictionaryArray):
            good = np.asarray(values.view(np.uint64) < self._rows)
            # Negative ids stop the command or are skipped, and make no vocabulary.
            return good if ids.unsigned else good | (values < 0)
        is_integer, integers = decimals(values.dictionary)
        by_code = np.zeros(len(is_integer), dtype=bool)
        by_code[is_integer] = integers.view(np.uint64) < self._rows
        return np.asarray(by_code[values.indices.to_numpy()])
