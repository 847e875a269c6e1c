"""Which rows of a plan change: those that leave their holders, and those in the way of others.

In: the plan's rows, `Flows` of classes between holder sets, `NewArenas`. Out: `ChangedRows`.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.plan.row_locator import Chunk, RowClassifier, RowLocator
from oper.planner.replan.migration.flows import Flows
from oper.planner.replan.migration.new_arenas import Flags, NewArenas
from oper.tables.table import Table, offsets


@dataclass(frozen=True)
class _FoundRows:
    """Rows that change, [N] each, in order of ids."""

    row: Ints  # global id
    width: Ints
    row_class: Ints
    place: Ints  # in the old layout, with the offset from its first row
    offset: Ints
    old_slots: Ints  # [N, M], -1 where a rank holds no copy
    leaves: Flags  # whether the holders change; of the others, only the slots
    striped: Flags


@dataclass(frozen=True)
class ChangedRows:
    """The N rows that change, in order of ids. Columns are the holder sets that rows are counted
    in (row_locator.py)."""

    row: Ints  # global id
    width: Ints
    place: Ints  # in the old layout, with the offset from its first row
    offset: Ints
    old_slots: Ints  # [N, M], -1 where a rank holds no copy
    leaves: Flags  # whether the column changes; of the others, only the slots
    before: Ints  # column
    after: Ints  # column

    def __len__(self) -> int:
        return len(self.row)


def changed_rows(
    tables: tuple[Table, ...],
    locator: RowLocator,
    finder: RowClassifier,
    counted: Ints,
    flows: Flows,
    arenas: NewArenas,
) -> ChangedRows:
    """The rows that change; `counted` [C, K + M] are the rows in the counted columns."""
    leaving = _LeavingRows(counted, flows, locator)
    first_row = offsets(tables)
    parts = [
        _find(chunk, int(first_row[t]), locator, finder, leaving, arenas)
        for t in range(len(tables))
        for chunk in locator.chunks(t)
    ]
    found = _FoundRows(
        *(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(_FoundRows))
    )
    before = locator.holder_set_of[found.place]
    after = before.copy()
    # The rows that leave a column, class by class and in order, follow that class's flows in order.
    index = np.flatnonzero(found.leaves)
    index = index[np.lexsort((found.striped[index], before[index], found.row_class[index]))]
    order = np.lexsort((flows.after, flows.before, flows.row_class))
    after[index] = np.repeat(flows.after[order], flows.rows[order])
    return ChangedRows(
        found.row,
        found.width,
        found.place,
        found.offset,
        found.old_slots,
        found.leaves,
        before,
        after,
    )


class _LeavingRows:
    """How many rows of each class are still to leave each counted column, [C, K + M]: listed rows
    of a column leave before its striped ones."""

    def __init__(self, counted: Ints, flows: Flows, locator: RowLocator) -> None:
        ranks, columns = locator.ranks, len(locator.holder_sets)
        self._left = np.zeros_like(counted)
        np.add.at(self._left, (flows.row_class, flows.before), flows.rows)
        striped = np.clip(self._left[:, :ranks] - counted[:, :ranks], 0, None)
        self._left[:, :ranks] -= striped
        self._left[:, columns:] = striped

    def take(self, row_class: NDArray[np.int32], counted: Ints) -> Flags:
        """Whether each of the next rows leaves, given its class and counted column, [N]: the first
        ones of each do."""
        left = self._left.reshape(-1)
        cell = row_class * np.int64(self._left.shape[1]) + counted
        wanted = np.flatnonzero(left[cell])
        wanted = wanted[np.argsort(cell[wanted], kind="stable")]
        cells, first, size = np.unique(cell[wanted], return_index=True, return_counts=True)
        number = np.arange(len(wanted)) - np.repeat(first, size)
        taken = np.zeros(len(cell), dtype=bool)
        taken[wanted[number < np.repeat(left[cells], size)]] = True
        left[cells] -= np.minimum(size, left[cells])
        return taken


def _find(
    chunk: Chunk,
    first_row: int,
    locator: RowLocator,
    finder: RowClassifier,
    leaving: _LeavingRows,
    arenas: NewArenas,
) -> _FoundRows:
    """The rows of a chunk that change; its table begins at row `first_row`."""
    w = int(locator.layout.width_of_table[chunk.table])
    row_class = finder.find(chunk)
    counted = locator.count_column[chunk.extent]
    column = locator.holder_set_of[chunk.extent]
    leaves = leaving.take(row_class, counted)
    changes = leaves.copy()
    if arenas.replicas_move[w]:
        changes |= column >= locator.ranks
    if arenas.displaces(w, locator.layout.slots[w]):
        single = np.flatnonzero(column < locator.ranks)
        slot = locator.owner_slots(chunk, single)
        changes[single] |= arenas.taken(w, column[single], slot)
    index = np.flatnonzero(changes)
    return _FoundRows(
        row=first_row + chunk.first + index,
        width=np.full(len(index), w),
        row_class=row_class[index].astype(np.int64),
        place=chunk.extent[index],
        offset=chunk.offset[index],
        old_slots=locator.slots(chunk, index),
        leaves=leaves[index],
        striped=counted[index] >= len(locator.holder_sets),
    )
