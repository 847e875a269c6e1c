"""Layout: the rank and slot of each row, in a few bits per row (a compact form of §5.1).

Rows of table t are LISTED, with a mark in a bitmap, or STRIPED. Slots index a rank's arena of the
row's width. With e the position of the row among the listed rows of all tables, and v its position
among the marked rows, the listed rows on all ranks that have a mark in `everywhere_bitmap`:

    listed     slot = base[group, source] + position (row_codes.py)
      marked   group = everywhere_group[t]
               position = everywhere_first[t] + v - (marked rows of the tables before)
      others   code[e - v]: group, position
    striped    c = row - (listed rows of the table before it), p = c + rotation[t], P = |order|
               owner = order[p mod P]
               slot = stripe_base[t, owner] + occurrences of owner in order[rotation[t] : p)

with `order`, of the table's pattern, repeated endlessly. A rank reads a group's rows from
`source[group, rank]`. In a plan made from an older one, c counts by the older one's bitmap
(`stripe_bitmap`), so that rows that became listed later do not shift the others.

An address is (field << 40) | slot: field is the owner's rank, or LOCAL if the reader holds the copy
that it reads. `locate` is the reference in NumPy; the kernel is csrc/include/oper/plan/translate.h.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints
from oper.plan.bitmap import listed_before, listed_before_tables, rank_in_bitmap
from oper.plan.row_codes import ListedIndex, group_bits, unpack_codes

SLOT_BITS = native.shared("slot bits", 40)
LOCAL = native.shared("field local", 0x7FFFFF)
SLOT_MASK = (1 << SLOT_BITS) - 1

LONGEST_PERIOD = 65_536  # of a stripe's pattern; the owners of its rows repeat after it


@dataclass(frozen=True)
class Located:
    """Places of rows of one table, [N] each.

    Listed rows have a `group` and a `position` in it, striped ones an `owner` and a `slot`; the
    fields of the other kind are -1.
    """

    group: Ints
    position: Ints
    owner: Ints
    slot: Ints  # at the owner, of striped rows
    code_index: Ints  # of listed rows with a code; -1 for others


@dataclass(frozen=True)
class Layout:
    """T tables, M ranks, W widths, G groups of listed rows, E listed rows."""

    rows: Ints  # [T]
    width_of_table: Ints  # [T]
    slots: Ints  # [W, M] size of each arena
    group_width: Ints  # [G]
    source: NDArray[np.uint16]  # [G, M] the rank that each rank reads from
    holds: NDArray[np.bool_]  # [G, M]
    base: Ints  # [G, M] first slot at each holder; -1 if it has no copy
    orders: tuple[NDArray[np.uint16], ...]  # patterns of ranks
    pattern_of: Ints  # [T]
    rotation: Ints  # [T] below the length of the table's order
    stripe_base: Ints  # [T, M]
    line_offset: Ints  # [T + 1] first line of each table in the bitmap
    bitmap: NDArray[np.uint64]  # [lines, 8]
    codes: NDArray[Any]  # uint32 or uint64, of listed rows without a mark; E if none has a mark
    stripe_bitmap: NDArray[np.uint64] | None = None
    everywhere_bitmap: NDArray[np.uint64] | None = None  # [lines, 8]
    everywhere_group: Ints | None = None  # [T]; None without the bitmap
    everywhere_first: Ints | None = None  # [T]

    @property
    def ranks(self) -> int:
        return self.stripe_base.shape[1]

    @property
    def group_bits(self) -> int:
        """Number of a code's bits that hold the group's number."""
        return group_bits(len(self.group_width))

    @cached_property
    def stripe_lead(self) -> Ints:
        """Occurrences of each rank in its table's order before the rotation, [T, M]."""
        lead = np.zeros(self.stripe_base.shape, dtype=np.int64)
        for t, (pattern, rotation) in enumerate(zip(self.pattern_of, self.rotation, strict=True)):
            lead[t] = np.bincount(self.orders[pattern][:rotation], minlength=self.ranks)
        return lead

    @cached_property
    def _occurrences(self) -> list[tuple[Ints, Ints]]:
        """Occurrences of each rank in each pattern, cached because sorting a pattern takes longer
        than locating the rows of a table."""
        return [occurrences(order.astype(np.int64), self.ranks) for order in self.orders]

    @cached_property
    def listed_offset(self) -> Ints:
        """Listed rows before each table, and in total, [T + 1]."""
        return listed_before_tables(self.bitmap, self.line_offset)

    @property
    def listed(self) -> int:
        """E, the number of listed rows."""
        return int(self.listed_offset[-1])

    @cached_property
    def everywhere_offset(self) -> Ints:
        """Marks in `everywhere_bitmap` before each table's rows, and in total, [T + 1]."""
        if self.everywhere_bitmap is None:
            return np.zeros(len(self.rows) + 1, dtype=np.int64)
        before = listed_before(self.everywhere_bitmap, self.line_offset[:-1])
        return np.append(before, self.listed - len(self.codes))

    @property
    def unread_copies(self) -> NDArray[np.bool_]:
        """Mask of the copies that their own rank does not read, because another's is cheaper for
        it, [G, M]."""
        return self.holds & (self.source != np.arange(self.ranks))

    def listed_places(self) -> tuple[Ints, Ints]:
        """Return the group of each listed row and its position there, [E] each."""
        index = ListedIndex(
            self.codes, self.everywhere_bitmap, self.everywhere_group, self.everywhere_first
        )
        return index.decode(len(self.group_width), self.bitmap, self.listed_offset)

    def bitmap_bytes_per_row(self) -> float:
        """Return bytes of the shared arrays of the address map per row of all tables."""
        every = (self.bitmap, self.stripe_bitmap, self.everywhere_bitmap)
        bitmaps = [b for b in every if b is not None]
        return (sum(b.nbytes for b in bitmaps) + self.codes.nbytes) / max(int(self.rows.sum()), 1)

    def stripe_rows(self, tables: Ints, rows: Ints) -> Ints:
        """Return how many of the first `rows[n]` striped rows of table `tables[n]` each rank has,
        [len(tables), M]."""
        counts = -self.stripe_lead[tables]
        for n, t in enumerate(tables):
            pattern = self.pattern_of[t]
            order, (_, copies) = self.orders[pattern], self._occurrences[pattern]
            turns, rest = divmod(int(self.rotation[t] + rows[n]), len(order))
            counts[n] += turns * copies + np.bincount(order[:rest], minlength=self.ranks)
        return counts

    def locate(self, table: int, rows: NDArray[np.integer[Any]]) -> Located:
        """Return the groups or owners of rows of a table, [N]; rows must be in range."""
        row = np.asarray(rows, dtype=np.int64)
        first = int(self.line_offset[table])
        index, listed = rank_in_bitmap(self.bitmap, first, row)
        lines = self.bitmap if self.stripe_bitmap is None else self.stripe_bitmap
        frozen, _ = rank_in_bitmap(lines, first, row)
        marked = np.zeros(len(row), dtype=bool)
        if self.everywhere_bitmap is not None:
            marks, marked = rank_in_bitmap(self.everywhere_bitmap, first, row)
            index = index - marks
        coded = listed & ~marked
        code = self.codes[np.where(coded, index, 0)] if len(self.codes) else index * 0
        group, position = unpack_codes(code, len(self.group_width))
        if self.everywhere_group is not None and self.everywhere_first is not None:
            first_position = self.everywhere_first[table] - self.everywhere_offset[table]
            group = np.where(marked, self.everywhere_group[table], group)
            position = np.where(marked, first_position + marks, position)
        owner, slot = self._stripe(table, row - (frozen - listed_before(lines, first)))
        return Located(
            group=np.where(listed, group, -1),
            position=np.where(listed, position, -1),
            owner=np.where(listed, -1, owner),
            slot=np.where(listed, -1, slot),
            code_index=np.where(coded, index, -1),
        )

    def addresses(self, table: int, rows: NDArray[np.integer[Any]], rank: int) -> Ints:
        """Return the addresses from which `rank` reads rows of a table, int64 [N]."""
        located = self.locate(table, rows)
        group = np.maximum(located.group, 0)
        source = self.source[group, rank].astype(np.int64) if len(self.source) else located.owner
        owner = np.where(located.group >= 0, source, located.owner)
        slot = located.slot
        if len(self.base):
            slot = np.where(located.group >= 0, self.base[group, owner] + located.position, slot)
        return np.where(owner == rank, LOCAL, owner) << SLOT_BITS | slot

    def _stripe(self, table: int, c: Ints) -> tuple[Ints, Ints]:
        order = self.orders[self.pattern_of[table]].astype(np.int64)
        before, copies = self._occurrences[self.pattern_of[table]]
        q, p = np.divmod(c + self.rotation[table], len(order))
        owner = order[p]
        slot = self.stripe_base[table, owner] - self.stripe_lead[table, owner]
        return owner, slot + q * copies[owner] + before[p]


def occurrences(order: Ints, ranks: int) -> tuple[Ints, Ints]:
    """Count how often the rank at each position of `order` [P] occurs before it, int64 [P], and how
    often each rank occurs in total, int64 [M]."""
    copies = np.bincount(order, minlength=ranks)
    by_rank = np.argsort(order, kind="stable")
    first = np.repeat(np.cumsum(copies) - copies, copies)
    before = np.empty(len(order), dtype=np.int64)
    before[by_rank] = np.arange(len(order)) - first
    return before, copies


@dataclass(frozen=True)
class RankMap:
    """Part of the address map that differs between ranks: addresses of the first row of each group,
    int64 [G], and of each table's stripes at each owner, int64 [T, M]."""

    rank: int
    group_base: Ints
    stripe_base: Ints


def rank_map(layout: Layout, rank: int) -> RankMap:
    """Return the part of the address map that belongs to one rank."""
    source = layout.source[:, rank].astype(np.int64)
    slot = layout.base[np.arange(len(source)), source]
    owners = np.arange(layout.ranks)
    return RankMap(
        rank,
        np.where(source == rank, LOCAL, source) << SLOT_BITS | slot,
        np.where(owners == rank, LOCAL, owners) << SLOT_BITS | layout.stripe_base,
    )


def copies_map(layout: Layout, of_rank: RankMap) -> RankMap:
    """Return the map of a rank with LOCAL for every row of which it has a copy, even if it reads
    the copy of another rank, as plans for inference may require."""
    held = layout.holds[:, of_rank.rank]
    copy = LOCAL << SLOT_BITS | layout.base[:, of_rank.rank]
    return replace(of_rank, group_base=np.where(held, copy, of_rank.group_base))


class ArenaSlots(NamedTuple):
    """Arenas of W widths on M ranks, with G groups and the stripes of T tables in them."""

    sizes: Ints  # [W, M] slots of each arena
    group_base: Ints  # [G, M] first slot of each group; -1 if the rank has no copy
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
