"""Arenas: from counts of rows in groups to slots, one arena per rank and width.

Each arena holds first the groups with copies on all ranks, whose slots are then the same
everywhere, then the other groups, then each table's stripes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints
from oper.base.tensors import as_int64, as_tensor
from oper.cost.holder_sets import HolderSets
from oper.plan.arena_slots import give_slots
from oper.plan.layout import Layout
from oper.plan.row_codes import pack_codes
from oper.planner.problem.classes import Classes
from oper.planner.row_placement.row_scan import Scan
from oper.planner.row_placement.striping import Stripes

if TYPE_CHECKING:
    from oper.planner.problem.classes import Classes
    from oper.planner.row_placement.striping import Stripes


def lay_out(
    rows: Ints,
    width_of_table: Ints,
    classes: Classes,
    groups: HolderSets,
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
    codes, group_rows = pack_codes(
        assign_rows(class_of_row, counts, number[classes.width]), len(group)
    )

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


def assign_rows(
    class_of_row: NDArray[np.int32], counts: Ints, label: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """The group of each row, int32 [E]: rows of class c go, in the order they come, to groups in
    turn, round robin over those that still lack some of their `counts[c, g]`.

    `label[c, g]` is what the result calls group g for rows of class c; g itself by default.
    """
    if label is None:
        label = np.broadcast_to(np.arange(counts.shape[1], dtype=np.int32), counts.shape)
    given = (as_tensor(class_of_row), as_int64(counts), as_tensor(label))
    group: NDArray[np.int32] = native.ops().assign_groups(*given).numpy()
    return group
