"""How often rows will be read in as many further samples, from how often they were.

Good and Turing's estimate (Good, Biometrika 1953): rows that n samples of a log read will be read,
together, as often as those were that n + 1 samples read. So the rows that were never read will be
read as often as those that were read once; these about as often as those that were read twice, and
so on. It is used of rows that few samples read, as Katz (1987) and Gale and Sampson (1995) do: a
count above `SELDOM` is its own best estimate. Each table keeps its accesses, as a sample reads as
many rows of it whatever they are.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot

SELDOM = 5  # samples with a row


class ExpectedCounts(NamedTuple):
    """The counts that as many further samples are expected to have, of each entry, [E].

    differs: where they are not those of the log.
    """

    accesses: Floats
    samples_with_row: Floats
    differs: NDArray[np.bool_]


def as_many(table: Ints, accesses: Ints, samples_with_row: Ints, rows: Ints) -> ExpectedCounts:
    """The counts as they are."""
    counts = accesses.astype(np.float64), samples_with_row.astype(np.float64)
    return ExpectedCounts(*counts, np.zeros(len(table), dtype=bool))


def expected_counts(
    table: Ints, accesses: Ints, samples_with_row: Ints, rows: Ints
) -> ExpectedCounts:
    """The expected counts of rows: `rows[e]` rows of `table[e]` have `accesses[e]` accesses and are
    in `samples_with_row[e]` samples.

    Accesses are expected in proportion to samples, so that both follow from table and samples with
    the row alone.
    """
    tables = int(table.max(initial=-1)) + 1
    few = samples_with_row <= SELDOM + 1
    numbers = np.zeros((tables, SELDOM + 2), dtype=np.int64)
    np.add.at(numbers, (table[few], samples_with_row[few]), rows[few])
    each = np.array([good_turing(of_table) for of_table in numbers]).reshape(tables, SELDOM + 1)
    seldom = samples_with_row <= SELDOM
    found = np.where(seldom, each[table, np.minimum(samples_with_row, SELDOM)], samples_with_row)
    # Accesses in proportion to samples, those of an unread row as of others; and the table's sum.
    per_table = partial(np.bincount, table, minlength=tables)
    counted = per_table(np.where(seldom, accesses * rows, 0))
    samples = per_table(np.where(seldom, samples_with_row * rows, 0))
    of_sample = np.where(samples_with_row > 0, accesses, (counted / np.maximum(samples, 1))[table])
    expected = found * of_sample / np.maximum(samples_with_row, 1)
    foreseen = per_table(np.where(seldom, expected * rows, 0))
    kept = np.where(foreseen > 0, counted / np.where(foreseen > 0, foreseen, 1), 1.0)
    expected = np.where(seldom, expected * kept[table], accesses)
    return ExpectedCounts(expected, np.minimum(found, expected), expected != accesses)


def good_turing(numbers: Ints) -> Floats:
    """How many of as many further samples read a row that n samples read, [SELDOM + 1], where
    `numbers[n]` rows are read by n samples, for n up to SELDOM + 1.

    Expected in all are as many samples as there were, so that estimates are scaled; and none is
    less than that of a smaller n, which noise alone makes.
    """
    counts = np.arange(SELDOM + 1, dtype=np.float64)
    there = numbers[:-1] > 0
    weights = numbers[:-1][there].astype(np.float64)
    total = float(dot(counts[there], weights))
    mass = ((counts + 1) * numbers[1:])[there]
    if not there[0] or total == 0 or not mass.any():
        return counts
    each = _ascending(mass / weights * (total / mass.sum()), weights)
    # Rows of the largest n must not pass those beyond, whose counts stay as they are.
    top, beyond = each[-1], counts[there][-1] + 1
    if top > beyond:
        each += (counts[there] - each) * ((top - beyond) / (top - beyond + 1))
    found = counts.copy()
    found[there] = each
    return found


def _ascending(values: Floats, weights: Floats) -> Floats:
    """The nearest values that do not descend, in least squares by `weights`; their weighted sum is
    that of the given ones. By pooling neighbours that descend."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, u, m), (b, v, n) = pools[-2:]
            pools[-2:] = [((a * u + b * v) / (u + v), u + v, m + n)]
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])
