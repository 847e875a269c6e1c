"""The first value of a column of row ids that is none, and gives the whole column a vocabulary."""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oper.logs.batches.batch import Jagged, Location
from oper.logs.batches.text_numbers import decimals

_MOST = 0.9  # of the values up to the first batch with another one, that are row ids


class StrayValue:
    """Finds it, batch by batch; nothing more is looked at after the batch that has it.

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
        if not self._bad or self._good < _MOST * (self._good + self._bad):
            return ""
        return (
            f"{self._first}, is no row id from 0 to {self._rows - 1:,}, so all values of the "
            "column get a vocabulary and its row numbers; if the value is wrong, correct the log, "
            "or pass --missing where it means that there is no id"
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
