"""Expected counts of rows in as many further samples, from their counts in a log.

Good and Turing's estimate (Good, Biometrika 1953): rows that n samples of a log read will be read,
all together, as often as the rows that n + 1 samples read. So the rows never read so far will be
read as often as the rows read once were, these about as often as the rows read twice were, and so
on. The estimate is used for rows that few samples read, as by Katz (1987) and Gale and Sampson
(1995): a count above `SELDOM` is its own best estimate. Each table keeps its total of accesses,
because the number of its rows per sample stays the same.

The estimate takes all samples for draws from one distribution, without new rows. If two windows of
the log follow each other, the reads of the later window are measured instead (`Turnover`): the
reads of rows that n samples of the earlier window read, and the share of their reads that rows read
more often kept.
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
    """Expected counts of each entry in as many further samples, [E].

    differs: true if the accesses differ from the log's. alive: the share of the rows to which all
    of these counts go; the other rows have none.
    """

    accesses: Floats
    samples_with_row: Floats
    differs: NDArray[np.bool_]
    alive: Floats


@dataclass(frozen=True)
class Turnover:
    """Reads of each table's rows in two windows, by the number of samples of the earlier window
    that read them: 0 to SELDOM, and more, [T, SELDOM + 2].

    rows: number of rows. alive: number of them that the next window read. earlier, later: samples
    that read them in the window, and in as many samples of the next window, summed over the rows.
    """

    rows: Ints
    alive: Ints
    earlier: Floats
    later: Floats

    @property
    def measured(self) -> NDArray[np.bool_]:
        """True for tables that were read in both windows, [T]."""
        read: NDArray[np.bool_] = (self.earlier.sum(axis=1) > 0) & (self.later.sum(axis=1) > 0)
        return read

    @property
    def kept(self) -> Floats:
        """Reads in the later window per read in the earlier one, [T]: for rows that more than
        SELDOM samples read or, in a table without such rows, for all rows that were read."""
        earlier, later = (
            np.stack([s[:, -1], s[:, 1:].sum(axis=1)]) for s in (self.earlier, self.later)
        )
        share = later / np.maximum(earlier, 1)
        return np.where(earlier[0] > 0, share[0], share[1])

    @property
    def each(self) -> Floats:
        """Mean samples of the later window that read a row read by n samples of the earlier one,
        [T, SELDOM + 1]. One row that keeps its reads as often-read rows do is added to the measured
        ones, so that few measured rows weigh little. From n = 1 on the numbers ascend; unread rows
        may be read more often, if new rows come and go."""
        reads = np.arange(SELDOM + 1, dtype=np.float64)
        weights = self.rows[:, :-1] + 1.0
        per_row: Floats = (self.later[:, :-1] + np.multiply.outer(self.kept, reads)) / weights
        for of_table, weight in zip(per_row[:, 1:], weights[:, 1:], strict=True):
            of_table[:] = _ascending(of_table, weight)
        return per_row

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
    later_samples = np.array([good_turing(of_table) for of_table in numbers]).reshape(
        tables, SELDOM + 1
    )
    kept = np.ones(tables)
    measured = np.zeros(tables, dtype=bool)
    alive = np.ones(len(table))
    if turnover is not None:
        measured = turnover.measured[:tables]
        later_samples = np.where(measured[:, None], turnover.each[:tables], later_samples)
        kept = np.where(measured, turnover.kept[:tables], 1.0)
        shares = turnover.alive_shares[table, np.minimum(samples_with_row, SELDOM + 1)]
        alive = np.where(measured[table], shares, 1.0)
    seldom = samples_with_row <= SELDOM
    often = samples_with_row * kept[table]
    samples_foreseen = np.where(
        seldom, later_samples[table, np.minimum(samples_with_row, SELDOM)], often
    )
    estimated = seldom | measured[table]
    # Accesses are in proportion to samples, and each table keeps its sum. A row's own accesses per
    # sample count unless it is unread or, by the turnover, read seldom, whose accesses would order
    # rows by chance: such rows have the table's mean.
    has_own_ratio = (samples_with_row > 0) & ~(seldom & measured[table])
    per_table = partial(np.bincount, table, minlength=tables)
    counted = per_table(np.where(estimated, accesses * rows, 0))
    samples = per_table(np.where(estimated, samples_with_row * rows, 0))
    of_sample = np.where(has_own_ratio, accesses, (counted / np.maximum(samples, 1))[table])
    expected = samples_foreseen * of_sample / np.where(has_own_ratio, samples_with_row, 1)
    foreseen = per_table(np.where(estimated, expected * rows, 0))
    scale = np.where(foreseen > 0, counted / np.where(foreseen > 0, foreseen, 1), 1.0)[table]
    expected = np.where(estimated, expected * scale, accesses)
    samples_foreseen = np.where(measured[table], samples_foreseen * scale, samples_foreseen)
    return ExpectedCounts(
        expected, np.minimum(samples_foreseen, expected), expected != accesses, alive
    )


def good_turing(numbers: Ints) -> Floats:
    """Return how many of as many further samples read a row that n samples read, [SELDOM + 1];
    `numbers[n]` rows are read by n samples, for n up to SELDOM + 1.

    The estimates are scaled so that their total is that of the log, and ascend with n: only noise
    makes them descend.
    """
    counts = np.arange(SELDOM + 1, dtype=np.float64)
    has_rows = numbers[:-1] > 0
    weights = numbers[:-1][has_rows].astype(np.float64)
    total = float(dot(counts[has_rows], weights))
    mass = ((counts + 1) * numbers[1:])[has_rows]
    if not has_rows[0] or total == 0 or not mass.any():
        return counts
    estimates = _ascending(mass / weights * (total / mass.sum()), weights)
    # Rows of the largest n must not exceed those beyond, whose counts stay unchanged.
    top, beyond = estimates[-1], counts[has_rows][-1] + 1
    if top > beyond:
        estimates += (counts[has_rows] - estimates) * ((top - beyond) / (top - beyond + 1))
    expected = counts.copy()
    expected[has_rows] = estimates
    return expected


def _ascending(values: Floats, weights: Floats) -> Floats:
    """Return the nearest ascending values, in least squares by `weights`, by pooling neighbours
    that descend. Their weighted sum is that of `values`."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, u, m), (b, v, n) = pools[-2:]
            pools[-2:] = [((a * u + b * v) / (u + v), u + v, m + n)]
    return np.repeat([mean for mean, _, _ in pools], [length for _, _, length in pools])
