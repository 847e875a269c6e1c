"""The rows that a new plan has on other ranks than where they are, or has others read.

Slots are not compared: a row that stays with its holders keeps the slots that it has, and only
those that come to a rank need new ones there (schedule.py).
"""

from dataclasses import dataclass

import numpy as np

from oper.base.arrays import Ints
from oper.cost.holder_sets import HolderSets
from oper.plan.listed_rows import first_rows
from oper.plan.plan import Plan
from oper.plan.row_locator import RowLocator


@dataclass(frozen=True)
class ChangedRows:
    """N rows by global id, ascending: by table and width, the holder sets that they are `before`
    and `after`, of K that begin with the M single owners, and where they are. A listed row is at a
    position of a `group` of the layout; a striped one's group is -1, and its position is its slot.
    """

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
        """The slot of rows `index` at a rank of each that holds it, [n]."""
        if not len(self.base):
            return self.position[index]
        group = self.group[index]
        first = np.where(group >= 0, self.base[np.maximum(group, 0), rank], 0)
        return np.asarray(first + self.position[index])


def changed_rows(old: Plan, new: Plan) -> ChangedRows:
    """The rows of `old`, where they are now, that `new` has elsewhere. `new` has its tables by
    name, and maybe others; the ranks are the same."""
    layout = old.layout
    others = HolderSets(new.layout.source, new.layout.holds)
    here, there = RowLocator(old, others), RowLocator(new)
    sets, groups = here.holder_sets, len(layout.group_width)
    number = {_key(sets, k): k for k in range(len(sets))}
    of_new = np.array([number[_key(there.holder_sets, k)] for k in range(len(there.holder_sets))])
    found, first_row = [np.zeros((8, 0), dtype=np.int64)], first_rows(layout)
    for t, table in enumerate(old.tables):
        width = layout.width_of_table[t]
        chunks = zip(here.chunks(t), there.chunks(new.table_index(table.name)), strict=True)
        for now, then in chunks:
            before = here.holder_set_of[now.extent]
            after = of_new[there.holder_set_of[then.extent]]
            index = np.flatnonzero(before != after)
            extent = now.extent[index]
            striped = extent >= groups
            owner = np.where(striped, extent - groups, 0)
            start = np.where(striped, layout.stripe_base[t, owner], 0)
            position = start + now.offset[index]
            group = np.where(striped, -1, extent)
            ids = now.first + index
            same = np.full((2, len(index)), [[t], [width]])
            of_table = np.stack([first_row[t] + ids, same[0], ids, same[1]])
            places = np.stack([before[index], after[index], group, position])
            found.append(np.concatenate([of_table, places]))
    row, of, ids, width, before, after, group, position = np.concatenate(found, axis=1)
    return ChangedRows(sets, row, of, ids, width, before, after, group, position, layout.base)


def _key(sets: HolderSets, k: int) -> bytes:
    return sets.holds[k].tobytes() + sets.source[k].astype(np.uint16).tobytes()
