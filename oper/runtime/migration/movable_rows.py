"""A layout whose rows move one after the other.

Rows that are to move are listed, each with a code (plan/row_codes.py): the code of its present
place, and of another as soon as it has moved. So the address map of a migration differs from the
maps before it and after it only by codes, and translates ids as fast.
"""

import numpy as np

from oper.base.arrays import Ints
from oper.cost.holder_sets import HolderSets
from oper.plan.layout import Layout
from oper.plan.listed_rows import Groups, ListedRows, with_listed
from oper.plan.row_codes import group_bits
from oper.runtime.migration.changed_rows import ChangedRows


class MovableRows:
    """`layout` with the rows of `changed` listed at their places. Positions in the groups to which
    they come are slots; arenas have at most `most_slots`."""

    def __init__(self, layout: Layout, changed: ChangedRows, most_slots: int) -> None:
        sets = changed.sets
        listed = ListedRows.of(layout)
        used, group = np.unique(listed.group, return_inverse=True)
        number = np.full(len(layout.group_width) + 1, -1, dtype=np.int64)  # the last of group -1
        number[used] = np.arange(len(used))
        # After the groups that there are, one of each width and holder set, in which a row's
        # position is its slot.
        widths, self._first, self._sets = len(layout.slots), len(used), len(sets)
        groups = _joined(Groups.of(layout).take(used), _by_slot(sets, widths))
        striped = changed.group < 0
        moving = ListedRows(
            changed.row,
            np.where(striped, self._group(changed.width, changed.before), number[changed.group]),
            changed.position,
        )
        listed = listed._replace(group=group).updated(moving)
        marked = self._marked(layout, changed, number)
        slots = layout.slots
        self.layout = with_listed(layout, listed, groups, marked, slots, most_slots)
        self._bits = np.uint64(group_bits(len(groups.width)))
        codes = np.empty(len(changed), dtype=np.int64)
        for t in np.unique(changed.table):
            here = changed.table == t
            codes[here] = self.layout.locate(int(t), changed.id[here]).code_index
        assert (codes >= 0).all(), "rows that move have codes"
        self._code_index, self._width = codes, changed.width

    def move(self, rows: Ints, sets: Ints, slots: Ints) -> tuple[Ints, np.ndarray]:
        """Put rows, by number, at these slots of these holder sets, [n] each. Return the places of
        their codes in the layout's codes, and the codes."""
        codes, index = self.layout.codes, self._code_index[rows]
        group = self._group(self._width[rows], sets).astype(np.uint64)
        made = (slots.astype(np.uint64) << self._bits | group).astype(codes.dtype)
        codes[index] = made
        return index, made

    def _group(self, width: Ints, sets: Ints) -> Ints:
        return self._first + width * self._sets + sets

    @staticmethod
    def _marked(layout: Layout, changed: ChangedRows, number: Ints) -> Ints | None:
        """Return the group of each table's rows that keep their marks: none if rows of that group
        move, because marks count the rows before them."""
        if layout.everywhere_group is None:
            return None
        marked = np.where(layout.everywhere_group >= 0, number[layout.everywhere_group], -1).astype(
            np.int64
        )
        moves = layout.everywhere_group[changed.table] == changed.group
        marked[np.unique(changed.table[moves])] = -1
        return marked if (marked >= 0).any() else None


def _by_slot(sets: HolderSets, widths: int) -> Groups:
    base = np.where(sets.holds, 0, -1)
    every = HolderSets(np.tile(sets.source, (widths, 1)), np.tile(sets.holds, (widths, 1)))
    return Groups(np.repeat(np.arange(widths), len(sets)), every, np.tile(base, (widths, 1)))


def _joined(first: Groups, second: Groups) -> Groups:
    return Groups(
        np.concatenate([first.width, second.width]),
        first.sets + second.sets,
        np.concatenate([first.base, second.base]),
    )
