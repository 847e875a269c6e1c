"""Part of a plan: the layout of some of its tables, with new slots.

A model may have several collections of tables, each sharded by itself, under one plan. The engine
of each gets the part with its own tables: every row has the holders and the sources that the whole
plan gives it, and nothing else takes slots, so that the arenas of all engines together are as large
as those of the whole plan. They could share one heap instead; but TorchRec shards collections one
by one, so that the first would have to know the optimizers, and so the state, of later ones, and
each AllReduce would cover the replicas of all.

The number of a table and the slots of its rows differ from the whole plan's; what depends on a
table's name (initial values, checkpoints) does not. In a plan made from an older one, slots that
rows have left in their stripes may be given to other rows; here they stay empty.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.plan.bitmap import join_lines
from oper.plan.layout import Layout, give_slots
from oper.plan.plan import ListedCounts, Plan
from oper.plan.row_codes import pack_codes, with_marks


def part_of(plan: Plan, tables: Sequence[int]) -> Plan:
    """The plan of some of a plan's tables, by number, in the plan's order.

    The plan itself where that is all tables. Those of its tier stay there. Figures and certificate
    are those of the whole plan.
    """
    chosen = np.unique(np.asarray(tables, dtype=np.int64))
    if len(chosen) == len(plan.tables):
        return plan
    layout = plan.layout
    tier = tuple(np.flatnonzero(np.isin(chosen, plan.tier)).tolist())
    return replace(
        plan,
        tables=tuple(plan.tables[t] for t in chosen),
        layout=_layout(layout, chosen),
        counts=_counts(plan, chosen),
        distinct_ratio=None if plan.distinct_ratio is None else plan.distinct_ratio[chosen],
        tier=tier,
        parts=plan.parts if tier else None,
    )


def _counts(plan: Plan, chosen: Ints) -> ListedCounts:
    """The counts of the chosen tables."""
    layout, counts = plan.layout, plan.counts
    coded_offset = layout.listed_offset - layout.everywhere_offset
    accesses = _pieces(counts.accesses, coded_offset, chosen)
    samples_with_row = accesses
    if counts.samples_with_row is not counts.accesses:
        samples_with_row = _pieces(counts.samples_with_row, coded_offset, chosen)
    return ListedCounts(
        accesses,
        samples_with_row,
        counts.everywhere_accesses[chosen],
        counts.everywhere_least[chosen],
    )


def _layout(layout: Layout, chosen: Ints) -> Layout:
    """The layout of the chosen tables."""
    places, _ = layout.listed_places()
    group = _pieces(places, layout.listed_offset, chosen)
    width_kept, width_of_table = np.unique(layout.width_of_table[chosen], return_inverse=True)
    used = np.flatnonzero(np.bincount(group, minlength=len(layout.group_width)))
    # Rows that all ranks hold have to come first, and groups of a replanned layout do not.
    everywhere = layout.holds[used].all(axis=1)
    used = used[np.lexsort((used, ~everywhere, layout.group_width[used]))]
    number = np.full(len(layout.group_width) + 1, -1, dtype=np.int32)  # the last of group -1
    number[used] = np.arange(len(used))
    codes, group_rows = pack_codes(number[group], len(used))
    # Rows with marks keep them, so that what is counted for the others stays theirs.
    marked = None
    if layout.everywhere_group is not None:
        marked = number[layout.everywhere_group[chosen]].astype(np.int64)
        marked = marked if (marked >= 0).any() else None

    line_offset = np.append(0, np.cumsum(np.diff(layout.line_offset)[chosen]))
    bitmap, unstriped = _lines(layout.bitmap, layout, chosen, line_offset)
    stripe_bitmap = layout.stripe_bitmap
    if stripe_bitmap is not None:
        stripe_bitmap, unstriped = _lines(stripe_bitmap, layout, chosen, line_offset)
    group_width = np.searchsorted(width_kept, layout.group_width[used])
    slots, base, stripe_base = give_slots(
        len(width_kept),
        group_width,
        layout.holds[used],
        group_rows,
        width_of_table,
        layout.stripe_rows(chosen, layout.rows[chosen] - unstriped),
    )
    return Layout(
        rows=layout.rows[chosen],
        width_of_table=width_of_table,
        slots=slots,
        group_width=group_width,
        source=layout.source[used],
        holds=layout.holds[used],
        base=base,
        orders=layout.orders,
        pattern_of=layout.pattern_of[chosen],
        rotation=layout.rotation[chosen],
        stripe_base=stripe_base,
        line_offset=line_offset,
        bitmap=bitmap,
        stripe_bitmap=stripe_bitmap,
        **with_marks(codes, len(used), bitmap, line_offset, marked)._asdict(),
    )


def _pieces(values: NDArray[Any], first: Ints, chosen: Ints) -> NDArray[Any]:
    """Values of listed rows of the chosen tables; those of table t begin at first[t]."""
    return np.concatenate([values[:0], *(values[first[t] : first[t + 1]] for t in chosen)])


def _lines(
    bitmap: NDArray[np.uint64], layout: Layout, chosen: Ints, line_offset: Ints
) -> tuple[NDArray[np.uint64], Ints]:
    """The chosen tables' lines of a bitmap, with new running counts, and the number of marked rows
    of each table."""
    first = layout.line_offset
    return join_lines([bitmap[first[t] : first[t + 1]] for t in chosen], line_offset)
