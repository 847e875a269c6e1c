"""Rows that come and go: two windows of a log that follow each other, row by row.

In: the counts of both. Out: `Turnover` (oper/cost/expected_counts.py), by which plans expect reads
of rows that were read seldom or never.
"""

import numpy as np

from oper.base.arrays import Counts, Floats
from oper.cost.expected_counts import SELDOM, Turnover
from oper.profiling.counter_arrays import RowCounts


def turnover_between(earlier: RowCounts, later: RowCounts) -> Turnover:
    """Return the turnover of each table from one window to the next; both have the same tables."""
    shape = len(earlier.tables), SELDOM + 2
    rows, alive = np.zeros((2, *shape), dtype=np.int64)
    before, after = np.zeros((2, *shape))
    for t in range(len(earlier.tables)):
        counts = earlier.table_samples_with_row(t), later.table_samples_with_row(t)
        rows[t], alive[t], before[t], after[t] = _of_table(*counts)
    return Turnover(rows, alive, before, after * (earlier.samples / max(later.samples, 1)))


def _of_table(earlier: Counts, later: Counts) -> tuple[Floats, Floats, Floats, Floats]:
    """Count rows, those read in the later window, and samples in either window, by samples in the
    earlier one, [SELDOM + 2] each. Few rows are read in a window, so the figures of unread rows
    follow from the sums."""
    read = np.flatnonzero(earlier)
    group = np.minimum(earlier[read], SELDOM + 1).astype(np.int64)
    again = later[read].astype(np.float64)
    rows, alive, before, after = (
        np.bincount(group, weights, minlength=SELDOM + 2).astype(np.float64)
        for weights in (None, again > 0, earlier[read].astype(np.float64), again)
    )
    rows[0] = len(earlier) - len(read)
    alive[0] = np.count_nonzero(later) - alive.sum()
    after[0] = float(later.sum(dtype=np.int64)) - after.sum()
    return rows, alive, before, after
