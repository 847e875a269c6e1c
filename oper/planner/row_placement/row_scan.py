"""Passes over the counters of all rows, in native code: what plans need to know of single rows.

`histogram` counts the rows of each (table, accesses, containing): the classes (classes.py).
`scan` marks the explicit rows, those above each table's cut, in a bitmap, copies their counters
out, and sums what the striped rows carry on each rank. `class_of` names the class of each
explicit row, `assign_groups` gives the rows of each class to groups (§4.2), `pack_codes` makes of
that what the address map reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Counts, Ints
from oper.base.tensors import as_int64, as_tensor
from oper.profiling.histogram import containing_starts, containing_tensor

if TYPE_CHECKING:
    from oper.planner.problem.classes import Classes
    from oper.planner.row_placement.striping import Stripes
    from oper.profiling.profile import Profile


@dataclass(frozen=True)
class Scan:
    """What the passes over the counters found. E explicit rows, in global row order.

    `bitmap` uint64 [lines, 8] is csrc/include/oper/plan/bitmap.h's, table t from line
    `line_offset[t]`; `explicit_offset[t]` counts the explicit rows before table t. Sums of striped
    rows are per table and rank, [T, M].
    """

    bitmap: NDArray[np.uint64]
    line_offset: Ints
    explicit_offset: Ints
    explicit_accesses: Counts
    explicit_containing: Counts
    striped_rows: Ints
    striped_accesses: Ints
    striped_touched: NDArray[np.float64]  # Σ D


def scan(
    profile: "Profile",
    cut: Ints,
    quota: Ints,
    stripes: Sequence["Stripes"],
    width_of_table: Ints,
    classes: "Classes",
) -> Scan:
    """Mark the explicit rows by the cuts and collect them and the stripes' sums.

    Explicit rows of table t have more than `cut[t]` accesses (all, for -1), or are among the
    first `quota[t]` with as many. `stripes` has one pattern per width.
    """
    marked = native.ops().mark(
        as_tensor(profile.accesses), as_int64(profile.offsets), as_int64(cut), as_int64(quota)
    )
    bitmap, line_offset, explicit_offset = (tensor.numpy() for tensor in marked)
    rotation = np.stack([s.rotation for s in stripes])[width_of_table, np.arange(len(cut))]
    return collect(
        profile,
        bitmap.view(np.uint64),
        None,
        line_offset,
        explicit_offset,
        [s.order for s in stripes],
        width_of_table,
        rotation,
        stripes[0].rows.shape[1],
        classes,
    )


def collect(
    profile: "Profile",
    bitmap: NDArray[np.uint64],
    stripe_bitmap: NDArray[np.uint64] | None,
    line_offset: Ints,
    explicit_offset: Ints,
    orders: Sequence[NDArray[np.uint16]],
    pattern_of: Ints,
    rotation: Ints,
    ranks: int,
    classes: "Classes",
) -> Scan:
    """The same for explicit rows that are already marked in `bitmap`, as in a plan made earlier.

    `stripe_bitmap` numbers the striped rows where that is not `bitmap` itself; table t follows
    `orders[pattern_of[t]]`, entered at `rotation[t]`.
    """
    entry_offset, entries = _entries_by_table(classes, len(rotation))
    order_offset = np.zeros(len(orders) + 1, dtype=np.int64)
    np.cumsum([len(order) for order in orders], out=order_offset[1:])
    collected = native.ops().collect(
        as_tensor(profile.accesses),
        containing_tensor(profile.containing, profile.accesses),
        as_int64(profile.offsets),
        containing_starts(profile.containing_offsets),
        as_tensor(bitmap.view(np.int64)),
        None if stripe_bitmap is None else as_tensor(stripe_bitmap.view(np.int64)),
        as_tensor(np.concatenate(orders).astype(np.int32)),
        as_int64(order_offset),
        as_int64(pattern_of),
        as_int64(rotation),
        ranks,
        as_int64(entry_offset),
        as_int64(classes.containing[classes.entry_class[entries]]),
        as_tensor(classes.D[classes.entry_class[entries]]),
    )
    listed, containing, rows, accesses, touched = (tensor.numpy() for tensor in collected)
    return Scan(
        bitmap=bitmap,
        line_offset=line_offset,
        explicit_offset=explicit_offset,
        explicit_accesses=listed,
        explicit_containing=containing if len(containing) else listed,
        striped_rows=rows,
        striped_accesses=accesses,
        striped_touched=touched,
    )


def class_of(
    explicit_accesses: Counts,
    explicit_containing: Counts,
    classes: "Classes",
    profile: "Profile",
    scanned: Scan,
) -> NDArray[np.int32]:
    """The class of each explicit row, int32 [E]."""
    entry_offset, entries = _entries_by_table(classes, len(profile.tables))
    entry_class = classes.entry_class[entries]
    found: NDArray[np.int32] = (
        native.ops()
        .find_classes(
            as_tensor(explicit_accesses),
            as_tensor(explicit_containing),
            as_int64(scanned.explicit_offset),
            as_int64(entry_offset),
            as_int64(classes.accesses[entry_class]),
            as_int64(classes.containing[entry_class]),
            as_int64(entry_class),
        )
        .numpy()
    )
    return found


def _entries_by_table(classes: "Classes", tables: int) -> tuple[Ints, Ints]:
    """Entries of the classes in order of table, then containing: where each table's begin
    [T + 1], and their indices."""
    containing = classes.containing[classes.entry_class]
    order = np.lexsort((containing, classes.entry_table))
    offset = np.zeros(tables + 1, dtype=np.int64)
    np.cumsum(np.bincount(classes.entry_table, minlength=tables), out=offset[1:])
    return offset, order
