"""From flows between holder sets to rows with new slots: the layout that results, and the moves.

In: a plan's rows by class and holder set, the rows wanted, `Flows` between them. Out: `Relocation`.
Which rows change is decided in `rows_to_move.py`, their slots in `slot_assignment.py`. Striped rows
that change holders or slots become listed. The others stay where they are, as the old bitmap goes
on to number them (layout.py).
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64, as_tensor
from oper.plan.bitmap import ROWS_PER_LINE
from oper.plan.layout import Layout
from oper.plan.row_codes import marked_groups, pack_positions, with_marks
from oper.plan.row_locator import RowClassifier, RowLocator
from oper.plan.row_moves import ENTRY, RowMoves
from oper.planner.replan.migration.flows import Flows
from oper.planner.replan.migration.migration_cost import MigrationCost
from oper.planner.replan.migration.new_arenas import NewArenas
from oper.planner.replan.migration.rows_to_move import ChangedRows, changed_rows
from oper.planner.replan.migration.slot_assignment import NewGroups, NewSlots, SlotAssignment
from oper.tables.table import Table, offsets


@dataclass(frozen=True)
class Relocation:
    """A new layout, and the moves that lead to it."""

    layout: Layout
    moves: RowMoves


def relocate(
    tables: tuple[Table, ...],
    locator: RowLocator,
    finder: RowClassifier,
    width_of_class: Ints,
    counted: Ints,
    target: Ints,
    flows: Flows,
    cost: MigrationCost,
    row_memory: Ints,
    one_slot: NDArray[np.bool_],
) -> Relocation:
    """Bring the rows of a plan from `counted` [C, K + M], listed and striped rows apart, to
    `target` [C, K] along `flows`; `row_memory` [T] are the bytes of a row of each table, and
    `one_slot` [K] says whether all holders are to have a row at one slot."""
    arenas = NewArenas.of(locator, width_of_class, locator.by_holder_set(counted), target, one_slot)
    rows = changed_rows(tables, locator, finder, counted, flows, arenas)
    if not len(rows):
        return Relocation(locator.layout, RowMoves.none())
    groups = NewGroups(locator)
    new = SlotAssignment(locator, arenas, rows, groups).assign()
    first_row = offsets(tables)
    layout = _new_layout(locator.layout, arenas, rows, new, groups, first_row)
    return Relocation(layout, _moves(rows, new, cost, row_memory, first_row))


def _new_layout(
    layout: Layout,
    arenas: NewArenas,
    rows: ChangedRows,
    new: NewSlots,
    groups: NewGroups,
    first_row: Ints,
) -> Layout:
    """The layout with the rows that change listed at their new slots."""
    group, position = layout.listed_places()
    listed = listed_rows(layout)
    # Both are in order: a merge, where np.union1d hashes, which takes minutes for millions of rows.
    everyone = np.sort(np.concatenate([listed, rows.row]), kind="stable")
    everyone = everyone[np.diff(everyone, prepend=-1) > 0]
    new_group = np.empty(len(everyone), dtype=np.int64)
    new_position = np.empty(len(everyone), dtype=np.int64)
    for ids, g, p in ((listed, group, position), (rows.row, new.group, new.position)):
        at = np.searchsorted(everyone, ids)
        new_group[at], new_position[at] = g, p
    used, new_group = np.unique(new_group, return_inverse=True)
    codes = pack_positions(new_group, new_position, len(used))
    bitmap, stripe_bitmap = layout.bitmap, layout.stripe_bitmap
    if len(everyone) > len(listed):
        stripe_bitmap = bitmap if stripe_bitmap is None else stripe_bitmap
        bitmap = _marked(layout, rows.row, first_row)
    holds = np.stack(groups.holds)[used]
    # Rows keep their slots, so that marks may no longer count them: such tables have codes.
    marked = marked_groups(codes, holds, bitmap, np.searchsorted(everyone, first_row))
    return replace(
        layout,
        slots=arenas.size,
        group_width=np.array(groups.width, dtype=np.int64)[used],
        source=np.stack(groups.source)[used],
        holds=holds,
        base=np.stack(groups.base)[used],
        bitmap=bitmap,
        stripe_bitmap=stripe_bitmap,
        **with_marks(codes, len(used), bitmap, layout.line_offset, marked)._asdict(),
    )


def listed_rows(layout: Layout) -> Ints:
    """The global ids of the listed rows, [E]."""
    first, found = 0, []
    for t, rows in enumerate(layout.rows.tolist()):
        words = layout.bitmap[layout.line_offset[t] : layout.line_offset[t + 1], 1:]
        marks = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
        found.append(first + np.flatnonzero(marks.reshape(-1)[:rows]))
        first += rows
    return np.concatenate(found)


def _marked(layout: Layout, rows: Ints, first_row: Ints) -> NDArray[np.uint64]:
    """The layout's bitmap with more rows (global ids) marked."""
    bitmap = np.array(layout.bitmap)
    table = np.searchsorted(first_row, rows, side="right") - 1
    line, bit = np.divmod(rows - first_row[table], ROWS_PER_LINE)
    line += layout.line_offset[table]
    mask = np.uint64(1) << (bit % 64).astype(np.uint64)
    np.bitwise_or.at(bitmap, (line, 1 + bit // 64), mask)
    native.ops().number_bitmap(as_tensor(bitmap.view(np.int64)), as_int64(layout.line_offset))
    return bitmap


def _moves(
    rows: ChangedRows, new: NewSlots, cost: MigrationCost, row_memory: Ints, first_row: Ints
) -> RowMoves:
    """The entries of all rows whose holders or slots differ."""
    differs = (new.slots != rows.old_slots).any(axis=1)
    n, rank = np.nonzero((new.slots >= 0) & differs[:, None])
    source = cost.nearest[rows.before[n], rank]
    entries = np.zeros(len(n), ENTRY)
    entries["row"], entries["rank"], entries["source_rank"] = rows.row[n], rank, source
    entries["slot"] = new.slots[n, rank]
    entries["source_slot"] = rows.old_slots[n, source]
    there = (source == rank) & (entries["slot"] == entries["source_slot"])
    table = np.searchsorted(first_row, entries["row"], side="right") - 1
    entries["bytes"] = np.where(there, 0, row_memory[table])
    return RowMoves(entries)
