"""A look at a log's first batch: which columns are times or numbers of samples, not features.

Whatever rule makes rows of a column's values, its beginning shows it: times are dates in one unit,
close together; the samples' numbers count up, or, in a log that was shuffled, all differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oper.logs.batches.batch import Jagged
from oper.logs.batches.timestamps import PER_SECOND, UNIT_NAMES, date_text, guess_unit
from oper.logs.log import Log
from oper.logs.row_ids import without

# Fewer values that differ may do so by chance, and fewer hashes of 32 bits may be times close
# together: of ten, one in 100,000.
MANY_VALUES, ALL_DISTINCT = 10_000, 0.9
_LEAST_TIMES, _LONGEST_SECONDS = 10, 25 * 365 * 86_400


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
