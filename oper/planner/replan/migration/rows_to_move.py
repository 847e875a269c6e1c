"""Rows of a plan that change: rows that leave their holders, and rows in the way of others.

In: the plan's rows, `Flows` of classes between holder sets, `NewArenas`. Out: `ChangedRows`.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64, as_tensor
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
    old_slots: Ints  # [N, M], -1 if a rank holds no copy
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
    old_slots: Ints  # [N, M], -1 if a rank holds no copy
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
    """Return the rows that change; `counted` [C, K + M] are the rows in the counted columns."""
    leaving = _LeavingRows(counted, flows, locator)
    first_row = offsets(tables)
    parts = [
        _find(chunk, int(first_row[t]), locator, finder, leaving, arenas)
        for t in range(len(tables))
        for chunk in locator.chunks(t)
    ]
    changed = _FoundRows(
        *(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(_FoundRows))
    )
    before = locator.holder_set_of[changed.place]
    after = before.copy()
    index = np.flatnonzero(changed.leaves)
    index = index[np.lexsort((changed.striped[index], before[index], changed.row_class[index]))]
    after[index] = _in_turn(flows)
    return ChangedRows(
        changed.row,
        changed.width,
        changed.place,
        changed.offset,
        changed.old_slots,
        changed.leaves,
        before,
        after,
    )


def _in_turn(flows: Flows) -> Ints:
    """Return the new column of each row that leaves, the rows ordered by class and old column.

    Rows of a class and column take their new columns in turn: neighbouring ids are often read at
    one time, in logs whose new rows get the next free ids, and a rank with all of them would serve
    more than its share.
    """
    flow = np.repeat(np.arange(len(flows.rows)), flows.rows)
    first = np.cumsum(flows.rows) - flows.rows
    # A flow's n-th row of N comes at (n + 1/2) / N of the way.
    way = (np.arange(len(flow)) - first[flow] + 0.5) / flows.rows[flow]
    before, row_class = flows.before[flow], flows.row_class[flow]
    order = np.lexsort((flows.after[flow], way, before, row_class))
    return np.asarray(flows.after[flow[order]])


class _LeavingRows:
    """Number of rows of each class still to leave each counted column, [C, K + M]: listed rows of a
    column leave before its striped ones."""

    def __init__(self, counted: Ints, flows: Flows, locator: RowLocator) -> None:
        ranks, columns = locator.ranks, len(locator.holder_sets)
        self._left = np.zeros_like(counted)
        np.add.at(self._left, (flows.row_class, flows.before), flows.rows)
        striped = np.clip(self._left[:, :ranks] - counted[:, :ranks], 0, None)
        self._left[:, :ranks] -= striped
        self._left[:, columns:] = striped
        self._column = locator.count_column

    def take(self, chunk: Chunk, row_class: NDArray[np.int32]) -> Ints:
        """Return the numbers of the next rows that leave: the first ones of each class and
        column."""
        taken: Ints = (
            native.ops()
            .leaving_rows(
                as_int64(chunk.address),
                as_int64(self._column),
                as_tensor(row_class),
                as_int64(self._left),
            )
            .numpy()
        )
        return taken


def _find(
    chunk: Chunk,
    first_row: int,
    locator: RowLocator,
    finder: RowClassifier,
    leaving: _LeavingRows,
    arenas: NewArenas,
) -> _FoundRows:
    """Return the rows of a chunk that change; its table begins at row `first_row`."""
    w = int(locator.layout.width_of_table[chunk.table])
    row_class = finder.find(chunk)
    leaving_rows = leaving.take(chunk, row_class)
    changing = [leaving_rows]
    if arenas.replicas_move[w] or arenas.displaces(w, locator.layout.slots[w]):
        column = locator.holder_set_of[chunk.extent]
        if arenas.replicas_move[w]:
            changing.append(np.flatnonzero(column >= locator.ranks))
        single = np.flatnonzero(column < locator.ranks)
        slot = locator.owner_slots(chunk, single)
        changing.append(single[arenas.taken(w, column[single], slot)])
    index = np.unique(np.concatenate(changing))
    counted = locator.count_column[chunk.extent[index]]
    return _FoundRows(
        row=first_row + chunk.first + index,
        width=np.full(len(index), w),
        row_class=row_class[index].astype(np.int64),
        place=chunk.extent[index],
        offset=chunk.offset[index],
        old_slots=locator.slots(chunk, index),
        leaves=np.isin(index, leaving_rows, assume_unique=True),
        striped=counted >= len(locator.holder_sets),
    )
