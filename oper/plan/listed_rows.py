"""Listed rows of a layout by id, and the layout with more rows listed.

Stripes still count rows that become listed, so their other rows stay in place: the old bitmap
continues to number them (layout.py). Global ids number the rows of all tables consecutively.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64, as_tensor
from oper.cost.holder_sets import HolderSets
from oper.plan.bitmap import ROWS_PER_LINE
from oper.plan.layout import Layout
from oper.plan.row_codes import pack_positions, with_marks


class Groups(NamedTuple):
    """Groups of listed rows: their widths, holder sets and first slots."""

    width: Ints  # [G]
    sets: HolderSets  # [G]
    base: Ints  # [G, M]; -1 without a copy

    @staticmethod
    def of(layout: Layout) -> "Groups":
        """Return the groups of a layout."""
        return Groups(layout.group_width, HolderSets(layout.source, layout.holds), layout.base)

    def take(self, which: Ints) -> "Groups":
        """Return the groups with these numbers."""
        return Groups(self.width[which], self.sets.take(which), self.base[which])


class ListedRows(NamedTuple):
    """Listed rows by global id, ascending, with the group of each and its position there."""

    row: Ints  # [E]
    group: Ints  # [E]
    position: Ints  # [E]

    @staticmethod
    def of(layout: Layout) -> "ListedRows":
        """Return the listed rows of a layout."""
        return ListedRows(listed_rows(layout), *layout.listed_places())

    def updated(self, others: "ListedRows") -> "ListedRows":
        """Return these rows, replaced by those of `others` with the same ids, and the rest of
        `others`."""
        # Both are in order, so this merges them; np.union1d hashes, which takes minutes for
        # millions.
        row = np.sort(np.concatenate([self.row, others.row]), kind="stable")
        row = row[np.diff(row, prepend=-1) > 0]
        group, position = np.empty((2, len(row)), dtype=np.int64)
        for rows in (self, others):
            at = np.searchsorted(row, rows.row)
            group[at], position[at] = rows.group, rows.position
        return ListedRows(row, group, position)


def listed_rows(layout: Layout) -> Ints:
    """Return the global ids of the listed rows, [E]."""
    first, rows_of_tables = 0, []
    for t, rows in enumerate(layout.rows.tolist()):
        words = layout.bitmap[layout.line_offset[t] : layout.line_offset[t + 1], 1:]
        marks = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
        rows_of_tables.append(first + np.flatnonzero(marks.reshape(-1)[:rows]))
        first += rows
    return np.concatenate(rows_of_tables)


def with_listed(
    layout: Layout,
    rows: ListedRows,
    groups: Groups,
    marked: Ints | None,
    slots: Ints,
    most_slots: int = 0,
) -> Layout:
    """Return the layout in which these rows, which include all that it lists now, are listed in
    these groups.

    The rows of group marked[t] of each table t have marks; they must be at consecutive positions.
    `slots` [W, M] are the sizes of the arenas; later positions may reach `most_slots`.
    """
    bitmap, stripe_bitmap = layout.bitmap, layout.stripe_bitmap
    if len(rows.row) > layout.listed:
        stripe_bitmap = bitmap if stripe_bitmap is None else stripe_bitmap
        bitmap = _bitmap_with(layout, rows.row)
    number = len(groups.width)
    codes = pack_positions(rows.group, rows.position, number, most_slots)
    index = with_marks(codes, number, bitmap, layout.line_offset, marked)
    return replace(
        layout,
        slots=slots,
        group_width=groups.width,
        source=groups.sets.source,
        holds=groups.sets.holds,
        base=groups.base,
        bitmap=bitmap,
        stripe_bitmap=stripe_bitmap,
        **index._asdict(),
    )


def first_rows(layout: Layout) -> Ints:
    """Return the global id of each table's first row, and the number of all rows, [T + 1]."""
    return np.concatenate([[0], np.cumsum(layout.rows)])


def by_table(layout: Layout, rows: Ints) -> tuple[Ints, Ints]:
    """Return the table of each row, given by global id, and its id there, [N] each."""
    first = first_rows(layout)
    table = np.searchsorted(first, rows, side="right") - 1
    return table, rows - first[table]


def _bitmap_with(layout: Layout, rows: Ints) -> NDArray[np.uint64]:
    """Return the layout's bitmap with more rows marked."""
    bitmap = np.array(layout.bitmap)
    table, row = by_table(layout, rows)
    line, bit = np.divmod(row, ROWS_PER_LINE)
    line += layout.line_offset[table]
    mask = np.uint64(1) << (bit % 64).astype(np.uint64)
    np.bitwise_or.at(bitmap, (line, 1 + bit // 64), mask)
    native.ops().number_bitmap(as_tensor(bitmap.view(np.int64)), as_int64(layout.line_offset))
    return bitmap
