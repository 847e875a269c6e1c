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

    holds = groups.holds[group]
    slots, base, stripe_base = give_slots(
        widths, width, holds, group_rows, width_of_table, scanned.striped_rows
    )
    return Layout(
        rows=rows,
        width_of_table=width_of_table,
        slots=slots,
        group_width=width.astype(np.int64),
        path=groups.path[group],
        holds=holds,
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


def give_slots(
    widths: int,
    group_width: Ints,
    holds: NDArray[np.bool_],
    group_rows: Ints,
    width_of_table: Ints,
    striped_rows: Ints,
) -> tuple[Ints, Ints, Ints]:
    """Arenas of W widths on M ranks: `group_rows` [G] rows at the ranks that `holds` [G, M] says,
    of each width those with copies on all ranks first, then `striped_rows` [T, M] of each table.

    Returns the slots of each arena [W, M], the first of each group [G, M], -1 where there is no
    copy, and the first of each table's stripes [T, M].
    """
    slots = np.zeros((widths, holds.shape[1]), dtype=np.int64)
    base = np.full(holds.shape, -1, dtype=np.int64)
    for n, w in enumerate(group_width):
        base[n] = np.where(holds[n], slots[w], -1)
        slots[w] += holds[n] * group_rows[n]
    stripe_base = np.zeros_like(striped_rows)
    for t, w in enumerate(width_of_table):
        stripe_base[t] = slots[w]
        slots[w] += striped_rows[t]
    return slots, base, stripe_base
