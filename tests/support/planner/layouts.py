"""Random layouts for the tests of address maps, and where their rows lie by counting one by one."""

import numpy as np

from oper.base import native
from oper.base.arrays import as_int64, as_tensor
from oper.plan.layout import LOCAL, SLOT_BITS, Layout
from oper.tables.table import Table


def random_layout(
    rng, rows, ranks, groups=5, period=6, wide=False, moved=False, first_slot=0, everywhere=False
) -> Layout:
    """Tables of `rows` rows, some listed; positions, bases and patterns are arbitrary, from
    `first_slot` on. `wide` asks for 64-bit codes, `moved` for stripes numbered by an older bitmap,
    `everywhere` for listed rows with marks instead of codes, of a group that may be on few ranks.
    """
    lines = [max(-(-n // 448), 1) for n in rows]
    line_offset = np.r_[0, np.cumsum(lines)].astype(np.int64)
    stripe_bitmap = _bitmap(rng, rows, line_offset)
    bitmap = stripe_bitmap.copy()
    if moved:
        bitmap[:, 1:] |= _bitmap(rng, rows, line_offset)[:, 1:]
    number = native.ops().number_bitmap
    listed_offset = [
        number(as_tensor(b.view(np.int64)), as_int64(line_offset)).numpy()
        for b in (stripe_bitmap, bitmap)
    ][1]
    listed = int(listed_offset[-1])
    orders = tuple(rng.integers(0, ranks, n).astype(np.uint16) for n in (period, 1))
    pattern_of = rng.integers(0, 2, len(rows))
    holds = rng.random((groups, ranks)) < 0.5
    holds[np.arange(groups), rng.integers(0, ranks, groups)] = True
    source = np.array(
        [[r if h[r] else rng.choice(np.flatnonzero(h)) for r in range(ranks)] for h in holds]
    )
    bits = (groups - 1).bit_length()
    dtype = np.uint64 if wide else np.uint32
    most = 2**37 if wide else 2 ** (32 - bits)
    position = rng.integers(0, most, listed).astype(dtype)
    base = first_slot + rng.integers(0, 1000, (groups, ranks))
    codes = position << dtype(bits) | rng.integers(0, groups, listed).astype(dtype)
    marks = _marks(rng, bitmap, line_offset, groups) if everywhere else {}
    if marks:
        codes = codes[: listed - np.bitwise_count(marks["everywhere_bitmap"][:, 1:]).sum()]
    return Layout(
        rows=np.array(rows, np.int64),
        width_of_table=np.zeros(len(rows), np.int64),
        slots=np.full((1, ranks), 2**40),
        group_width=np.zeros(groups, np.int64),
        source=source.astype(np.uint16),
        holds=holds,
        base=np.where(holds, base, -1),
        orders=orders,
        pattern_of=pattern_of,
        rotation=rng.integers(0, period, len(rows)) % np.array([period, 1])[pattern_of],
        stripe_base=first_slot + rng.integers(0, 1000, (len(rows), ranks)),
        line_offset=line_offset,
        bitmap=bitmap,
        codes=codes,
        stripe_bitmap=stripe_bitmap if moved else None,
        **marks,
    )


def tables_of(layout) -> tuple[Table, ...]:
    return tuple(Table(f"t{n}", int(rows)) for n, rows in enumerate(layout.rows))


def marks(bitmap, line_offset, rows):
    """The bits of each table's rows."""
    return [
        np.unpackbits(
            bitmap[line_offset[t] : line_offset[t + 1], 1:].copy().view(np.uint8).ravel(),
            bitorder="little",
        )[:n].astype(bool)
        for t, n in enumerate(rows)
    ]


def counted_addresses(layout, rank):
    """The addresses of all rows for a rank, by walking over them: a list per table."""
    rows = layout.rows.tolist()
    listed = marks(layout.bitmap, layout.line_offset, rows)
    frozen = layout.bitmap if layout.stripe_bitmap is None else layout.stripe_bitmap
    outside = marks(frozen, layout.line_offset, rows)
    bits = (len(layout.group_width) - 1).bit_length()
    codes = iter(layout.codes.tolist())
    every = [np.zeros(n, bool) for n in rows]
    if layout.everywhere_bitmap is not None:
        every = marks(layout.everywhere_bitmap, layout.line_offset, rows)
    tables = []
    for t, n in enumerate(rows):
        order = layout.orders[layout.pattern_of[t]].tolist()
        place = int(layout.rotation[t])
        used = [0] * layout.ranks
        with_mark = 0
        addresses = []
        for row in range(n):
            owner = order[place % len(order)]
            slot = int(layout.stripe_base[t, owner]) + used[owner]
            if not outside[t][row]:
                place += 1
                used[owner] += 1
            if listed[t][row]:
                if every[t][row]:
                    group = int(layout.everywhere_group[t])
                    position = int(layout.everywhere_first[t]) + with_mark
                    with_mark += 1
                else:
                    code = next(codes)
                    group, position = code & ((1 << bits) - 1), code >> bits
                owner = int(layout.source[group, rank])
                slot = int(layout.base[group, owner]) + position
            addresses.append((LOCAL if owner == rank else owner) << SLOT_BITS | slot)
        tables.append(addresses)
    return tables


def _marks(rng, bitmap, line_offset, groups):
    """The fields of a layout in which some words of each table's listed rows have marks."""
    tables = len(line_offset) - 1
    marked = bitmap.copy()
    share = np.repeat(rng.choice([0.0, 0.3, 0.9, 1.0], tables), np.diff(line_offset))
    marked[:, 1:] *= rng.random((len(bitmap), 7)) < share[:, None]
    marked[:, 1:] &= rng.integers(0, 2**64, (len(bitmap), 7), np.uint64) | np.uint64(0xFFFF)
    number = native.ops().number_bitmap
    offset = number(as_tensor(marked.view(np.int64)), as_int64(line_offset)).numpy()
    return {
        "everywhere_bitmap": marked,
        "everywhere_group": np.where(np.diff(offset), rng.integers(0, groups, tables), -1),
        "everywhere_first": rng.integers(0, 1000, tables),
    }


def _bitmap(rng, rows, line_offset):
    bitmap = np.zeros((line_offset[-1], 8), np.uint64)
    for t, n in enumerate(rows):
        share = rng.choice([0.0, 0.02, 0.5, 1.0])
        bits = np.zeros((line_offset[t + 1] - line_offset[t]) * 448, bool)
        bits[:n] = rng.random(n) < share
        words = np.packbits(bits, bitorder="little").view(np.uint64)
        bitmap[line_offset[t] : line_offset[t + 1], 1:] = words.reshape(-1, 7)
    return bitmap
