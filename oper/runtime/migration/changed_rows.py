"""The rows that a new plan has on other ranks than their present ones, or has others read.

Slots are not compared: a row that stays with its holders keeps its slots, and only rows that come
to a rank need new slots there (schedule.py).
"""

from dataclasses import dataclass

import numpy as np
import torch

from oper.base.arrays import Ints
from oper.cost.holder_sets import HolderSets
from oper.plan.address_map import AddressMap
from oper.plan.layout import SLOT_BITS, RankMap
from oper.plan.listed_rows import first_rows
from oper.plan.plan import Plan
from oper.plan.row_locator import RowLocator

_CHUNK_ROWS = 1 << 20  # a few arrays of 8 MiB at a time


@dataclass(frozen=True)
class ChangedRows:
    """N rows by global id, ascending, with their table and width, the holder sets that they are
    `before` and `after`, of K that begin with the M single owners, and their present places. A
    listed row is at a position of a `group` of the layout; a striped row's group is -1, and its
    position is its slot."""

    sets: HolderSets  # [K]
    row: Ints
    table: Ints
    id: Ints  # in the table
    width: Ints
    before: Ints
    after: Ints
    group: Ints
    position: Ints
    base: Ints  # [G, M] first slot of each group of the layout at its holders

    def __len__(self) -> int:
        return len(self.row)

    def slot(self, index: Ints, rank: Ints) -> Ints:
        """Return the slot of each row of `index` at a rank that holds it, [n]."""
        if not len(self.base):
            return self.position[index]
        group = self.group[index]
        first = np.where(group >= 0, self.base[np.maximum(group, 0), rank], 0)
        return np.asarray(first + self.position[index])


def changed_rows(old: Plan, new: Plan) -> ChangedRows:
    """Return the rows of `old`, at their present places, that `new` has elsewhere. `new` has its
    tables by name, and maybe others; the ranks are the same."""
    layout, first_row = old.layout, first_rows(old.layout)
    here, there = RowLocator(old, HolderSets(new.layout.source, new.layout.holds)), RowLocator(new)
    sets = here.holder_sets
    number = {_key(sets, k): k for k in range(len(sets))}
    of_new = np.array([number[_key(there.holder_sets, k)] for k in range(len(there.holder_sets))])
    before = _map_of_sets(old, here.holder_set_of)
    after = _map_of_sets(new, of_new[there.holder_set_of])
    parts = [np.zeros((8, 0), dtype=np.int64)]
    for t, table in enumerate(old.tables):
        then = new.table_index(table.name)
        for first in range(0, table.rows, _CHUNK_ROWS):
            every = torch.arange(first, min(first + _CHUNK_ROWS, table.rows))
            now, later = (of.translate(n, every) for of, n in ((before, t), (after, then)))
            index = ((now ^ later) >> SLOT_BITS).nonzero().view(-1)
            ids = every[index].numpy()
            place = layout.locate(t, ids)
            group = place.group
            position = np.where(group >= 0, place.position, place.slot)
            of_table = np.full((2, len(ids)), [[t], [layout.width_of_table[t]]])
            sets_of = [(of[index] >> SLOT_BITS).numpy() for of in (now, later)]
            row = first_row[t] + ids
            parts.append(np.stack([row, of_table[0], ids, of_table[1], *sets_of, group, position]))
    row, of, ids, width, was, comes, group, position = np.concatenate(parts, axis=1)
    return ChangedRows(sets, row, of, ids, width, was, comes, group, position, layout.base)


def _map_of_sets(plan: Plan, set_of_extent: Ints) -> AddressMap:
    """Return a map of no real rank, whose addresses have the number of a row's holder set as their
    field; `set_of_extent` [G + M] is the holder set of each extent (row_locator.py)."""
    groups, fields = len(plan.layout.group_width), set_of_extent << SLOT_BITS
    stripes = np.broadcast_to(fields[groups:], plan.layout.stripe_base.shape)
    return AddressMap(plan.tables, plan.layout, RankMap(0, fields[:groups], stripes))


def _key(sets: HolderSets, k: int) -> bytes:
    return sets.holds[k].tobytes() + sets.source[k].astype(np.uint16).tobytes()
