"""How often rows will be read in as many further samples, from how often they were.

Good and Turing's estimate (Good, Biometrika 1953): rows that n samples of a log read will be read,
together, as often as those were that n + 1 samples read. So the rows that were never read will be
read as often as those that were read once; these about as often as those that were read twice, and
so on. It is used of rows that few samples read, as Katz (1987) and Gale and Sampson (1995) do: a
count above `SELDOM` is its own best estimate. Each table keeps its accesses, as a sample reads as
many rows of it whatever they are.

The estimate takes all samples for draws of one law, so that nothing new ever appears. If two
windows of the log follow each other, the reads of the later one are measured instead (`Turnover`):
those of rows that n samples of the earlier window read, and the share of their reads that rows
read more often kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot

SELDOM = 5  # samples with a row


class ExpectedCounts(NamedTuple):
    """The counts that as many further samples are expected to have, of each entry, [E].

    differs: whether the accesses differ from the log's. alive: the share of the rows that have all
    of these counts; the other rows have none.
    """

    accesses: Floats
    samples_with_row: Floats
    differs: NDArray[np.bool_]
    alive: Floats


@dataclass(frozen=True)
class Turnover:
    """Figures of each table's rows, by the number of samples of a window that read them: 0 to
    SELDOM, and more, [T, SELDOM + 2].

    rows: number of rows. alive: those of them that the next window read. earlier, later: samples
    that read them in the window, and in as many samples of the next window, all rows together.
    """

    rows: Ints
    alive: Ints
    earlier: Floats
    later: Floats

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Whether a table was read in both windows, [T]."""
        read: NDArray[np.bool_] = (self.earlier.sum(axis=1) > 0) & (self.later.sum(axis=1) > 0)
        return read

    @property
    def kept(self) -> Floats:
        """Reads in the later window per read in the earlier one, [T]: of rows that more than SELDOM
        samples read or, in a table without such rows, of all rows that were read."""
        earlier, later = (
            np.stack([s[:, -1], s[:, 1:].sum(axis=1)]) for s in (self.earlier, self.later)
        )
        share = later / np.maximum(earlier, 1)
        return np.where(earlier[0] > 0, share[0], share[1])

    @property
    def each(self) -> Floats:
        """Samples of the later window that read a row that n samples of the earlier one read,
        [T, SELDOM + 1]. To the measured rows a row is added that keeps its reads as rows read often
        do, so that few measured rows say little. From n = 1 on the numbers ascend; unread rows may
        be read more, if new rows come and go."""
        reads = np.arange(SELDOM + 1, dtype=np.float64)
        weights = self.rows[:, :-1] + 1.0
        found: Floats = (self.later[:, :-1] + np.multiply.outer(self.kept, reads)) / weights
        for of_table, weight in zip(found[:, 1:], weights[:, 1:], strict=True):
            of_table[:] = _ascending(of_table, weight)
        return found

    @property
    def alive_shares(self) -> Floats:
        """The share of the rows that the later window read, [T, SELDOM + 2]; never 0."""
        shares: Floats = (self.alive + 1) / (self.rows + 1)
        return shares

    def select(self, tables: Sequence[int]) -> "Turnover":
        """Return the turnover of the tables with these numbers."""
        some = list(tables)
        return Turnover(self.rows[some], self.alive[some], self.earlier[some], self.later[some])


def as_many(accesses: Ints, samples_with_row: Ints) -> ExpectedCounts:
    """Return the log's own counts."""
    counts = accesses.astype(np.float64), samples_with_row.astype(np.float64)
    return ExpectedCounts(*counts, np.zeros(len(accesses), dtype=bool), np.ones(len(accesses)))


def expected_counts(
    table: Ints,
    accesses: Ints,
    samples_with_row: Ints,
    rows: Ints,
    turnover: Turnover | None = None,
) -> ExpectedCounts:
    """Return the expected counts of rows: `rows[e]` rows of `table[e]` have `accesses[e]` accesses
    and are in `samples_with_row[e]` samples. Tables with a measured `turnover` follow that.

    Accesses are expected in proportion to samples, so that both follow from table and samples with
    the row alone.
    """
    tables = int(table.max(initial=-1)) + 1
    few = samples_with_row <= SELDOM + 1
    numbers = np.zeros((tables, SELDOM + 2), dtype=np.int64)
    np.add.at(numbers, (table[few], samples_with_row[few]), rows[few])
    each = np.array([good_turing(of_table) for of_table in numbers]).reshape(tables, SELDOM + 1)
    kept = np.ones(tables)
    measured = np.zeros(tables, dtype=bool)
    alive = np.ones(len(table))
    if turnover is not None:
        measured = turnover.measured[:tables]
        each = np.where(measured[:, None], turnover.each[:tables], each)
        kept = np.where(measured, turnover.kept[:tables], 1.0)
        shares = turnover.alive_shares[table, np.minimum(samples_with_row, SELDOM + 1)]
        alive = np.where(measured[table], shares, 1.0)
    seldom = samples_with_row <= SELDOM
    often = samples_with_row * kept[table]
    found = np.where(seldom, each[table, np.minimum(samples_with_row, SELDOM)], often)
    estimated = seldom | measured[table]
    # Accesses are in proportion to samples, and each table keeps its sum. A row's own accesses per
    # sample count unless it is unread or, by the turnover, read seldom, whose accesses would order
    # rows by chance: such rows have the table's mean.
    own = (samples_with_row > 0) & ~(seldom & measured[table])
    per_table = partial(np.bincount, table, minlength=tables)
    counted = per_table(np.where(estimated, accesses * rows, 0))
    samples = per_table(np.where(estimated, samples_with_row * rows, 0))
    of_sample = np.where(own, accesses, (counted / np.maximum(samples, 1))[table])
    expected = found * of_sample / np.where(own, samples_with_row, 1)
    foreseen = per_table(np.where(estimated, expected * rows, 0))
    scale = np.where(foreseen > 0, counted / np.where(foreseen > 0, foreseen, 1), 1.0)[table]
    expected = np.where(estimated, expected * scale, accesses)
    found = np.where(measured[table], found * scale, found)
    return ExpectedCounts(expected, np.minimum(found, expected), expected != accesses, alive)


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
