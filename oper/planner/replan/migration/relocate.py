"""From flows between holder sets to rows with new slots: the layout that results, and the moves.

In: a plan's rows by class and holder set, the rows wanted, `Flows` between them. Out: `Relocation`.
`rows_to_move.py` decides the rows that change, `slot_assignment.py` their slots. Striped rows that
change holders or slots become listed. The others keep their places, because the old bitmap goes on
to number them (layout.py).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.plan.layout import Layout
from oper.plan.listed_rows import ListedRows, first_rows, with_listed
from oper.plan.row_codes import marked_groups, pack_positions
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
    layout = _new_layout(locator.layout, arenas, rows, new, groups)
    return Relocation(layout, _moves(rows, new, cost, row_memory, offsets(tables)))


def _new_layout(
    layout: Layout, arenas: NewArenas, rows: ChangedRows, new: NewSlots, groups: NewGroups
) -> Layout:
    """Return the layout with the rows that change listed at their new slots."""
    listed = ListedRows.of(layout).updated(ListedRows(rows.row, new.group, new.position))
    used, group = np.unique(listed.group, return_inverse=True)
    listed, kept = listed._replace(group=group), groups.all.take(used)
    # Rows keep their slots, so that marks may no longer count them: such tables have codes.
    codes = pack_positions(listed.group, listed.position, len(used))
    first = np.searchsorted(listed.row, first_rows(layout))
    marked = marked_groups(codes, kept.sets.holds, layout.bitmap, first)
    return with_listed(layout, listed, kept, marked, arenas.size)


def _moves(
    rows: ChangedRows, new: NewSlots, cost: MigrationCost, row_memory: Ints, first_row: Ints
) -> RowMoves:
    """Return the entries of all rows whose holders or slots differ."""
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
