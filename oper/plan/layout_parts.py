"""Selection of a layout's tables, and the union of several layouts.

Selected tables keep the slots of their rows; `pack` then gives new slots without gaps. Joined
layouts share no arena: arenas, groups and patterns of the first come before those of the second;
tables, listed rows and lines of the bitmaps come in the order of the tables. Only the numbers of
groups and patterns change: no row moves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.plan.bitmap import join_lines, listed_before_tables
from oper.plan.layout import Layout, give_slots
from oper.plan.row_codes import pack_codes, pack_positions, unpack_codes, with_marks


def select_layout(layout: Layout, tables: Ints) -> Layout:
    """Return the layout of the tables with these numbers, ascending, with each row in its slot."""
    widths = np.unique(layout.width_of_table[tables])
    kept = np.isin(layout.group_width, widths)
    number = np.cumsum(kept) - 1
    patterns = np.unique(layout.pattern_of[tables])
    line_offset = np.append(0, np.cumsum(np.diff(layout.line_offset)[tables]))

    def bitmap(values: NDArray[np.uint64] | None) -> NDArray[np.uint64] | None:
        if values is None:
            return None
        first = layout.line_offset
        return join_lines([values[first[t] : first[t + 1]] for t in tables], line_offset)[0]

    listed, stripe_bitmap = bitmap(layout.bitmap), bitmap(layout.stripe_bitmap)
    assert listed is not None
    if stripe_bitmap is not None and np.array_equal(stripe_bitmap, listed):
        stripe_bitmap = None
    marks: dict[str, Any] = {}
    group, first = layout.everywhere_group, layout.everywhere_first
    if group is not None and first is not None and (group[tables] >= 0).any():
        groups = group[tables]
        marks["everywhere_bitmap"] = bitmap(layout.everywhere_bitmap)
        marks["everywhere_group"] = np.where(groups >= 0, number[groups], -1)
        marks["everywhere_first"] = first[tables]
    whole = LayoutPart(layout, np.arange(len(layout.rows)))
    coded = list(pieces_of(layout.codes, whole.coded_offset))
    codes = np.concatenate([layout.codes[:0], *(coded[t] for t in tables)])
    old_group, position = unpack_codes(codes, len(layout.group_width))
    return Layout(
        rows=layout.rows[tables],
        width_of_table=np.searchsorted(widths, layout.width_of_table[tables]),
        slots=layout.slots[widths],
        group_width=np.searchsorted(widths, layout.group_width[kept]),
        source=layout.source[kept],
        holds=layout.holds[kept],
        base=layout.base[kept],
        orders=tuple(layout.orders[n] for n in patterns),
        pattern_of=np.searchsorted(patterns, layout.pattern_of[tables]),
        rotation=layout.rotation[tables],
        stripe_base=layout.stripe_base[tables],
        line_offset=line_offset,
        bitmap=listed,
        codes=pack_positions(number[old_group], position, int(kept.sum())),
        stripe_bitmap=stripe_bitmap,
        **marks,
    )


def pack(layout: Layout) -> Layout:
    """Return the layout with new slots, in which the rows of each arena follow each other without
    gaps, and without empty groups.

    Every row keeps its holders and its sources. In a layout made from an older one, slots that rows
    have left in their stripes may have been given to other rows; here they stay empty.
    """
    group, _ = layout.listed_places()
    used = np.flatnonzero(np.bincount(group, minlength=len(layout.group_width)))
    # Groups that all ranks hold must come first, which a replanned layout does not guarantee.
    everywhere = layout.holds[used].all(axis=1)
    used = used[np.lexsort((used, ~everywhere, layout.group_width[used]))]
    number = np.full(
        len(layout.group_width) + 1, -1, dtype=np.int32
    )  # the last element is of group -1
    number[used] = np.arange(len(used))
    codes, group_rows = pack_codes(number[group], len(used))
    # Rows with marks keep them, so the counts of the other rows stay theirs.
    marked = None
    if layout.everywhere_group is not None:
        marked = number[layout.everywhere_group].astype(np.int64)
    stripes = layout.bitmap if layout.stripe_bitmap is None else layout.stripe_bitmap
    unstriped = np.diff(listed_before_tables(stripes, layout.line_offset))
    group_width = layout.group_width[used]
    slots, base, stripe_base = give_slots(
        len(layout.slots),
        group_width,
        layout.holds[used],
        group_rows,
        layout.width_of_table,
        layout.stripe_rows(np.arange(len(layout.rows)), layout.rows - unstriped),
    )
    return replace(
        layout,
        slots=slots,
        group_width=group_width,
        source=layout.source[used],
        holds=layout.holds[used],
        base=base,
        stripe_base=stripe_base,
        **with_marks(codes, len(used), layout.bitmap, layout.line_offset, marked)._asdict(),
    )


@dataclass(frozen=True)
class LayoutPart:
    """Layout of some of T tables: its table n is table `tables[n]` of all."""

    layout: Layout
    tables: Ints

    @property
    def coded_offset(self) -> Ints:
        """Listed rows with a code before each table, and in total."""
        return self.layout.listed_offset - self.layout.everywhere_offset


def in_table_order(parts: Sequence[tuple[Ints, Any]]) -> list[Any]:
    """Return the values of all tables, in order, from parts that have them for some tables by
    number."""
    value_of = {
        int(t): value for tables, values in parts for t, value in zip(tables, values, strict=True)
    }
    return [value_of[t] for t in sorted(value_of)]


def pieces_of(values: NDArray[Any], first: Ints) -> Iterator[NDArray[Any]]:
    """Yield the values of each table; those of table t begin at `first[t]`."""
    return (values[first[t] : first[t + 1]] for t in range(len(first) - 1))


def join_layouts(parts: Sequence[LayoutPart]) -> Layout:
    """Return the layout of all tables of the parts, which are numbered from 0 without gaps."""
    layouts = [part.layout for part in parts]
    groups = sum(len(one.group_width) for one in layouts)
    width_offset = _before(len(one.slots) for one in layouts)
    group_offset = _before(len(one.group_width) for one in layouts)
    order_offset = _before(len(one.orders) for one in layouts)

    def by_table(values: Sequence[NDArray[Any]]) -> NDArray[Any]:
        of_parts = zip(parts, values, strict=True)
        return np.stack(in_table_order([(part.tables, of_part) for part, of_part in of_parts]))

    def joined(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(one, name) for one in layouts])

    rows = by_table([one.rows for one in layouts])
    lines = by_table([np.diff(one.line_offset) for one in layouts])
    line_offset = np.append(0, np.cumsum(lines))

    def bitmap(values: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        of_parts = zip(parts, values, strict=True)
        pieces = [(p.tables, list(pieces_of(v, p.layout.line_offset))) for p, v in of_parts]
        return join_lines(in_table_order(pieces), line_offset)[0]

    stripe_bitmap = None
    if any(one.stripe_bitmap is not None for one in layouts):
        frozen = (one.stripe_bitmap for one in layouts)
        stripe_bitmap = bitmap(
            [one.bitmap if f is None else f for one, f in zip(layouts, frozen, strict=True)]
        )
    marks: dict[str, Any] = {}
    if any(one.everywhere_bitmap is not None for one in layouts):
        marks_of_layouts = [
            _marks(one, offset) for one, offset in zip(layouts, group_offset, strict=True)
        ]
        marks["everywhere_bitmap"] = bitmap([array for array, _, _ in marks_of_layouts])
        marks["everywhere_group"] = by_table([array for _, array, _ in marks_of_layouts])
        marks["everywhere_first"] = by_table([array for _, _, array in marks_of_layouts])
    return Layout(
        rows=rows,
        width_of_table=by_table(
            [one.width_of_table + n for one, n in zip(layouts, width_offset, strict=True)]
        ),
        slots=joined("slots"),
        group_width=np.concatenate(
            [one.group_width + n for one, n in zip(layouts, width_offset, strict=True)]
        ),
        source=joined("source"),
        holds=joined("holds"),
        base=joined("base"),
        orders=tuple(order for one in layouts for order in one.orders),
        pattern_of=by_table(
            [one.pattern_of + n for one, n in zip(layouts, order_offset, strict=True)]
        ),
        rotation=by_table([one.rotation for one in layouts]),
        stripe_base=by_table([one.stripe_base for one in layouts]),
        line_offset=line_offset,
        bitmap=bitmap([one.bitmap for one in layouts]),
        codes=_joined_codes(parts, group_offset, groups),
        stripe_bitmap=stripe_bitmap,
        **marks,
    )


def _before(sizes: Any) -> Ints:
    """Return the sum of the sizes before each."""
    values = np.array(list(sizes), dtype=np.int64)
    return np.asarray(np.cumsum(values) - values)


def _marks(layout: Layout, group_offset: int) -> tuple[NDArray[np.uint64], Ints, Ints]:
    """Return the three arrays of marked rows, also of a layout without any."""
    group, first = layout.everywhere_group, layout.everywhere_first
    if layout.everywhere_bitmap is None or group is None or first is None:
        none = np.zeros(len(layout.rows), dtype=np.int64)
        return np.zeros_like(layout.bitmap), none - 1, none
    return layout.everywhere_bitmap, np.where(group >= 0, group + group_offset, -1), first


def _joined_codes(parts: Sequence[LayoutPart], group_offset: Ints, groups: int) -> NDArray[Any]:
    """Return the codes of all parts, table by table, with the new numbers of their groups."""
    by_table: list[list[Any]] = [[], []]
    for part, offset in zip(parts, group_offset, strict=True):
        group, position = unpack_codes(part.layout.codes, len(part.layout.group_width))
        for which, values in enumerate((group + offset, position)):
            by_table[which].append((part.tables, list(pieces_of(values, part.coded_offset))))
    group, position = (np.concatenate(in_table_order(pieces)) for pieces in by_table)
    return pack_positions(group, position, groups)
