"""Rows to list one by one, and sums of the striped rows: one pass over the counters of all rows, in
native code.

Listed are the rows above a number of accesses in each table (`Cuts`), which follows from the number
of rows of each class to list. In: a profile, the cuts (or a bitmap made earlier) and the stripes.
Out: `RowScan`. `scan_by_cuts` marks the rows above each table's cut in a bitmap, copies their
counters out and adds up the striped rows on each rank; `scan_marked` does the same for rows that
are already marked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Counts, Floats, Ints, as_int64, as_tensor
from oper.plan.bitmap import all_marked
from oper.planner.problem.class_finder import TableEntries
from oper.planner.problem.classes import Classes
from oper.planner.row_placement.striping import Stripes
from oper.profiling.histogram import samples_with_row_starts, samples_with_row_tensor
from oper.profiling.profile import Profile

# At least so many rows of each width are listed and have one owner, to even out the chance
# differences between stripes with. The share of all rows that `make_cuts` is given is 1/256 or
# more: 0.016 bytes a row in the address map.
_RESERVE_ROWS = 4096
_COUNTED_AT_A_TIME = 1 << 20  # rows: their classes stay in a cache


@dataclass(frozen=True)
class Cuts:
    """Rows of table t with more than `cut[t]` accesses are listed, [T], and so are the first
    `quota[t]` of those with exactly as many. `listed` [C] counts them by class: exactly if no two
    classes of a table share their accesses, and nearly otherwise."""

    cut: Ints
    quota: Ints
    listed: Ints


def make_cuts(
    classes: Classes, width_of_table: Ints, wanted: Ints, replicas: Ints, reserve_share: float
) -> Cuts:
    """Return the least cuts that list at least `wanted[c]` rows of each class, and, in addition to
    the `replicas[c]` among them, `reserve_share` of all rows of each width as a reserve."""
    tables = len(width_of_table)
    cut = np.full(tables, np.iinfo(np.int64).max)
    quota = np.zeros(tables, dtype=np.int64)
    listed = np.zeros(len(classes), dtype=np.int64)
    for w in range(len(classes.widths)):
        members = np.flatnonzero(classes.width == w)  # accesses descend
        if not len(members):
            continue
        rows, single = classes.rows[members], classes.rows[members] - replicas[members]
        reserve = max(_RESERVE_ROWS, int(rows.sum() * reserve_share))
        reserve = min(int(single.sum()), reserve)
        last = np.flatnonzero(wanted[members])
        by_wanted = int(last[-1]) if len(last) else 0
        by_reserve = int(np.searchsorted(np.cumsum(single), reserve))
        edge = int(classes.accesses[members[max(by_wanted, min(by_reserve, len(members) - 1))]])
        above = members[classes.accesses[members] > edge]
        level = members[classes.accesses[members] == edge]
        listed[above] = classes.rows[above]
        spare = int((listed[above] - replicas[above]).sum())
        need = max(int(wanted[level].sum()), reserve - spare + int(replicas[level].sum()))
        of_width = np.flatnonzero(width_of_table == w)
        cut[of_width] = edge
        # At the cut: the wanted rows of each class; reserves come from classes with these first.
        reserve = need - int(wanted[level].sum())
        for c in sorted(level.tolist(), key=lambda c: -int(wanted[c])):
            beside = min(reserve, int(classes.rows[c] - wanted[c]))
            reserve -= beside
            listed[c] = left = int(wanted[c]) + beside
            for e in np.flatnonzero(classes.entry_class == c):
                take = min(left, int(classes.entry_rows[e]))
                quota[classes.entry_table[e]] += take
                left -= take
    return Cuts(cut, quota, listed)


def listed_by_table(classes: Classes, cuts: Cuts, of_width: NDArray[np.bool_]) -> Ints:
    """Return the listed rows of each table, [T]; 0 for tables that are not marked in `of_width`
    [T]."""
    listed = np.zeros(len(of_width), dtype=np.int64)
    table, accesses = classes.entry_table, classes.accesses[classes.entry_class]
    above = of_width[table] & (accesses > cuts.cut[table])
    np.add.at(listed, table[above], classes.entry_rows[above])
    return listed + np.where(of_width, cuts.quota, 0)


@dataclass(frozen=True)
class StripeOrders:
    """The patterns of ranks that striped rows follow: table t follows `orders[order_of_table[t]]`
    from position `rotation[t]` on, over M = `ranks` ranks."""

    orders: Sequence[NDArray[np.uint16]]
    order_of_table: Ints  # [T]
    rotation: Ints  # [T]
    ranks: int

    @staticmethod
    def of(stripes: Sequence[Stripes], width_of_table: Ints) -> "StripeOrders":
        """Return the orders of `stripes`, which are one for each width."""
        rotation = np.stack([s.rotation for s in stripes])
        return StripeOrders(
            [s.order for s in stripes],
            width_of_table,
            rotation[width_of_table, np.arange(len(width_of_table))],
            stripes[0].rows.shape[1],
        )


@dataclass(frozen=True)
class RowScan:
    """Result of the pass: E listed rows of C classes, in order of row ids, and sums of the striped
    rows by table and rank."""

    classes: Classes
    bitmap: NDArray[np.uint64]  # [lines, 8], as in csrc/include/oper/plan/bitmap.h
    line_offset: Ints  # [T + 1] first line of each table
    listed_offset: Ints  # [T + 1] listed rows before each table
    listed_accesses: Counts  # [E]
    listed_samples_with_row: Counts  # [E]; the accesses themselves if no table has bags
    striped_rows: Ints  # [T, M]
    striped_accesses: Ints  # [T, M]
    striped_expected: Floats  # [T, M] Σ accesses expected in as many further samples
    striped_touched: Floats  # [T, M] Σ D
    striped_of_nodes: Floats  # [K, T, M] Σ D of a node, by the size of nodes

    @cached_property
    def class_of_row(self) -> NDArray[np.int32]:
        """The class of each listed row, [E]."""
        entries = TableEntries.of(self.classes, len(self.listed_offset) - 1)
        return entries.find(self.listed_accesses, self.listed_samples_with_row, self.listed_offset)

    @property
    def listed_of_classes(self) -> Ints:
        """Listed rows of each class, [C]."""
        if len(self.listed_accesses) == self.classes.rows.sum():
            return self.classes.rows
        rows = np.zeros(len(self.classes), dtype=np.int64)
        # In parts: bincount copies its input to 64 bits, which would be slow for all rows.
        for begin in range(0, len(self.class_of_row), _COUNTED_AT_A_TIME):
            part = self.class_of_row[begin : begin + _COUNTED_AT_A_TIME]
            rows += np.bincount(part, minlength=len(rows))
        return rows


def scan_by_cuts(
    profile: Profile, cut: Ints, quota: Ints, stripes: StripeOrders, classes: Classes
) -> RowScan:
    """List the rows of table t with more than `cut[t]` accesses (all, for -1) and the first
    `quota[t]` of those with exactly as many; stripe the others. A scan that lists all rows, as
    copies are listed, reads no counters."""
    if _lists_all_rows(np.diff(profile.offsets), cut, quota, classes):
        return _scan_of_all_rows(profile, stripes, classes)
    bitmap, line_offset, listed_offset = native.ops().list_hot_rows(
        as_tensor(profile.accesses), as_int64(profile.offsets), as_int64(cut), as_int64(quota)
    )
    return scan_marked(
        profile,
        bitmap.numpy().view(np.uint64),
        None,
        line_offset.numpy(),
        listed_offset.numpy(),
        stripes,
        classes,
    )


def _lists_all_rows(rows: Ints, cut: Ints, quota: Ints, classes: Classes) -> bool:
    """Return whether the cuts list all `rows` [T] of each table."""
    table, accesses = classes.entry_table, classes.accesses[classes.entry_class]

    def counted(entries: NDArray[np.bool_]) -> Ints:
        listed = np.zeros(len(rows), dtype=np.int64)
        np.add.at(listed, table[entries], classes.entry_rows[entries])
        return listed

    at_cut = np.minimum(counted(accesses == cut[table]), quota)
    return bool((counted(accesses > cut[table]) + at_cut == rows).all())


def _scan_of_all_rows(profile: Profile, stripes: StripeOrders, classes: Classes) -> RowScan:
    """Return the scan that lists every row of the profile."""
    bitmap, line_offset = all_marked(np.diff(profile.offsets))
    nothing = np.zeros((len(stripes.rotation), stripes.ranks))
    accesses = samples_with_row = profile.accesses
    if len(profile.samples_with_row):
        samples_with_row = accesses.copy()
        starts = profile.samples_with_row_offsets
        for t in np.flatnonzero(np.diff(starts)).tolist():
            of_table = profile.samples_with_row[starts[t] : starts[t + 1]]
            samples_with_row[profile.offsets[t] : profile.offsets[t + 1]] = of_table
    return RowScan(
        classes=classes,
        bitmap=bitmap,
        line_offset=line_offset,
        listed_offset=profile.offsets,
        listed_accesses=accesses,
        listed_samples_with_row=samples_with_row,
        striped_rows=nothing.astype(np.int64),
        striped_accesses=nothing.astype(np.int64),
        striped_expected=nothing,
        striped_touched=nothing,
        striped_of_nodes=np.zeros((classes.D_of_node.shape[1], *nothing.shape)),
    )


def scan_marked(
    profile: Profile,
    bitmap: NDArray[np.uint64],
    stripe_bitmap: NDArray[np.uint64] | None,
    line_offset: Ints,
    listed_offset: Ints,
    stripes: StripeOrders,
    classes: Classes,
) -> RowScan:
    """Scan the counters of a plan made earlier, whose listed rows are marked in `bitmap`; striped
    rows are numbered by `stripe_bitmap` if that is not `bitmap` itself."""
    entries = TableEntries.of(classes, len(stripes.rotation))
    order_offset = np.zeros(len(stripes.orders) + 1, dtype=np.int64)
    np.cumsum([len(order) for order in stripes.orders], out=order_offset[1:])

    def scanned(touched: Floats) -> Any:
        return native.ops().listed_and_striped_counts(
            as_tensor(profile.accesses),
            samples_with_row_tensor(profile.samples_with_row, profile.accesses),
            as_int64(profile.offsets),
            samples_with_row_starts(profile.samples_with_row_offsets),
            as_tensor(bitmap.view(np.int64)),
            None if stripe_bitmap is None else as_tensor(stripe_bitmap.view(np.int64)),
            as_tensor(np.concatenate(stripes.orders).astype(np.int32)),
            as_int64(order_offset),
            as_int64(stripes.order_of_table),
            as_int64(stripes.rotation),
            stripes.ranks,
            as_int64(entries.first),
            as_int64(entries.samples_with_row),
            as_tensor(touched),
            as_tensor(entries.weight),
        )

    accesses, samples_with_row, striped_rows, striped_accesses, expected, striped_touched = scanned(
        entries.D
    )
    # A pass more for each size of nodes that have relays, of which most topologies have one.
    of_nodes = [scanned(of_size)[-1].numpy() for of_size in entries.D_of_node.T]
    listed: Counts = accesses.numpy()
    return RowScan(
        classes=classes,
        bitmap=bitmap,
        line_offset=line_offset,
        listed_offset=listed_offset,
        listed_accesses=listed,
        listed_samples_with_row=samples_with_row.numpy() if len(samples_with_row) else listed,
        striped_rows=striped_rows.numpy(),
        striped_accesses=striped_accesses.numpy(),
        striped_expected=expected.numpy(),
        striped_touched=striped_touched.numpy(),
        striped_of_nodes=np.array(of_nodes).reshape(-1, *striped_touched.shape),
    )
