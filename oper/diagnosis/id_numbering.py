"""Test of the numbering of ids against the profile's, by their accesses to the profile's hot rows.

A plan is correct for any numbering of a table's rows, but slow if it makes other rows hot than
those that the plan knows. A batch decides: let H be k of a table's N rows, with the share p of the
profile's accesses. Ids of the same numbering are in H with probability p; ids of an unrelated
numbering with q = k / N, whatever the frequencies. Of all sets of the hottest rows, H is the most
informative: it has the largest Kullback-Leibler divergence of p from q. Because H is chosen by the
counts from which p is computed, p leaves one access out: it counts only accesses to rows that would
be in H without that access.

The share h of a batch's n accesses in H is judged by a threshold, the least of three:

* Chernoff's, at which h is as unlikely under p as under q;
* p / 3, so that a log whose hot rows drift is no false alarm: of six real logs, profiled in their
  first half, hot rows keep 0.51 of p or more to the end (docs/design/numbered-ids.md);
* p less a margin for chance. For independent samples with m_i accesses each, by Hoeffding's
  inequality P(h <= p - s) <= exp(-2 s^2 n^2 / sum m_i^2), however the accesses of one sample depend
  on each other; and p was measured on the profile's samples, by the same inequality. With odds of
  1e-9 per table, 1,000 tables give one false alarm in a million batches.

A table is not judged if ids of an unrelated numbering could pass the threshold too. Their h is a
sum over the batch's distinct rows, each in H or not, so its mean is q and its variance at most q (1
- q) sum f_i^2, with f_i the share of row i in the batch. The threshold has to be five standard
deviations above q: by Cantelli's inequality it then misses such a numbering in less than 4 of 100
tables, and far less often because the sum is over many rows. So uniform tables, tables of few rows,
and batches of few samples are not judged; and a shift by one of ids in the order of their frequency
goes unnoticed, because it moves few hot rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.plan.bitmap import rank_in_bitmap
from oper.plan.plan import Plan
from oper.plan.row_codes import rows_of_tables
from oper.profiling.histogram import histogram
from oper.profiling.profile import Profile

_ODDS = 1e-9  # of a false alarm, for each table
_DEVIATIONS = 5.0  # between a threshold and the expected share of another numbering
_LEFT_BY_DRIFT = 1 / 3  # at least, of the share of hot rows


class Verdict(Enum):
    """Verdict of a batch on the numbering of a table's ids."""

    ALIKE = "as the profile's"
    OTHER = "unlike the profile's"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class HotRows:
    """Rows of a table that were hot in the profile.

    rows: their number, of `of_rows`. share: their expected share of the table's accesses in samples
    that the profile has not seen. samples: number of samples on which it was measured. contains:
    returns a mask, bool [N], of the ids, int64 [N], that are hot rows.
    """

    rows: int
    of_rows: int
    share: float
    samples: int
    contains: Callable[[Ints], NDArray[np.bool_]]


@dataclass(frozen=True)
class Numbering:
    """Verdict on a batch's accesses to a table: `share` of them are to `hot` rows (None: no rows
    stand out)."""

    table: str
    verdict: Verdict
    share: float
    hot: HotRows | None


def hot_rows_of_profile(profile: Profile, table: int) -> HotRows | None:
    """Return the most informative hot rows of a table; None if no rows stand out."""
    first, end = (int(n) for n in profile.offsets[table : table + 2])
    accesses = profile.accesses[first:end]
    none, edges = accesses[:0], np.array([0, end - first], dtype=np.int64)
    by_accesses = histogram(accesses, none, edges, np.zeros(2, dtype=np.int64))
    total = float(by_accesses.accesses @ by_accesses.rows)
    best = _most_telling(by_accesses.accesses, by_accesses.rows, end - first, total)
    if best is None:
        return None
    return HotRows(
        rows=best.rows,
        of_rows=end - first,
        share=best.share,
        samples=profile.samples,
        contains=lambda ids: np.asarray(accesses[ids] >= best.least),
    )


def hot_rows_of_plan(plan: Plan, table: int, accesses_per_sample: float) -> HotRows | None:
    """Return the most informative hot rows of a table among those that a plan lists; None if none
    stand out. A plan has no counts of the other rows: shares assume a table with
    `accesses_per_sample` accesses on average."""
    layout, counts = plan.layout, plan.counts
    coded_rows = list(rows_of_tables(layout.listed_offset - layout.everywhere_offset))[table]
    coded = np.asarray(counts.accesses[coded_rows], dtype=np.int64)
    accesses, rows = (descending[::-1] for descending in np.unique(coded, return_counts=True))
    everywhere = _Everywhere(
        int(np.diff(layout.everywhere_offset)[table]), int(counts.everywhere_accesses[table])
    )
    total = plan.samples * accesses_per_sample
    best = _most_telling(accesses, rows, int(layout.rows[table]), total, everywhere)
    if best is None:
        return None
    line = int(layout.line_offset[table])

    def contains(ids: Ints) -> NDArray[np.bool_]:
        before, hot = rank_in_bitmap(layout.bitmap, line, ids)
        everywhere = np.zeros(len(ids), dtype=np.bool_)
        if layout.everywhere_bitmap is not None:
            marked_before, everywhere = rank_in_bitmap(layout.everywhere_bitmap, line, ids)
            before = before - marked_before
        with_code = hot & ~everywhere
        hot[with_code] = counts.accesses[before[with_code]] >= best.least
        return hot

    return HotRows(best.rows, int(layout.rows[table]), best.share, plan.samples, contains)


class _Everywhere(NamedTuple):
    """Rows of a plan with a mark in place of a code, and their total accesses. A plan replicates
    them first, so they are in any set of hot rows."""

    rows: int = 0
    accesses: int = 0


class _Telling(NamedTuple):
    """Rows with at least `least` accesses: their number, and their share."""

    least: int
    rows: int
    share: float


def _most_telling(
    accesses: Ints,
    rows: Ints,
    of_rows: int,
    total: float,
    everywhere: _Everywhere = _Everywhere(),  # noqa: B008 - immutable
) -> _Telling | None:
    """Return the most informative set of the rows with at least accesses[n] accesses; None if no
    set is informative. `accesses` descend, and rows[n] rows have accesses[n] each; `total` are the
    accesses of all of a table's `of_rows` rows."""
    if not len(rows) or not total:
        return None
    within = everywhere.rows + np.cumsum(rows)
    # A row with the fewest accesses of a set would leave it without one of them.
    without_one = everywhere.accesses + np.cumsum(accesses * rows) - accesses * rows
    share = np.minimum(without_one / total, 1.0)
    told = _divergence(share, within / of_rows)
    best = int(told.argmax())
    if not told[best] > 0:
        return None
    return _Telling(int(accesses[best]), int(within[best]), float(share[best]))


def judge(table: str, hot: HotRows | None, ids: Ints, of_samples: Ints) -> Numbering:
    """Judge the ids of a table in some samples.

    Args:
        table: its name.
        hot: its hot rows; None if none stand out.
        ids: all ids that the samples read, int64 [n], each a row of the table; n > 0.
        of_samples: number of ids per sample, int64 [samples].
    """
    if hot is None:
        return Numbering(table, Verdict.UNKNOWN, 0.0, None)
    distinct, times = np.unique(ids, return_counts=True)
    total = len(ids)
    share = float(times[hot.contains(distinct)].sum() / total)
    threshold = _threshold(hot, np.sqrt(float(of_samples @ of_samples)) / total)
    chance = hot.rows / hot.of_rows
    spread = np.sqrt(chance * (1 - chance) * float(((times / total) ** 2).sum()))
    verdict = Verdict.ALIKE if share >= threshold else Verdict.OTHER
    if chance + _DEVIATIONS * spread >= threshold:
        verdict = Verdict.UNKNOWN
    return Numbering(table, verdict, share, hot)


def _threshold(hot: HotRows, unevenness: float) -> float:
    """Return the share of hot rows below which ids are numbered differently. `unevenness` is 1 over
    the square root of the number of equally informative samples of equal size."""
    share, chance = min(hot.share, 1 - 1e-12), hot.rows / hot.of_rows
    if share <= chance:
        return 0.0
    misses = np.log((1 - chance) / (1 - share))
    equally_unlikely = misses / (misses + np.log(share / chance))
    by_chance = np.sqrt(-np.log(_ODDS) / 2) * (unevenness + 1 / np.sqrt(hot.samples))
    return float(min(equally_unlikely, _LEFT_BY_DRIFT * share, share - by_chance))


def _divergence(share: Floats, chance: Floats) -> Floats:
    """Return the mean information of a hit or a miss, in nats, if hits have the probability `share`
    instead of `chance`; 0 if `share` is not larger."""
    p, q = np.clip(share, 1e-300, 1 - 1e-12), np.clip(chance, 1e-300, 1 - 1e-12)
    told = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    return np.where(p > q, told, 0.0)
