"""Rows of each table and bytes of each rank by kind: replicated, listed or striped.

A row of the layout is of one kind:

    replicated   a copy on several ranks
    listed       on one rank, with a separate entry in the address map
    striped      on one rank, which follows from its number

Rows are not visited one by one: listed and marked rows are counted by the bitmaps' bits, rows of a
group by their codes, and a stripe's rows by its pattern of ranks. Only the few rows that a replan
has taken out of the stripes are looked up individually.

Bytes are counted as in `memory_bytes` of a plan: values and, in training, optimizer state, of every
copy. Empty slots, which a replan leaves in the stripes, are a further kind of bytes, so that the
kinds of a rank add up to its memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.portable_math import whole_dot
from oper.plan.bitmap import CHUNK_LINES, ROWS_PER_LINE, listed_before, rank_in_bitmap
from oper.plan.layout import Layout
from oper.plan.plan import Plan
from oper.plan.row_codes import rows_of_tables
from oper.tables.table import Table

_CHUNK_CODES = 1 << 22  # 8 bytes each while they are counted
_LINES_OF_LEFT_ROWS = 1 << 11  # of a bitmap; a line of 64 bytes is gathered for each row found


class RankBytes(NamedTuple):
    """Bytes of one memory of M ranks by the kind of the rows in them, int64 [M] each."""

    replicated: Ints
    listed: Ints
    striped: Ints
    unused: Ints  # slots that rows have left; 0 except after a replan

    @property
    def total(self) -> Ints:
        """Bytes of all kinds, equal to a plan's `memory_bytes`, [M]."""
        return self.replicated + self.listed + self.striped + self.unused


@dataclass(frozen=True)
class RowsByKind:
    """The rows of T tables, int64 [T] each, and the bytes of M ranks."""

    replicated: Ints
    listed: Ints
    striped: Ints
    copies: Ints  # of the replicated rows, over all ranks
    ranks_with_rows: Ints  # ranks that hold any of its rows
    memory_of_row: Ints  # bytes of one copy of a row: values and optimizer state
    # In the profile, of the replicated and listed rows; a plan has no counts of striped ones.
    listed_accesses: Ints
    memory: dict[str, RankBytes]  # of each of the plan's memories, by its name

    @property
    def rows(self) -> Ints:
        """Rows of all kinds, [T]."""
        return self.replicated + self.listed + self.striped

    @property
    def bytes_of_tables(self) -> Ints:
        """Bytes of all copies of a table's rows, over all ranks, [T]."""
        return (self.copies + self.listed + self.striped) * self.memory_of_row

    def to_json(self, tables: Sequence[Table], accesses: Ints | None = None) -> dict[str, Any]:
        """Return the part of `oper plan --json` and `oper plan show --json` by table and rank; with
        the tables' `accesses` [T] in the profile, if it is known."""
        columns = {
            "rows": self.rows,
            "memory_bytes": self.bytes_of_tables,
            "replicated_rows": self.replicated,
            "copies": self.copies,
            "listed_rows": self.listed,
            "striped_rows": self.striped,
            "listed_accesses": self.listed_accesses,
            **({} if accesses is None else {"accesses": accesses}),
        }
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        return {
            "tables_by_kind": [
                {"table": table.name, **dict(zip(columns, of_table, strict=True))}
                for table, of_table in zip(tables, values, strict=True)
            ],
            "memory_by_kind": {
                name: {kind: held.tolist() for kind, held in ranks._asdict().items()}
                for name, ranks in self.memory.items()
            },
        }


def rows_by_kind(plan: Plan) -> RowsByKind:
    """Return the rows of each table and the bytes of each rank, by kind."""
    layout, mode = plan.layout, plan.workload.mode
    memory_of_row = np.array([t.memory_bytes(mode) for t in plan.tables], dtype=np.int64)
    memory_of_width = np.zeros(len(layout.slots), dtype=np.int64)
    memory_of_width[layout.width_of_table] = memory_of_row  # equal for the tables of a width
    replicated, copies, of_group, holds = _listed_rows(layout)
    in_bitmap = np.diff(layout.listed_offset)
    striped = _striped_rows(layout)

    several = layout.holds.sum(axis=1) > 1
    of_group = of_group * memory_of_width[layout.group_width]

    def rank_bytes(tables: list[int]) -> RankBytes:
        widths = np.isin(np.arange(len(layout.slots)), layout.width_of_table[tables])
        groups = widths[layout.group_width]
        arenas = whole_dot(memory_of_width[widths], layout.slots[widths])
        in_copies, alone = (
            (of_group[chosen, None] * layout.holds[chosen]).sum(axis=0)
            for chosen in (groups & several, groups & ~several)
        )
        in_stripes = whole_dot(memory_of_row[tables], striped[tables])
        unused = arenas - in_copies - alone - in_stripes
        return RankBytes(in_copies, alone, in_stripes, unused)

    return RowsByKind(
        replicated=replicated,
        listed=in_bitmap - replicated,
        striped=layout.rows - in_bitmap,
        copies=copies,
        ranks_with_rows=(holds | (striped > 0)).sum(axis=1),
        memory_of_row=memory_of_row,
        listed_accesses=_listed_accesses(plan),
        memory={memory.name: rank_bytes(list(memory.tables)) for memory in plan.memories},
    )


def _listed_rows(layout: Layout) -> tuple[Ints, Ints, Ints, NDArray[np.bool_]]:
    """Return the replicated rows of each table and their copies, [T] each, the rows of each group,
    [G], and a mask of the ranks that hold listed rows of a table, [T, M]."""
    tables, groups = len(layout.rows), len(layout.group_width)
    holders = layout.holds.sum(axis=1)
    several = holders > 1
    replicated, copies = np.zeros((2, tables), dtype=np.int64)
    holds = np.zeros((tables, layout.ranks), dtype=np.bool_)
    of_group = np.zeros(groups, dtype=np.int64)
    mask = layout.codes.dtype.type((1 << layout.group_bits) - 1)
    marked = np.diff(layout.everywhere_offset)
    for t, rows in enumerate(rows_of_tables(layout.listed_offset - layout.everywhere_offset)):
        in_group = np.zeros(groups, dtype=np.int64)
        for first in range(rows.start, rows.stop, _CHUNK_CODES):
            codes = layout.codes[first : min(first + _CHUNK_CODES, rows.stop)]
            in_group += np.bincount((codes & mask).astype(np.intp), minlength=groups)
        if marked[t]:
            assert layout.everywhere_group is not None
            in_group[layout.everywhere_group[t]] += marked[t]
        replicated[t] = in_group[several].sum()
        copies[t] = whole_dot(in_group[several], holders[several])
        holds[t] = layout.holds[in_group > 0].any(axis=0)
        of_group += in_group
    return replicated, copies, of_group, holds


def _listed_accesses(plan: Plan) -> Ints:
    """Return accesses of the replicated and listed rows of each table, [T]."""
    coded = rows_of_tables(plan.layout.listed_offset - plan.layout.everywhere_offset)
    sums = [int(plan.counts.accesses[rows].sum(dtype=np.int64)) for rows in coded]
    return np.array(sums, dtype=np.int64) + plan.counts.everywhere_accesses


def _striped_rows(layout: Layout) -> Ints:
    """Return the striped rows of each table on each rank, [T, M]."""
    lines, every = layout.stripe_bitmap, np.arange(len(layout.rows))
    if lines is None:
        return layout.stripe_rows(every, layout.rows - np.diff(layout.listed_offset))
    unstriped = np.add.reduceat(_marks(lines), layout.line_offset[:-1])
    striped = layout.stripe_rows(every, layout.rows - unstriped)
    for t in every[np.diff(layout.listed_offset) > unstriped]:
        order, rotation = layout.orders[layout.pattern_of[t]], layout.rotation[t]
        begin, end = layout.line_offset[t : t + 2]
        for first in range(begin, end, _LINES_OF_LEFT_ROWS):
            part = slice(first, min(first + _LINES_OF_LEFT_ROWS, end))
            left = _set_bits(layout.bitmap[part, 1:] & ~lines[part, 1:])
            row = left + (first - begin) * ROWS_PER_LINE
            before, _ = rank_in_bitmap(lines, int(begin), row)
            number = row - (before - listed_before(lines, begin))
            owner = order[(number + rotation) % len(order)]
            striped[t] -= np.bincount(owner, minlength=layout.ranks)
    return striped


def _marks(bitmap: NDArray[np.uint64]) -> Ints:
    """Return the number of marked rows of each line."""
    counts = np.empty(len(bitmap), dtype=np.int64)
    for first in range(0, len(bitmap), CHUNK_LINES):
        part = slice(first, first + CHUNK_LINES)
        counts[part] = np.bitwise_count(bitmap[part, 1:]).sum(axis=1, dtype=np.int64)
    return counts


def _set_bits(words: NDArray[Any]) -> Ints:
    """Return the numbers of the bits that are set in consecutive words."""
    flat = np.ascontiguousarray(words).reshape(-1)
    used = np.flatnonzero(flat)
    bits = np.unpackbits(flat[used].view(np.uint8), bitorder="little").reshape(-1, 64)
    word, bit = np.nonzero(bits)
    return used[word] * 64 + bit
