"""Codes of listed rows (group and position in it), and marks for rows on all ranks.

code = position << bits | group, with the fewest bits that hold any group's number; the codes of a
layout are uint32 if all of them fit, else uint64. The kernels do the same by
csrc/include/oper/plan/row_codes.h.

With much memory most listed rows are on all ranks, each table's in one group and at positions that
count them. Such rows need no code: a second bitmap of all rows marks them, and the number of marks
before a row is its position, up to a constant of the table.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64, as_tensor
from oper.plan.bitmap import CHUNK_LINES, join_lines

if TYPE_CHECKING:
    import torch


Flags = NDArray[np.bool_]


class ListedIndex(NamedTuple):
    """Index from E listed rows of T tables to their groups and positions; fields of `Layout`.

    If the bitmap is None, all rows have codes, and the other two fields are None too.
    """

    codes: NDArray[Any]  # uint32 or uint64, of the rows without a mark
    everywhere_bitmap: NDArray[np.uint64] | None = None  # [lines, 8]
    everywhere_group: Ints | None = None  # [T] of the table's marked rows; -1: it has none
    everywhere_first: Ints | None = None  # [T] position of the first of them

    def decode(
        self, groups: int, bitmap: NDArray[np.uint64], listed_offset: Ints
    ) -> tuple[Ints, Ints]:
        """Group and position of each row that `bitmap` lists, [E] each; those of table t begin at
        listed_offset[t]."""
        if self.everywhere_bitmap is None:
            return unpack_codes(self.codes, groups)
        assert self.everywhere_group is not None
        assert self.everywhere_first is not None
        marked = marks_of(self.everywhere_bitmap, bitmap)
        group, position = np.empty((2, len(marked)), dtype=np.int64)
        group[~marked], position[~marked] = unpack_codes(self.codes, groups)
        for t, rows in enumerate(rows_of_tables(listed_offset)):
            here = marked[rows]
            group[rows][here] = self.everywhere_group[t]
            position[rows][here] = self.everywhere_first[t] + np.arange(np.count_nonzero(here))
        return group, position


def rows_of_tables(listed_offset: Ints) -> Iterator[slice]:
    """Yield the range of each table's rows among the listed ones."""
    for first, end in pairwise(listed_offset):
        yield slice(int(first), int(end))


def marks_of(everywhere_bitmap: NDArray[np.uint64], bitmap: NDArray[np.uint64]) -> Flags:
    """Return a mask of the rows that `bitmap` lists, [E]: True if they have a mark."""
    marks = [np.empty(0, dtype=bool)]
    for first in range(0, len(bitmap), CHUNK_LINES):  # a byte per row, for a part of them at a time
        lines = slice(first, first + CHUNK_LINES)
        marks.append(_bits(everywhere_bitmap[lines])[_bits(bitmap[lines])])
    return np.concatenate(marks)


def _bits(lines: NDArray[np.uint64]) -> Flags:
    """Return the bits of a part of a bitmap, one per row."""
    words = np.ascontiguousarray(lines[:, 1:]).view(np.uint8).reshape(-1)
    return np.unpackbits(words, bitorder="little").view(bool)


def marked_groups(
    codes: NDArray[Any], holds: Flags, bitmap: NDArray[np.uint64], listed_offset: Ints
) -> Ints | None:
    """Return the group of each table's rows that are to have marks, int64 [T], if all rows have
    codes now: the largest group on all ranks whose rows are at consecutive positions. None if the
    bitmap of the marks would take as many bytes as the codes that it replaces."""
    wanted = holds.all(axis=1) & (holds.shape[1] > 1)
    if not wanted.any():
        return None
    group, rows = native.ops().largest_in_order(
        _as_signed(codes), as_int64(listed_offset), as_tensor(wanted)
    )
    return group.numpy() if codes.itemsize * int(rows.sum()) > bitmap.nbytes else None


def with_marks(
    codes: NDArray[Any],
    groups: int,
    bitmap: NDArray[np.uint64],
    line_offset: Ints,
    marked: Ints | None,
) -> ListedIndex:
    """Return the index in which the rows of group marked[t] of each table t have marks, if all rows
    have codes now; those rows must be at consecutive positions. `bitmap` lists the rows, those of
    table t from line line_offset[t] on."""
    if marked is None:
        return ListedIndex(codes)
    lines = as_tensor(bitmap.view(np.int64))
    left, marks, first = native.ops().mark_rows(
        _as_signed(codes), groups, lines, as_int64(line_offset), as_int64(marked)
    )
    return ListedIndex(
        left.numpy().view(codes.dtype), marks.numpy().view(np.uint64), marked, first.numpy()
    )


def marks_of_all(
    rows: Ints, group_of_table: Ints, bitmap: NDArray[np.uint64], line_offset: Ints
) -> ListedIndex | None:
    """Return the index of `with_marks` for a `bitmap` that lists all `rows` [T] of the tables,
    those of table t in group `group_of_table[t]` on all ranks, without making their codes; None
    if `marked_groups` leaves the codes."""
    group_rows = np.bincount(group_of_table, rows).astype(np.int64)
    bits = group_bits(len(group_rows)) + int(group_rows.max() - 1).bit_length()
    code = np.dtype(np.uint32 if bits <= 32 else np.uint64)
    if code.itemsize * int(rows.sum()) <= bitmap.nbytes:
        return None
    first = np.zeros(len(rows), dtype=np.int64)
    for group in range(len(group_rows)):
        in_group = group_of_table == group
        first[in_group] = np.cumsum(rows[in_group]) - rows[in_group]
    marks, _ = join_lines([bitmap], line_offset)
    return ListedIndex(np.empty(0, dtype=code), marks, group_of_table.copy(), first)


def group_bits(groups: int) -> int:
    """Return the number of a code's bits that hold the group's number."""
    return max(groups - 1, 0).bit_length()


def unpack_codes(codes: NDArray[Any], groups: int) -> tuple[Ints, Ints]:
    """Group and position of each code, [E] each."""
    codes = codes.astype(np.uint64)
    bits = group_bits(groups)
    group = (codes & np.uint64((1 << bits) - 1)).astype(np.int64)
    return group, (codes >> np.uint64(bits)).astype(np.int64)


def pack_codes(group: NDArray[np.int32], groups: int) -> tuple[NDArray[Any], Ints]:
    """Return the code of each row, [E], and the number of rows of each group, [groups]. Positions
    number each group's rows in order."""
    codes, rows = native.ops().pack_codes(as_tensor(group), groups)
    array = codes.numpy()
    return array.view(np.uint32 if array.dtype == np.int32 else np.uint64), rows.numpy()


def pack_positions(group: Ints, position: Ints, groups: int, most: int = 0) -> NDArray[Any]:
    """Return the code of each row, [E], at the given positions, with bits for positions up to
    `most`."""
    bits = group_bits(groups)
    narrow = int(position.max(initial=most)) >> (32 - bits) == 0
    return (position << bits | group).astype(np.uint32 if narrow else np.uint64)


def _as_signed(codes: NDArray[Any]) -> "torch.Tensor":
    return as_tensor(codes.view(np.int32 if codes.itemsize == 4 else np.int64))
