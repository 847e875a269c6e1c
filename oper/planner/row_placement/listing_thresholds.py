"""Which rows are listed one by one: those above a number of accesses in each table.

In: `Classes`, and how many rows of each the class placement lists. Out: `Cuts`, one a table.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.planner.problem.classes import Classes

# At least so many rows of each width are listed and have one owner, to even out the chance
# differences between stripes with. The share of all rows that `make_cuts` is given is 1/256 or
# more: 0.016 bytes a row in the address map.
_RESERVE_ROWS = 4096


@dataclass(frozen=True)
class Cuts:
    """Rows of table t with more than `cut[t]` accesses are listed, [T], and so are the first
    `quota[t]` of those with exactly as many. `listed` [C] counts them by class: exactly where no
    two classes of a table share their accesses, and nearly elsewhere."""

    cut: Ints
    quota: Ints
    listed: Ints


def make_cuts(
    classes: Classes, width_of_table: Ints, wanted: Ints, replicas: Ints, reserve_share: float
) -> Cuts:
    """The least cuts that list at least `wanted[c]` rows of each class, and, beside the
    `replicas[c]` among them, `reserve_share` of all rows of each width as a reserve."""
    tables = len(width_of_table)
    cut = np.full(tables, np.iinfo(np.int64).max)
    quota = np.zeros(tables, dtype=np.int64)
    listed = np.zeros(len(classes), dtype=np.int64)
    entry_accesses = classes.accesses[classes.entry_class]
    for w in range(len(classes.widths)):
        mine = np.flatnonzero(classes.width == w)  # accesses descend
        if not len(mine):
            continue
        rows, single = classes.rows[mine], classes.rows[mine] - replicas[mine]
        reserve = max(_RESERVE_ROWS, int(rows.sum() * reserve_share))
        reserve = min(int(single.sum()), reserve)
        last = np.flatnonzero(wanted[mine])
        by_wanted = int(last[-1]) if len(last) else 0
        by_reserve = int(np.searchsorted(np.cumsum(single), reserve))
        edge = int(classes.accesses[mine[max(by_wanted, min(by_reserve, len(mine) - 1))]])
        above = mine[classes.accesses[mine] > edge]
        level = mine[classes.accesses[mine] == edge]
        listed[above] = classes.rows[above]
        spare = int((listed[above] - replicas[above]).sum())
        need = max(int(wanted[level].sum()), reserve - spare + int(replicas[level].sum()))
        of_width = np.flatnonzero(width_of_table == w)
        cut[of_width] = edge
        # At the cut: classes with wanted rows first, then the others, table after table.
        for c in sorted(level.tolist(), key=lambda c: -int(wanted[c])):
            entries = np.flatnonzero((classes.entry_class == c) & (entry_accesses == edge))
            for e in entries:
                take = min(need, int(classes.entry_rows[e]))
                quota[classes.entry_table[e]] += take
                listed[c] += take
                need -= take
    return Cuts(cut, quota, listed)


def listed_by_table(classes: Classes, cuts: Cuts, of_width: NDArray[np.bool_]) -> Ints:
    """Listed rows of each table, [T]; 0 for tables that are not marked in `of_width` [T]."""
    listed = np.zeros(len(of_width), dtype=np.int64)
    table, accesses = classes.entry_table, classes.accesses[classes.entry_class]
    above = of_width[table] & (accesses > cuts.cut[table])
    np.add.at(listed, table[above], classes.entry_rows[above])
    return listed + np.where(of_width, cuts.quota, 0)
