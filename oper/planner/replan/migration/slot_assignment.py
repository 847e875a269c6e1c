"""New slots for the rows that change.

In: `ChangedRows`, `NewArenas`. Out: `NewSlots`, and the groups of the new layout.

* A row that becomes a replica takes the slots of one that no longer is, of the same holder set; the
  others take the holder set's block.
* Rows in the way and rows that come to a rank as single owner take the slots that rows left, or new
  ones at the end. They are listed in a group whose first slot is 0, so that their position is the
  slot.
"""

from dataclasses import dataclass

import numpy as np

from oper.base.arrays import Ints
from oper.cost.holder_sets import HolderSets
from oper.plan.layout import Layout
from oper.plan.listed_rows import Groups
from oper.plan.row_locator import RowLocator
from oper.planner.replan.migration.new_arenas import NewArenas
from oper.planner.replan.migration.rows_to_move import ChangedRows


@dataclass(frozen=True)
class NewSlots:
    """Slots and groups in the new layout of the N rows that change."""

    slots: Ints  # [N, M], -1 if a rank holds no copy
    group: Ints  # [N]
    position: Ints  # [N] in the group


class NewGroups:
    """Groups of the new layout: those of the old one, then the further ones that rows need."""

    def __init__(self, locator: RowLocator) -> None:
        layout: Layout = locator.layout
        self._groups = locator.holder_sets
        self.width = layout.group_width.tolist()
        self.source, self.holds, self.base = (
            list(layout.source),
            list(layout.holds),
            list(layout.base),
        )
        self._by_slot: dict[tuple[int, int], int] = {}  # (width, rank) -> group
        for g, w in enumerate(self.width):
            if self.holds[g].sum() == 1 and self.base[g].max() == 0:
                self._by_slot[w, int(self.holds[g].argmax())] = g

    @property
    def all(self) -> Groups:
        """All of them."""
        sets = HolderSets(np.stack(self.source), np.stack(self.holds))
        return Groups(np.array(self.width, dtype=np.int64), sets, np.stack(self.base))

    def add(self, w: int, column: int, base: Ints) -> int:
        """Return a group of a column's holders, with its first slots `base` [M]."""
        self.width.append(w)
        self.source.append(self._groups.source[column])
        self.holds.append(self._groups.holds[column])
        self.base.append(base)
        return len(self.width) - 1

    def by_slot(self, w: int, rank: int) -> int:
        """Return the group of a rank's rows whose position is the slot."""
        if (w, rank) not in self._by_slot:
            base = np.where(self._groups.holds[rank], 0, -1)
            self._by_slot[w, rank] = self.add(w, rank, base)
        return self._by_slot[w, rank]


class SlotAssignment:
    """Assigns slots width by width: replicas first, then rows with one owner."""

    def __init__(
        self, locator: RowLocator, arenas: NewArenas, rows: ChangedRows, groups: NewGroups
    ) -> None:
        self._locator, self._arenas, self._rows, self._groups = locator, arenas, rows, groups
        none = np.full(len(rows), -1, dtype=np.int64)
        self._new = NewSlots(np.full_like(rows.old_slots, -1), none, none.copy())

    def assign(self) -> NewSlots:
        """Return the new slots of all rows that change."""
        for w in range(len(self._locator.layout.slots)):
            self._place_owned(w, self._place_replicas(w))
        return self._new

    def _place_replicas(self, w: int) -> list[Ints]:
        """Place the rows that become replicas; the slots that former ones leave, by rank."""
        rows, new, columns = self._rows, self._new, self._locator.holder_sets
        moves = rows.leaves | self._arenas.replicas_move[w]
        blocks = {block.column: block for block in self._arenas.blocks[w]}
        released: list[list[Ints]] = [[] for _ in range(self._locator.ranks)]
        of_width = rows.width == w
        for k in range(self._locator.ranks, len(columns)):
            holders = np.flatnonzero(columns.holds[k])
            incoming = np.flatnonzero(of_width & (rows.after == k) & moves)
            freed = np.flatnonzero(of_width & (rows.before == k) & moves)
            freed = freed[np.argsort(rows.old_slots[freed, holders[0]], kind="stable")]
            reused = 0 if self._arenas.replicas_move[w] else min(len(incoming), len(freed))
            into, out_of = incoming[:reused], freed[:reused]
            new.slots[into] = rows.old_slots[out_of]
            new.group[into], new.position[into] = rows.place[out_of], rows.offset[out_of]
            for r in holders:
                released[r].append(rows.old_slots[freed[reused:], r])
            rest = incoming[reused:]
            if len(rest):
                start = np.where(columns.holds[k], blocks[k].start, -1)
                new.group[rest] = self._groups.add(w, k, start)
                new.position[rest] = np.arange(len(rest))
                for r in holders:
                    new.slots[rest, r] = start[r] + np.arange(len(rest))
        return [np.concatenate([np.zeros(0, np.int64), *parts]) for parts in released]

    def _place_owned(self, w: int, released: list[Ints]) -> None:
        """Place the rows that have one owner: those in the way of others, and those that come to
        a rank. `released` are the slots that former replicas left, by rank."""
        rows, new = self._rows, self._new
        of_width = rows.width == w
        for r in range(self._locator.ranks):
            left = rows.old_slots[of_width & (rows.before == r), r]
            grown = np.arange(self._locator.layout.slots[w, r], self._arenas.size[w, r])
            free = np.concatenate([released[r], left, grown])
            free = np.sort(free[~self._arenas.taken(w, np.full(len(free), r), free)])
            incoming = np.flatnonzero(of_width & (rows.after == r))
            assert len(free) == len(incoming), "slots that are free, and rows that need one"
            if not len(incoming):
                continue
            # A former replica keeps its own slot if that is free; all others take the rest.
            old_slots = rows.old_slots[incoming, r]
            stays = np.isin(old_slots, free)
            slot = np.where(stays, old_slots, -1)
            slot[~stays] = np.setdiff1d(free, old_slots[stays], assume_unique=True)
            new.slots[incoming, r] = slot
            new.group[incoming] = self._groups.by_slot(w, r)
            new.position[incoming] = slot
