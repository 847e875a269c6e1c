"""A plan's rows in a layout of other tables and ranks, before any of them moves.

In: a `Plan`, the tables and ranks of a new one. Out: `CarriedLayout`. Its ranks are the M new ones,
those of the old plan that are GONE, by their old numbers, and NOWHERE, the last, which has the rows
that the old plan does not know. Its tables are the new ones, then those that were dropped. So rows
that come and rows that leave are moves like others (relocate.py): new rows come from nowhere, and
rows of dropped tables go there. `cut` takes the new tables and ranks out of the result.

Rows keep their ranks and slots. Copies on ranks that are gone are left out if a rank that stays has
one. New rows, and those of ranks that are gone, are listed; the stripes number all others as
before, because neither those rows nor the steps of ranks that are gone are counted in them.

Rows that all new ranks hold must have one slot on all. Those that only some of the old ranks held
may not: nowhere reads such rows from the last rank, and all others from the first holder, which
tells the two apart.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Floats, Ints, as_int64, as_tensor
from oper.cost.holder_sets import HolderSets, cheapest_holder_sets, single_owner_sets
from oper.plan.bitmap import ROWS_PER_LINE, WORDS_PER_LINE
from oper.plan.layout import Layout
from oper.plan.layout_parts import select_layout
from oper.plan.listed_rows import listed_rows
from oper.plan.plan import Plan
from oper.plan.row_codes import marked_groups, pack_positions, unpack_codes, with_marks
from oper.plan.row_locator import RowLocator
from oper.planner.problem.classes import table_widths
from oper.tables.table import Table, offsets


@dataclass(frozen=True)
class CarriedLayout:
    """Layout of all `tables`, the first `new_tables` of which are the new plan's, on its `ranks`,
    the ranks that are gone, and nowhere."""

    layout: Layout
    tables: tuple[Table, ...]
    new_tables: int
    ranks: int

    @staticmethod
    def of(
        old: Plan, tables: tuple[Table, ...], sets: HolderSets, read_prices: Floats
    ) -> "CarriedLayout":
        """Return the carried layout of the rows of a plan without a tier. Ranks read a row by the
        sources of the first of the holder `sets` [K, M] with its holders; without such a set, from
        the holder that `read_prices` [reader, source] make the cheapest."""
        carrier = _Carrier(old, tables, sets, read_prices)
        return CarriedLayout(carrier.layout(), carrier.tables, len(tables), sets.holds.shape[1])

    @property
    def nowhere(self) -> int:
        """The number of the rank that new rows come from and dropped ones go to."""
        return self.layout.ranks - 1

    def cut(self, layout: Layout) -> Layout:
        """Return the new tables and ranks of a layout of all, in which their rows are on these
        ranks."""
        part = select_layout(layout, np.arange(self.new_tables))
        group, position = unpack_codes(part.codes, len(part.group_width))
        used, group = np.unique(group, return_inverse=True)
        codes = pack_positions(group, position, len(used))
        here, holds = slice(self.ranks), part.holds[used, : self.ranks]
        marked = marked_groups(codes, holds, part.bitmap, part.listed_offset)
        marks = with_marks(codes, len(used), part.bitmap, part.line_offset, marked)
        return replace(
            part,
            slots=part.slots[:, here],
            group_width=part.group_width[used],
            source=part.source[used, here],
            holds=holds,
            base=part.base[used, here],
            stripe_base=part.stripe_base[:, here],
            **marks._asdict(),
        )


def padded(sets: HolderSets, ranks: int) -> HolderSets:
    """Return the sets on more ranks, which hold nothing and read from the first holder."""
    more = ranks - sets.holds.shape[1]
    first = np.repeat(sets.holds.argmax(axis=1)[:, None], more, axis=1)
    return HolderSets(
        np.concatenate([sets.source, first.astype(np.uint16)], axis=1),
        np.pad(sets.holds, ((0, 0), (0, more))),
    )


class _Rows(NamedTuple):
    """Listed rows, [N] each."""

    row: Ints  # global id among all tables
    group: Ints
    position: Ints


class _Carrier:
    """Makes the layout of all tables, new and dropped, on all ranks. Its groups are the old ones,
    then one for each width and each rank that is gone or nowhere, whose positions are slots."""

    def __init__(
        self, old: Plan, new: tuple[Table, ...], sets: HolderSets, read_prices: Floats
    ) -> None:
        names = {table.name for table in new}
        self.tables = (*new, *(table for table in old.tables if table.name not in names))
        self._old, self._sets, self._ranks = old, sets, sets.holds.shape[1]
        self._read_prices = read_prices
        self._all_ranks = max(self._ranks, old.ranks) + 1
        number = {table.name: n for n, table in enumerate(self.tables)}
        self._number = np.array([number[table.name] for table in old.tables])  # of each old table
        self._first = offsets(self.tables)
        mode = old.workload.mode
        # Widths of new tables come first, as planning numbers them.
        of_new, of_old = table_widths(new, mode), table_widths(old.tables, mode)
        widths = [*of_new.widths, *(w for w in of_old.widths if w not in of_new.widths)]
        self._old_width = np.array([widths.index(width) for width in of_old.widths])
        self._widths = len(widths)
        self._width_of = np.zeros(len(self.tables), dtype=np.int64)
        self._width_of[self._number] = self._old_width[of_old.of_table]
        self._width_of[: len(new)] = of_new.of_table

    def layout(self) -> Layout:
        """Return the layout, in which all rows of the old plan are at their slots."""
        old = self._old.layout
        rows = _Rows(self._ids(listed_rows(old)), *old.listed_places())
        unstriped = (self._rows_of_gone_ranks(), self._new_rows())
        stripe_bitmap = None
        if old.stripe_bitmap is not None:
            frozen = self._ids(self._unstriped(old.stripe_bitmap))
            stripe_bitmap = self._bitmap([frozen, *(part.row for part in unstriped)])
        row, group, position = (np.concatenate(each) for each in zip(rows, *unstriped, strict=True))
        order = np.argsort(row, kind="stable")
        width, sets, base = self._groups()
        slots = np.zeros((self._widths, self._all_ranks), dtype=np.int64)
        slots[self._old_width, : old.ranks] = old.slots
        np.add.at(slots[:, -1], self._width_of, self._new_rows_of_table)
        orders, steps_before = zip(*(self._without_gone_ranks(o) for o in old.orders), strict=True)
        pattern_of, rotation = np.zeros((2, len(self.tables)), dtype=np.int64)
        pattern_of[self._number] = old.pattern_of
        rotation[self._number] = [
            steps_before[pattern][turn] % len(orders[pattern])
            for pattern, turn in zip(old.pattern_of, old.rotation, strict=True)
        ]
        stripe_base = np.zeros((len(self.tables), self._all_ranks), dtype=np.int64)
        stripe_base[self._number, : old.ranks] = old.stripe_base
        return Layout(
            rows=np.diff(self._first),
            width_of_table=self._width_of,
            slots=slots,
            group_width=width,
            source=sets.source,
            holds=sets.holds,
            base=base,
            orders=orders,
            pattern_of=pattern_of,
            rotation=rotation,
            stripe_base=stripe_base,
            line_offset=self._line_offset,
            bitmap=self._bitmap([row]),
            codes=pack_positions(group[order], position[order], len(width)),
            stripe_bitmap=stripe_bitmap,
        )

    @property
    def _line_offset(self) -> Ints:
        lines = np.maximum(-(-np.diff(self._first) // ROWS_PER_LINE), 1)
        return np.append(0, np.cumsum(lines))

    @property
    def _new_rows_of_table(self) -> Ints:
        """Number of rows of each table that the old plan does not have."""
        rows = np.diff(self._first)
        rows[self._number] -= self._old.layout.rows
        return rows

    def _ids(self, old_ids: Ints) -> Ints:
        """Return the ids among all tables of rows of the old plan, [N], by their ids there; in
        order."""
        first = offsets(self._old.tables)
        table = np.searchsorted(first, old_ids, side="right") - 1
        return np.asarray(old_ids - first[table] + self._first[self._number[table]])

    def _groups(self) -> tuple[Ints, HolderSets, Ints]:
        """Return the width [G], holders and sources, and first slots [G, ranks] of the groups."""
        old = self._old.layout
        holds = np.zeros((len(old.holds), self._all_ranks), dtype=bool)
        holds[:, : old.ranks] = old.holds
        stays = holds[:, : self._ranks].any(axis=1)
        holds[stays, self._ranks :] = False
        base = np.full(holds.shape, -1, dtype=np.int64)
        base[:, : old.ranks] = old.base
        base[~holds] = -1
        sets = self._sources(holds, base)
        gone = np.arange(self._ranks, self._all_ranks)  # and nowhere
        alone = single_owner_sets(self._all_ranks).take(gone)
        for _ in range(self._widths):
            sets = sets + alone
            base = np.concatenate([base, np.where(alone.holds, 0, -1)])
        width = np.repeat(np.arange(self._widths), len(gone))
        return np.concatenate([self._old_width[old.group_width], width]), sets, base

    def _sources(self, holds: NDArray[np.bool_], base: Ints) -> HolderSets:
        """Return the sources of groups with these holders and first slots [G, ranks]."""
        source = np.repeat(holds.argmax(axis=1)[:, None], self._all_ranks, axis=1)
        stays = holds[:, : self._ranks].any(axis=1)
        here = holds[stays, : self._ranks]
        read_from = cheapest_holder_sets(here, self._read_prices).source
        same = (here[:, None] == self._sets.holds[None]).all(axis=2)
        known = same.any(axis=1)
        read_from[known] = self._sets.source[same.argmax(axis=1)[known]]
        source[stays, : self._ranks] = read_from
        first = base[:, : self._ranks]
        uneven = holds[:, : self._ranks].all(axis=1) & (first != first[:, :1]).any(axis=1)
        source[uneven, -1] = self._ranks - 1
        return HolderSets(source.astype(np.uint16), holds)

    def _group(self, width: Ints, rank: Ints) -> Ints:
        """Return the group of a rank that is gone, or nowhere."""
        of_rank = self._all_ranks - self._ranks
        return np.asarray(len(self._old.layout.group_width) + width * of_rank + rank - self._ranks)

    def _rows_of_gone_ranks(self) -> _Rows:
        """Return the rows that are in stripes of such ranks."""
        parts = [_Rows(*np.zeros((3, 0), dtype=np.int64))]
        locator = RowLocator(self._old)
        if self._ranks >= self._old.ranks:
            return parts[0]
        groups = len(self._old.layout.group_width)
        for old_number, number in enumerate(self._number):
            for chunk in locator.chunks(old_number):
                index = np.flatnonzero(chunk.extent >= groups + self._ranks)
                row = self._first[number] + chunk.first + index
                group = self._group(self._width_of[number], chunk.extent[index] - groups)
                parts.append(_Rows(row, group, locator.owner_slots(chunk, index)))
        return _Rows(*(np.concatenate(each) for each in zip(*parts, strict=True)))

    def _unstriped(self, stripe_bitmap: NDArray[np.uint64]) -> Ints:
        """Return the rows, by their ids in the old plan, that its stripes do not count, and those
        that they count at ranks that are gone, though they have been listed since."""
        old = self._old.layout
        stripes = replace(old, bitmap=stripe_bitmap, stripe_bitmap=None)
        never, listed = listed_rows(stripes), listed_rows(old)
        since, first = np.setdiff1d(listed, never, assume_unique=True), offsets(self._old.tables)
        parts = [never]
        for t, rows in enumerate(np.split(since, np.searchsorted(since, first[1:-1]))):
            owner = stripes.locate(t, rows - first[t]).owner
            parts.append(rows[owner >= self._ranks])
        return np.concatenate(parts)

    def _new_rows(self) -> _Rows:
        """Return the rows that the old plan does not have, which are the last of their tables."""
        new = self._new_rows_of_table
        table = np.repeat(np.arange(len(self.tables)), new)
        number = np.arange(len(table)) - np.repeat(np.cumsum(new) - new, new)
        width, position = self._width_of[table], np.empty(len(table), dtype=np.int64)
        for w in range(self._widths):
            position[width == w] = np.arange(np.count_nonzero(width == w))
        row = self._first[table + 1] - new[table] + number
        return _Rows(row, self._group(width, np.full(len(table), self._all_ranks - 1)), position)

    def _without_gone_ranks(self, order: NDArray[np.uint16]) -> tuple[NDArray[np.uint16], Ints]:
        """Return a pattern without the steps of ranks that are gone, and the number of steps left
        before each. A pattern that has none left keeps a step, which no row is at."""
        left = order < self._ranks
        before = np.cumsum(left) - left
        return (order[left] if left.any() else np.zeros(1, np.uint16)), before

    def _bitmap(self, rows: list[Ints]) -> NDArray[np.uint64]:
        """Return the bitmap in which these rows are marked."""
        row, first_line = np.concatenate(rows), self._line_offset
        table = np.searchsorted(self._first, row, side="right") - 1
        line, bit = np.divmod(row - self._first[table], ROWS_PER_LINE)
        bitmap = np.zeros((int(first_line[-1]), WORDS_PER_LINE + 1), dtype=np.uint64)
        mask = np.uint64(1) << (bit % 64).astype(np.uint64)
        np.bitwise_or.at(bitmap, (line + first_line[table], 1 + bit // 64), mask)
        native.ops().number_bitmap(as_tensor(bitmap.view(np.int64)), as_int64(first_line))
        return bitmap
