"""The arenas after a migration: their sizes, and the slots that are kept for new replicas.

In: rows of each class by holder set, before and after. Out: `NewArenas`. Every arena stays dense,
one slot a row. New replicas of a holder set get a block of slots behind the replicas that are
there, at equal slots of all holders if all ranks hold them, and always in training. Only if the
replicas themselves would reach beyond an arena's end are all replicas of that width laid out anew,
from slot 0 on.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.portable_math import whole_dot
from oper.cost.holder_sets import HolderSets
from oper.plan.layout import Layout
from oper.plan.row_locator import RowLocator

Flags = NDArray[np.bool_]


def one_slot_sets(sets: HolderSets, training: bool) -> Flags:
    """Return a mask of the sets whose rows have one slot number on all holders: the sets of all
    ranks, and, in training, all others of several ranks, as arenas are laid out
    (row_placement/arena_layout.py)."""
    return np.asarray(sets.everywhere | training & (sets.copies > 1))


@dataclass(frozen=True)
class ReplicaBlock:
    """Slots for new replicas of one width and holder set: `rows` of them from `start[r]` on."""

    column: int
    start: Ints  # [M]
    rows: int


@dataclass(frozen=True)
class NewArenas:
    """Arenas of W widths on M ranks."""

    holder_sets: HolderSets  # [K] the columns that rows are counted in
    size: Ints  # [W, M] slots
    blocks: list[list[ReplicaBlock]]  # of each width
    replicas_move: Flags  # [W] whether all replicas of a width are laid out anew

    @staticmethod
    def of(
        locator: RowLocator, width_of_class: Ints, before: Ints, after: Ints, one_slot: Flags
    ) -> "NewArenas":
        """Return the arenas for rows `before` and `after` [C, K], of classes of widths
        `width_of_class` [C]. `one_slot` [K] marks the columns whose holders all have a row at one
        slot."""
        sets = locator.holder_sets
        widths = len(locator.layout.slots)
        by_width = np.arange(widths)[:, None] == width_of_class[None]
        rows_before, rows_after = whole_dot(by_width, before), whole_dot(by_width, after)  # [W, K]
        size: Ints = whole_dot(rows_after, sets.holds.astype(np.int64))
        replicas_move = np.zeros(widths, dtype=bool)
        blocks = []
        for w, top in enumerate(_replica_tops(locator.layout)):
            made, end = _make_blocks(sets, one_slot, top, rows_after[w] - rows_before[w])
            if not (end <= size[w]).all():
                replicas_move[w] = True
                made, _ = _make_blocks(sets, one_slot, np.zeros_like(top), rows_after[w])
            blocks.append(made)
        return NewArenas(sets, size, blocks, replicas_move)

    def taken(self, w: int, rank: Ints, slot: Ints) -> Flags:
        """Return a mask of the slots of ranks, [N] each, in a block or beyond the arena's new
        end."""
        taken: Flags = slot >= self.size[w, rank]
        for block in self.blocks[w]:
            holds = self.holder_sets.holds[block.column]
            start = np.where(holds, block.start, 0)
            end = np.where(holds, block.start + block.rows, 0)
            taken |= (slot >= start[rank]) & (slot < end[rank])
        return taken

    def displaces(self, w: int, old_size: Ints) -> bool:
        """Return True if rows of width w with one owner may have to leave their slots, of arenas of
        `old_size` [M]."""
        return bool(self.blocks[w]) or bool((self.size[w] < old_size).any())


def _replica_tops(layout: Layout) -> Ints:
    """Return the end of the last replica's slot, [W, M]."""
    group, position = layout.listed_places()
    last = np.full(len(layout.group_width), -1, dtype=np.int64)
    np.maximum.at(last, group, position)
    tops = np.zeros(layout.slots.shape, dtype=np.int64)
    several = (layout.holds.sum(axis=1) > 1) & (last >= 0)
    for g in np.flatnonzero(several):
        end = np.where(layout.holds[g], layout.base[g] + last[g] + 1, 0)
        tops[layout.group_width[g]] = np.maximum(tops[layout.group_width[g]], end)
    return tops


def _make_blocks(
    sets: HolderSets, one_slot: Flags, top: Ints, rows: Ints
) -> tuple[list[ReplicaBlock], Ints]:
    """Return blocks for `rows[k]` more replicas in column k, behind `top` [M], and their ends,
    [M]."""
    holds = sets.holds
    columns = [k for k in range(len(top), len(holds)) if rows[k] > 0]
    blocks, top = [], top.copy()
    # Rows at one slot come first, those of most ranks before others.
    for k in sorted(columns, key=lambda k: -int(one_slot[k] * holds[k].sum())):
        start = np.full(len(top), top[holds[k]].max()) if one_slot[k] else top.copy()
        blocks.append(ReplicaBlock(k, start, int(rows[k])))
        top = np.where(holds[k], start + int(rows[k]), top)
    return blocks, top
