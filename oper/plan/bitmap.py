"""The bitmap of listed rows: a running count and 448 rows in each cache line."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64, as_tensor

WORDS_PER_LINE = native.shared("bitmap words of a line", 7)  # after its header
ROWS_PER_LINE = 64 * WORDS_PER_LINE
# Lines that are processed together: a byte for each of their rows is 15 MB.
CHUNK_LINES = 1 << 15
# Bits of a header for the marked rows before the line. Its other bits speed up the kernel.
_BEFORE_BITS = native.shared("bitmap bits of rows before", 37)
_BEFORE_MASK = np.uint64((1 << _BEFORE_BITS) - 1)
_PART_BITS = 9  # a field for the marked rows of the line before words 2, 4 and 6


def rank_in_bitmap(
    bitmap: NDArray[np.uint64], first_line: int, rows: Ints
) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the number of marked rows, of all tables, before each row, int64 [N], and its mark,
    bool [N].

    `rows` are rows of the table whose lines begin at `first_line`.
    """
    line, position = np.divmod(rows, ROWS_PER_LINE)
    lines = bitmap[first_line + line]
    start = 64 * np.arange(WORDS_PER_LINE)
    below = np.clip(position[:, None] - start, 0, 64)
    # A shift by 64 is undefined: the mask of a whole word is written out.
    ones = np.uint64(0xFFFFFFFFFFFFFFFF)
    mask = np.where(below == 64, ones, (np.uint64(1) << (below % 64).astype(np.uint64)) - 1)
    words = lines[:, 1:]
    before = listed_before(lines, slice(None))
    before += np.bitwise_count(words & mask).sum(axis=1, dtype=np.int64)
    word = np.take_along_axis(words, (position // 64)[:, None], axis=1)[:, 0]
    return before, (word >> (position % 64).astype(np.uint64) & np.uint64(1)).astype(bool)


def listed_before(bitmap: NDArray[np.uint64], lines: Any) -> Any:
    """Return marked rows of all tables before these lines: int64."""
    return (bitmap[lines, 0] & _BEFORE_MASK).astype(np.int64)


def all_marked(rows: Ints) -> tuple[NDArray[np.uint64], Ints]:
    """Return a bitmap that marks every row of tables with `rows` [T] rows, and the first line of
    each table, [T + 1]."""
    lines = np.maximum(-(-rows // ROWS_PER_LINE), 1)
    line_offset = np.concatenate([[0], np.cumsum(lines)])
    first_row = np.arange(line_offset[-1]) - np.repeat(line_offset[:-1], lines)
    left = np.repeat(rows, lines) - first_row * ROWS_PER_LINE
    bits = np.clip(left[:, None] - 64 * np.arange(WORDS_PER_LINE), 0, 64)
    ones = np.uint64(0xFFFFFFFFFFFFFFFF)
    marks = np.where(bits == 64, ones, (np.uint64(1) << (bits % 64).astype(np.uint64)) - 1)
    bitmap, _ = join_lines([np.insert(marks, 0, 0, axis=1)], line_offset)
    return bitmap, line_offset


def join_lines(
    pieces: Sequence[NDArray[np.uint64]], line_offset: Ints
) -> tuple[NDArray[np.uint64], Ints]:
    """Return the lines of several tables as one bitmap, with new running counts, and the number of
    marked rows of each table, [T]. The lines of table t begin at `line_offset[t]`."""
    import torch

    # torch aligns memory to cache lines, as a bitmap needs.
    lines = torch.cat([as_tensor(piece.view(np.int64)) for piece in pieces])
    ends = native.ops().number_bitmap(lines, as_int64(line_offset))
    return lines.numpy().view(np.uint64), np.diff(ends.numpy())


def listed_before_tables(bitmap: NDArray[np.uint64], line_offset: Ints) -> Ints:
    """Return the marked rows before each table, whose lines begin at `line_offset[t]`, and in
    total, [T + 1]."""
    last = bitmap[-1:]
    listed = listed_before(last, slice(None)) + np.bitwise_count(last[:, 1:]).sum(
        axis=1, dtype=np.int64
    )
    return np.append(listed_before(bitmap, line_offset[:-1]), listed)


def header_of(before: Ints, counts: Ints) -> NDArray[np.uint64]:
    """Return the headers of lines, uint64 [N], with `before` [N] marked rows before each line, of
    all tables, and `counts` [N, WORDS_PER_LINE] in each of its words."""
    header = before.astype(np.uint64)
    parts = np.cumsum(counts, axis=1)
    for field, words in enumerate((1, 3, 5)):
        shift = np.uint64(_BEFORE_BITS + _PART_BITS * field)
        header |= parts[:, words].astype(np.uint64) << shift
    return header
