"""Arenas: a slot for every row, in one arena for each rank and width (§4.4).

In: `Problem`, `RowPlacement`. Out: `Layout`. Each arena holds first the holder sets of all ranks,
whose slots are then the same everywhere, then those of several ranks, whose slots in training are
the same at their holders, which hold the same sets; then the other holder sets, then each table's
stripes.
"""

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64, as_tensor
from oper.plan.layout import Layout, give_slots
from oper.plan.row_codes import marked_groups, marks_of_all, pack_codes, with_marks
from oper.planner.problem.classes import table_widths
from oper.planner.problem.problem import Problem
from oper.planner.row_placement.row_placement import RowPlacement


def lay_out(problem: Problem, placement: RowPlacement) -> Layout:
    """Give every row its slot: the listed rows of each class go to holder sets by the placement's
    counts, those of table t that are striped follow `stripes[pattern_of[t]]`."""
    tables, classes, ranks = problem.profile.tables, problem.classes, problem.ranks
    sets, counts, stripes = placement.holder_sets, placement.counts, placement.stripes
    width_of_table = table_widths(tables, problem.workload.mode).of_table
    widths = len(classes.widths)
    # A plan has a group for each width and holder set; those without rows are left out.
    filled = np.stack([counts[classes.width == w].sum(axis=0) > 0 for w in range(widths)])
    turn = np.where(sets.copies == ranks, 0, np.where(sets.copies > 1, 1, 2))
    width, group = np.nonzero(filled)
    order = np.lexsort((group, turn[group], width))
    width, group = width[order], group[order]
    number = np.full(filled.shape, -1, dtype=np.int32)
    number[width, group] = np.arange(len(group))
    holds, listed_offset = sets.holds[group], placement.scan.listed_offset
    bitmap, line_offset = placement.scan.bitmap, placement.scan.line_offset
    rows = np.array([table.rows for table in tables], dtype=np.int64)
    index, group_rows = None, np.zeros(len(group), dtype=np.int64)
    if ranks > 1 and counts[:, sets.copies == ranks].sum() == rows.sum():
        # Every row has copies on all ranks: each width is a group, in the order of widths.
        np.add.at(group_rows, width_of_table, rows)
        index = marks_of_all(rows, width_of_table, bitmap, line_offset)
    if index is None:
        codes, group_rows = pack_codes(
            assign_rows(placement.scan.class_of_row, counts, number[classes.width]), len(group)
        )
        marked = marked_groups(codes, holds, bitmap, listed_offset)
        index = with_marks(codes, len(group), bitmap, line_offset, marked)
    slots, base, stripe_base = give_slots(
        widths, width, holds, group_rows, width_of_table, placement.scan.striped_rows
    )
    return Layout(
        rows=rows,
        width_of_table=width_of_table,
        slots=slots,
        group_width=width.astype(np.int64),
        source=sets.source[group],
        holds=holds,
        base=base,
        orders=tuple(s.order for s in stripes),
        pattern_of=placement.pattern_of,
        rotation=np.array(
            [stripes[p].rotation[t] for t, p in enumerate(placement.pattern_of)], dtype=np.int64
        ),
        stripe_base=stripe_base,
        line_offset=line_offset,
        bitmap=bitmap,
        **index._asdict(),
    )


def assign_rows(
    class_of_row: NDArray[np.int32], counts: Ints, label: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """Return the group of each listed row, int32 [E].

    The rows of class c, in order of ids, go to the groups g round robin, until g has its `counts[c,
    g]` of them. `label[c, g]` is the number of group g in the result for rows of class c; g itself
    by default. Raises ValueError if a class has more rows than counted.
    """
    if label is None:
        label = np.broadcast_to(np.arange(counts.shape[1], dtype=np.int32), counts.shape)
    arguments = (as_tensor(class_of_row), as_int64(counts), as_tensor(label))
    group: NDArray[np.int32] = native.ops().assign_groups(*arguments).numpy()
    return group
