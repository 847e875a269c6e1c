"""Slots: where each group and each table's stripes begin in the arenas of all ranks."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints


class ArenaSlots(NamedTuple):
    """The arenas of W widths on M ranks, with G groups and the stripes of T tables in them."""

    sizes: Ints  # [W, M] slots of each arena
    group_base: Ints  # [G, M] first slot of each group; -1 where the rank has no copy
    stripe_base: Ints  # [T, M] first slot of each table's stripes


def give_slots(
    widths: int,
    group_width: Ints,
    holds: NDArray[np.bool_],
    group_rows: Ints,
    width_of_table: Ints,
    striped_rows: Ints,
) -> ArenaSlots:
    """Lay out the arenas: of each width the groups in their order, then the tables' stripes.

    Group g has `group_rows[g]` rows of width `group_width[g]` on the ranks that `holds[g]` [M]
    marks; table t has `striped_rows[t]` [M] rows of width `width_of_table[t]` on the ranks. Groups
    that all ranks hold must come first, so that they begin at equal slots everywhere.
    """
    slots = np.zeros((widths, holds.shape[1]), dtype=np.int64)
    base = np.full(holds.shape, -1, dtype=np.int64)
    for n, w in enumerate(group_width):
        base[n] = np.where(holds[n], slots[w], -1)
        slots[w] += holds[n] * group_rows[n]
    stripe_base = np.zeros_like(striped_rows)
    for t, w in enumerate(width_of_table):
        stripe_base[t] = slots[w]
        slots[w] += striped_rows[t]
    return ArenaSlots(slots, base, stripe_base)
