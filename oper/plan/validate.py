"""Validation of a loaded plan, before anything computes with it.

Digests prove that a folder is unchanged, not that it contains a valid plan. The kernels use the
indices of the layout unchecked, because a check of each row in each batch would cost more than the
translation. Here every index is compared once, when a plan is loaded, with the size of its array.
`oper plan check` then verifies that the plan is correct, for example that no two rows share a slot.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.plan.bitmap import CHUNK_LINES, ROWS_PER_LINE, WORDS_PER_LINE, header_of
from oper.plan.layout import LOCAL, LONGEST_PERIOD, SLOT_BITS, SLOT_MASK, Layout, RankMap
from oper.plan.memories import DEVICE, HOST

_CHUNK_CODES = 1 << 20  # a few arrays of 8 MiB at a time
# A rank has a row in one slot; replanning leaves some empty slots in addition.
_MOST_SLOTS_A_ROW = 8


def validate(plan: Any) -> None:
    """Raise ValueError, which names the array and the entry, if a plan is invalid.

    `plan` is an oper.plan.plan.Plan, whose module imports this one.
    """
    layout, ranks = plan.layout, plan.ranks
    _check_small_arrays(layout, len(plan.tables), ranks)
    if layout.rows.tolist() != [table.rows for table in plan.tables]:
        raise ValueError("rows: are not those of the tables")
    listed = _check_bitmaps(layout)
    striped = layout.rows - np.diff(_listed_of(layout.stripe_bitmap, layout, listed))
    _check_arenas(layout)
    _check_codes(layout, int(listed[-1]) - _check_marks(layout, listed))
    _check_stripes(layout, striped)
    _check_memories(plan)
    entries, tables = len(layout.codes), len(plan.tables)
    counters, counts = (np.uint32, np.uint64), plan.counts
    _need(counts.accesses, "listed_accesses", counters, (entries,))
    _need(counts.samples_with_row, "listed_samples_with_row", counters, (entries,))
    _need(counts.everywhere_accesses, "everywhere_accesses", (np.int64,), (tables,))
    _need(counts.everywhere_least, "everywhere_least", (np.int64,), (tables,))
    _need(plan.partition_floor, "partition_floor", (np.int64,), (None,))
    if plan.distinct_ratio is not None:
        _need(plan.distinct_ratio, "distinct_ratio", (np.float64,), (len(plan.tables), 2))
        _need_finite(plan.distinct_ratio, "distinct_ratio")


def _check_memories(plan: Any) -> None:
    """Raise ValueError unless every table is in one memory, and the tables in the hosts have
    separate arenas and one owner per row."""
    layout, names = plan.layout, [memory.name for memory in plan.memories]
    if names not in ([DEVICE], [DEVICE, HOST]):
        raise ValueError(f"memories: expected {[DEVICE]} or {[DEVICE, HOST]}, got {names}")
    known = [t for memory in plan.memories for t in memory.tables]
    if sorted(known) != list(range(len(plan.tables))):
        raise ValueError("memories: must have every table once")
    if any(list(memory.tables) != sorted(memory.tables) for memory in plan.memories):
        raise ValueError("memories: must have their tables in order")
    if plan.host is None:
        return
    if not plan.host.tables:
        raise ValueError("memories: the hosts' memory has no table")
    if not plan.workload.training:
        raise ValueError("memories: tables in the hosts' memory must be of a plan for training")
    in_hosts = np.zeros(len(plan.tables), dtype=bool)
    in_hosts[list(plan.host.tables)] = True
    widths = layout.width_of_table[in_hosts]
    if np.isin(layout.width_of_table[~in_hosts], widths).any():
        raise ValueError("width_of_table: tables in two memories share an arena")
    copies = layout.holds[np.isin(layout.group_width, widths)].sum(axis=1)
    _need_all(copies == 1, "holds of groups in the hosts' memory", "have one rank for each")
    if plan.topology.host_memory_bytes is None or plan.topology.host_bandwidth is None:
        raise ValueError(
            "topology: host_memory and host_bandwidth must be there with tables in the hosts"
        )


def validate_rank_map(found: RankMap, layout: Layout) -> None:
    """Raise ValueError if a rank's map does not have the layout's shape, or names other ranks."""
    groups, tables = len(layout.group_width), len(layout.rows)
    _need(found.group_base, "group_base", (np.int64,), (groups,))
    _need(found.stripe_base, "stripe_base", (np.int64,), (tables, layout.ranks))
    for name, addresses in (("group_base", found.group_base), ("stripe_base", found.stripe_base)):
        field = addresses >> SLOT_BITS
        _need_all((field >= 0) & ((field < layout.ranks) | (field == LOCAL)), name, "name a rank")
        # So no row of the group or stripe gets an address of another field.
        slot = addresses & SLOT_MASK
        _need_all(slot < 1 << (SLOT_BITS - 1), name, "be slots of the arenas")


def _check_small_arrays(layout: Layout, tables: int, ranks: int) -> None:
    widths, groups = len(layout.slots), len(layout.group_width)
    ints, pair = (np.int64,), (groups, ranks)
    _need(layout.rows, "rows", ints, (tables,))
    _need(layout.slots, "slots", ints, (None, ranks))
    _need(layout.width_of_table, "width_of_table", ints, (tables,))
    _need(layout.group_width, "group_width", ints, (None,))
    _need(layout.source, "source", (np.uint16,), pair)
    _need(layout.holds, "holds", (np.bool_,), pair)
    _need(layout.base, "base", ints, pair)
    _need(layout.pattern_of, "pattern_of", ints, (tables,))
    _need(layout.rotation, "rotation", ints, (tables,))
    _need(layout.stripe_base, "stripe_base", ints, (tables, ranks))
    _need(layout.line_offset, "line_offset", ints, (tables + 1,))
    _need(layout.codes, "codes", (np.uint32, np.uint64), (None,))
    for number, order in enumerate(layout.orders):
        name = f"order_{number:05d}"
        _need(order, name, (np.uint16,), (None,))
        if not 1 <= len(order) <= LONGEST_PERIOD:
            raise ValueError(f"{name}: expected 1 to {LONGEST_PERIOD} steps, got {len(order)}")
        _need_below(order, ranks, name)
    _need_below(layout.width_of_table, widths, "width_of_table")
    _need_below(layout.group_width, widths, "group_width")
    _need_below(layout.source, ranks, "source")
    _need_below(layout.pattern_of, len(layout.orders), "pattern_of")
    period = np.array([len(order) for order in layout.orders], dtype=np.int64)
    _need_below(layout.rotation, period[layout.pattern_of], "rotation")


def _check_bitmaps(layout: Layout) -> Ints:
    """Check headers, bits and sizes; return the listed rows before each table, [T + 1]."""
    lines = np.maximum(-(-layout.rows // ROWS_PER_LINE), 1)
    offset = np.concatenate([[0], np.cumsum(lines)])
    if not np.array_equal(layout.line_offset, offset):
        raise ValueError("line_offset: is not the sum of the tables' lines")
    listed = _check_bitmap(layout.bitmap, "bitmap", offset, layout.rows)
    frozen = layout.stripe_bitmap
    if frozen is not None:
        _check_bitmap(frozen, "stripe_bitmap", offset, layout.rows)
        for first in range(0, len(frozen), CHUNK_LINES):
            part = slice(first, first + CHUNK_LINES)
            if (frozen[part, 1:] & ~layout.bitmap[part, 1:]).any():
                raise ValueError("stripe_bitmap: marks a row that is striped")
    return listed


def _check_bitmap(bitmap: NDArray[Any], name: str, offset: Ints, rows: Ints) -> Ints:
    _need(bitmap, name, (np.uint64,), (int(offset[-1]), WORDS_PER_LINE + 1))
    before = np.zeros(len(bitmap) + 1, dtype=np.int64)
    for first in range(0, len(bitmap), CHUNK_LINES):
        part = slice(first, first + CHUNK_LINES)
        counts = np.bitwise_count(bitmap[part, 1:]).astype(np.int64)
        start = before[first]
        total = start + np.cumsum(counts.sum(axis=1))
        before[first + 1 : first + 1 + len(total)] = total
        header = header_of(np.concatenate([[start], total[:-1]]), counts)
        _need_all(header == bitmap[part, 0], f"{name}, headers", "count its bits")
    # Bits after a table's last row would be counted as rows of the next table.
    last = rows - 1
    line = offset[:-1] + np.maximum(last, 0) // ROWS_PER_LINE
    used = np.clip(last[:, None] % ROWS_PER_LINE + 1 - 64 * np.arange(WORDS_PER_LINE), 0, 64)
    beyond = [
        sum(int(word) >> int(bits) for word, bits in zip(words, used_bits, strict=True))
        for words, used_bits in zip(bitmap[line, 1:], used, strict=True)
    ]
    _need_all(
        np.array([word == 0 for word in beyond], dtype=bool), name, "mark rows of its tables alone"
    )
    return before[offset]


def _listed_of(bitmap: NDArray[Any] | None, layout: Layout, listed: Ints) -> Ints:
    if bitmap is None:
        return listed
    per_line = np.bitwise_count(bitmap[:, 1:]).sum(axis=1, dtype=np.int64)
    return np.concatenate([[0], np.cumsum(per_line)])[layout.line_offset]


def _check_arenas(layout: Layout) -> None:
    rows = np.zeros(len(layout.slots), dtype=np.int64)
    np.add.at(rows, layout.width_of_table, layout.rows)
    _need_below(layout.slots, _MOST_SLOTS_A_ROW * rows[:, None] + 1, "slots")
    _need_all(layout.holds.any(axis=1), "holds", "have a rank for each group")
    reader = np.arange(len(layout.holds))[:, None]
    _need_all(layout.holds[reader, layout.source], "source", "name ranks that hold the group")
    room = layout.slots[layout.group_width]
    # Half of an address's range, so that a first slot plus a position never exceeds it.
    _need_below(layout.slots, 1 << (SLOT_BITS - 1), "slots")
    inside = (layout.base >= 0) & (layout.base <= room)
    right: NDArray[Any] = np.where(layout.holds, inside, layout.base == -1)
    _need_all(right, "base", "be slots of the arenas")


def _check_stripes(layout: Layout, striped: Ints) -> None:
    """Raise ValueError unless striped rows lie within the arenas; `striped` [T] rows are numbered
    in each table."""
    for table, rows in enumerate(striped.tolist()):
        order = layout.orders[layout.pattern_of[table]]
        turned = np.roll(order, -int(layout.rotation[table]))
        turns, rest = divmod(rows, len(order))
        copies = np.bincount(order, minlength=layout.ranks)
        size = turns * copies + np.bincount(turned[:rest], minlength=layout.ranks)
        base, room = layout.stripe_base[table], layout.slots[layout.width_of_table[table]]
        is_slot = (base >= 0) & (base < 1 << SLOT_BITS) | (size == 0)
        _need_all(is_slot, f"stripe_base of table {table}", "be slots of the arenas")
        beyond = (base + size > room) & (size > 0)
        if not beyond.any():
            continue
        name = f"stripe_base of table {table}"
        if layout.stripe_bitmap is None:
            _need_all(~beyond, name, "be slots of the arenas")
        # Rows that were listed later have left their slots, so an arena may end before them.
        steps = []
        for rank in np.flatnonzero(beyond):
            turn, step = divmod(max(int(room[rank] - base[rank]), 0), int(copies[rank]))
            steps.append(turn * len(order) + int(np.flatnonzero(turned == rank)[step]))
        _check_tail(layout, table, min(steps), name)


def _check_tail(layout: Layout, table: int, first: int, name: str) -> None:
    """Raise ValueError unless the striped rows from number `first` on lie within the arenas."""
    assert layout.stripe_bitmap is not None
    begin, end = layout.line_offset[table : table + 2]
    marked = np.bitwise_count(layout.stripe_bitmap[begin:end, 1:]).sum(axis=1, dtype=np.int64)
    before = np.arange(end - begin) * ROWS_PER_LINE - (np.cumsum(marked) - marked)
    line = max(int(np.searchsorted(before, first, side="right")) - 1, 0)
    rows, room = int(layout.rows[table]), layout.slots[layout.width_of_table[table]]
    for row in range(line * ROWS_PER_LINE, rows, _CHUNK_CODES):
        located = layout.locate(table, np.arange(row, min(row + _CHUNK_CODES, rows)))
        _need_all(located.slot < room[located.owner], name, "be slots of the arenas")


def _check_marks(layout: Layout, listed: Ints) -> int:
    """Check the rows on all ranks that have a mark instead of a code; return their number."""
    bitmap, tables = layout.everywhere_bitmap, len(layout.rows)
    group, start = layout.everywhere_group, layout.everywhere_first
    if bitmap is None:
        if group is not None or start is not None:
            raise ValueError("everywhere_bitmap: is missing, and there are rows to be marked")
        return 0
    marked = np.diff(_check_bitmap(bitmap, "everywhere_bitmap", layout.line_offset, layout.rows))
    for first in range(0, len(bitmap), CHUNK_LINES):
        part = slice(first, first + CHUNK_LINES)
        if (bitmap[part, 1:] & ~layout.bitmap[part, 1:]).any():
            raise ValueError("everywhere_bitmap: marks a row that is not listed")
    _need(group, "everywhere_group", (np.int64,), (tables,))
    _need(start, "everywhere_first", (np.int64,), (tables,))
    assert group is not None
    assert start is not None
    has = marked > 0
    if not has.any():
        raise ValueError("everywhere_bitmap: marks no row")
    _need_below(group[has], len(layout.group_width), "everywhere_group")
    _need_all(layout.holds[group[has]], "everywhere_group", "be on all ranks")
    width = layout.width_of_table[has]
    _need_all(
        layout.group_width[group[has]] == width, "everywhere_group", "be of the table's width"
    )
    room = layout.slots[width] - layout.base[group[has]]
    beyond = (start[has] < 0) | (start[has] > np.iinfo(np.int64).max - marked[has])
    _need_all(~beyond, "everywhere_first", "be positions of the group")
    end = (start + marked)[has]
    _need_all(end[:, None] <= room, "everywhere_first", "be positions within the arenas")
    return int(marked.sum())


def _check_codes(layout: Layout, listed: int) -> None:
    if len(layout.codes) != listed:
        raise ValueError(
            f"codes: {len(layout.codes):,}, and the bitmap lists {listed:,} rows without a mark"
        )
    groups, bits = len(layout.group_width), layout.group_bits
    if listed and not groups:
        raise ValueError("codes: there are listed rows and no groups")
    room = layout.slots[layout.group_width] - layout.base
    most = np.iinfo(np.int64).max
    slots = np.where(layout.holds, room, most).min(axis=1, initial=most)
    # First invalid code of each group: one comparison per row is then enough.
    number = np.arange(groups, dtype=np.uint64)
    end = np.zeros(1 << bits, dtype=np.uint64)
    end[:groups] = np.minimum(slots, most >> bits).astype(np.uint64) << np.uint64(bits) | number
    for first in range(0, listed, _CHUNK_CODES):
        code = layout.codes[first : first + _CHUNK_CODES]
        group = (code & code.dtype.type((1 << bits) - 1)).astype(np.intp)
        if (code >= end[group]).any():
            bad = first + int(np.argmax(code >= end[group]))
            raise ValueError(f"codes: number {bad:,} is of no group, or beyond its arena")


def _need(array: Any, name: str, types: tuple[Any, ...], shape: tuple[int | None, ...]) -> None:
    fits = isinstance(array, np.ndarray) and array.dtype in types and array.ndim == len(shape)
    if fits and all(n in (None, m) for n, m in zip(shape, array.shape, strict=True)):
        return
    got = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else "nothing"
    expected = " or ".join(np.dtype(t).name for t in types)
    sizes = ", ".join("any" if n is None else str(n) for n in shape)
    raise ValueError(f"{name}: expected {expected} [{sizes}], got {got}")


def _need_below(values: NDArray[Any], end: Any, name: str) -> None:
    bad = (values < 0) | (values >= end)
    if bad.any():
        raise ValueError(f"{name}: entry {values[bad][0]} is beyond what it is an index of")


def _need_all(good: Any, name: str, what: str) -> None:
    if not good.all():
        raise ValueError(
            f"{name}: must {what}, and entry {np.argwhere(~good)[0].tolist()} does not"
        )


def _need_finite(values: NDArray[Any], name: str) -> None:
    _need_all(np.isfinite(values), name, "be numbers")
