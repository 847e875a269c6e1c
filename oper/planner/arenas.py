"""Arenas: from counts of rows in groups to slots, one arena per rank and width.

Each arena holds first the groups with copies on all ranks, whose slots are then the same
everywhere, then the other groups, then each table's stripes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oper.cost import Groups
from oper.layout import Layout
from oper.planner.classes import Classes, Ints
from oper.planner.scan import Scan, deal, pack_codes
from oper.planner.stripes import Stripes


def lay_out(
    rows: Ints,
    width_of_table: Ints,
    classes: Classes,
    groups: Groups,
    counts: Ints,
    class_of_row: NDArray[np.int32],
    scanned: Scan,
    stripes: Sequence[Stripes],
) -> Layout:
    """Give every row its slot: `counts[c, g]` explicit rows of class c go to group g, tables of
    width w follow `stripes[w]`. `rows` and `width_of_table` are the tables'."""
    widths, ranks = len(classes.widths), groups.path.shape[1]
    # Groups of the plan are per width; those without rows are left out.
    filled = np.stack([counts[classes.width == w].sum(axis=0) > 0 for w in range(widths)])
    everywhere = groups.copies == ranks
    width, group = np.nonzero(filled)
    order = np.lexsort((group, ~everywhere[group], width))
    width, group = width[order], group[order]
    number = np.full(filled.shape, -1, dtype=np.int32)
    number[width, group] = np.arange(len(group))
    codes, group_rows = pack_codes(deal(class_of_row, counts, number[classes.width]), len(group))

    slots = np.zeros((widths, ranks), dtype=np.int64)
    base = np.full((len(group), ranks), -1, dtype=np.int64)
    for n, (w, g) in enumerate(zip(width, group, strict=True)):
        base[n] = np.where(groups.holds[g], slots[w], -1)
        slots[w] += groups.holds[g] * group_rows[n]
    stripe_base = np.zeros_like(scanned.striped_rows)
    for t, w in enumerate(width_of_table):
        stripe_base[t] = slots[w]
        slots[w] += scanned.striped_rows[t]
    return Layout(
        rows=rows,
        width_of_table=width_of_table,
        slots=slots,
        group_width=width.astype(np.int64),
        path=groups.path[group],
        holds=groups.holds[group],
        base=base,
        orders=tuple(s.order for s in stripes),
        pattern_of=width_of_table,
        rotation=np.array(
            [stripes[w].rotation[t] for t, w in enumerate(width_of_table)], dtype=np.int64
        ),
        stripe_base=stripe_base,
        line_offset=scanned.line_offset,
        bitmap=scanned.bitmap,
        codes=codes,
    )
