"""Arena slots: where each group and each table's stripes begin in the arenas of all ranks."""

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints


def give_slots(
    widths: int,
    group_width: Ints,
    holds: NDArray[np.bool_],
    group_rows: Ints,
    width_of_table: Ints,
    striped_rows: Ints,
) -> tuple[Ints, Ints, Ints]:
    """Arenas of W widths on M ranks: `group_rows` [G] rows at the ranks that `holds` [G, M] says,
    of each width those with copies on all ranks first, then `striped_rows` [T, M] of each table.

    Returns the slots of each arena [W, M], the first of each group [G, M], -1 where there is no
    copy, and the first of each table's stripes [T, M].
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
    return slots, base, stripe_base
