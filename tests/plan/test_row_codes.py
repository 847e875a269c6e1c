"""Listed rows with a mark instead of a code, against a definition row by row."""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.base.arrays import as_int64, as_tensor
from oper.plan import row_codes
from oper.plan.bitmap import all_marked
from oper.plan.row_codes import (
    marked_groups,
    marks_of,
    marks_of_all,
    pack_codes,
    pack_positions,
    unpack_codes,
    with_marks,
)

GROUPS = 4
HOLDS = np.array([[1, 1, 1], [0, 1, 0], [1, 1, 1], [1, 1, 0]], dtype=bool)


def groups_by_rows(group, position, listed_offset):
    """The largest group on all ranks of each table whose rows count up, and the number of them."""
    found = []
    for first, end in pairwise(listed_offset):
        best = (-1, 0)
        for g in np.flatnonzero(HOLDS.all(axis=1)).tolist():
            here = group[first:end] == g
            places = position[first:end][here].tolist()
            in_order = places == [places[0] + n for n in range(len(places))] if places else False
            if in_order and len(places) > best[1]:
                best = (g, len(places))
        found.append(best)
    return found


@pytest.fixture(autouse=True, scope="module")
def several_chunks() -> Iterator[None]:
    """Few lines are several chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_codes, "CHUNK_LINES", 2)
        yield


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.lists(st.sampled_from([0, 1, 5, 448, 900]), min_size=1, max_size=4),
    everywhere=st.sampled_from([0.0, 0.02, 0.5, 0.99, 1.0]),
    disordered=st.sampled_from([0.0, 0.3, 1.0]),
    wide=st.booleans(),
)
def test_rows_in_order_have_marks_and_are_found_again(seed, rows, everywhere, disordered, wide):
    random = np.random.default_rng(seed)
    listed_offset = np.r_[0, np.cumsum(rows)]
    share = np.array([everywhere, 0.7 - 0.7 * everywhere, 0.0, 0.3 - 0.3 * everywhere])
    share[2] = 1 - share.sum()
    group = random.choice(GROUPS, listed_offset[-1], p=share.clip(0) / share.clip(0).sum())
    position = np.zeros(len(group), np.int64)
    for g in range(GROUPS):
        position[group == g] = np.arange((group == g).sum()) + (2**33 if wide else 0)
    for first, end in pairwise(listed_offset):
        if random.random() < disordered:
            swapped = position[first:end][group[first:end] == 0]
            at = first + np.flatnonzero(group[first:end] == 0)
            position[at] = random.permutation(swapped)
    codes = pack_positions(group, position, GROUPS)
    expected = groups_by_rows(group, position, listed_offset)
    bitmap, line_offset = bitmap_of(random, rows)
    marked = marked_groups(codes, HOLDS, bitmap, listed_offset)
    replaced = codes.itemsize * sum(n for _, n in expected)
    assert (marked is not None) == (replaced > 64 * line_offset[-1])
    if marked is not None:
        assert marked.tolist() == [g for g, _ in expected]

    index = with_marks(codes, GROUPS, bitmap, line_offset, marked)
    decoded = index.decode(GROUPS, bitmap, listed_offset)
    for found, wanted in zip(decoded, (group, position), strict=True):
        assert found.tolist() == wanted.tolist()
    if marked is None or index.everywhere_bitmap is None:
        assert marked is None
        assert index.codes is codes
        return
    of_row = np.repeat(marked, rows)
    assert marks_of(index.everywhere_bitmap, bitmap).tolist() == (of_row == group).tolist()
    assert index.codes.tolist() == codes[of_row != group].tolist()
    # The headers are those that bitmaps have.
    again = index.everywhere_bitmap.copy()
    again[:, 0] = 0
    native.ops().number_bitmap(as_tensor(again.view(np.int64)), as_int64(line_offset))
    assert (again == index.everywhere_bitmap).all()
    assert not (again[:, 1:] & ~bitmap[:, 1:]).any()


@given(
    rows=st.lists(st.integers(1, 3000), min_size=1, max_size=5),
    widths=st.integers(1, 3),
)
def test_marks_of_all_rows_are_those_of_their_codes(rows: list[int], widths: int) -> None:
    group_of_table = np.arange(len(rows)) % widths
    widths = int(group_of_table.max()) + 1
    bitmap, line_offset = all_marked(np.array(rows))
    codes, _ = pack_codes(np.repeat(group_of_table, rows).astype(np.int32), widths)
    holds, listed_offset = np.ones((widths, 2), dtype=bool), np.r_[0, np.cumsum(rows)]
    marked = marked_groups(codes, holds, bitmap, listed_offset)
    found = marks_of_all(np.array(rows), group_of_table, bitmap, line_offset)
    if marked is None:
        assert found is None
        return
    assert found is not None
    expected = with_marks(codes, widths, bitmap, line_offset, marked)
    for mine, wanted in zip(found, expected, strict=True):
        assert mine is not None
        assert wanted is not None
        assert mine.dtype == wanted.dtype
        assert mine.tolist() == wanted.tolist()


def bitmap_of(random, listed):
    """A bitmap that lists listed[t] rows of table t, which has twice as many, and its lines."""
    line_offset = np.r_[0, np.cumsum([max(-(-2 * n // 448), 1) for n in listed])]
    bitmap = np.zeros((line_offset[-1], 8), np.uint64)
    for n, first, end in zip(listed, line_offset[:-1], line_offset[1:], strict=True):
        bits = np.zeros(448 * (end - first), bool)
        bits[random.permutation(2 * n)[:n]] = True
        words = np.packbits(bits, bitorder="little").view(np.uint64)
        bitmap[first:end, 1:] = words.reshape(-1, 7)
    native.ops().number_bitmap(as_tensor(bitmap.view(np.int64)), as_int64(line_offset))
    return bitmap, line_offset


def test_one_rank_has_no_marks():
    codes = pack_positions(np.zeros(500, np.int64), np.arange(500), 1)
    offsets = np.array([0, 500])
    bitmap, _ = bitmap_of(np.random.default_rng(0), [500])
    assert marked_groups(codes, np.ones((1, 1), bool), bitmap, offsets) is None
    assert marked_groups(codes, np.ones((1, 2), bool), bitmap, offsets) == np.array([0])
    assert [part.tolist() for part in unpack_codes(codes[:2], 1)] == [[0, 0], [0, 1]]


def test_refused_arguments():
    codes = as_tensor(np.zeros(5, np.int32))
    wanted = as_tensor(np.ones(1, bool))
    with pytest.raises(ValueError, match="from 0 to the 5 codes"):
        native.ops().largest_in_order(codes, as_int64(np.array([0, 4])), wanted)
    with pytest.raises(ValueError, match="there are codes and no groups"):
        native.ops().largest_in_order(codes, as_int64(np.array([0, 5])), wanted[:0])
    bitmap, line_offset = bitmap_of(np.random.default_rng(0), [5])
    lines, first = as_tensor(bitmap.view(np.int64)), as_int64(line_offset)
    zero = as_int64(np.array([0]))
    assert len(native.ops().mark_rows(codes, 1, lines, first, zero)) == 3
    with pytest.raises(ValueError, match="group"):
        native.ops().mark_rows(codes, 1, lines, first, as_int64(np.array([0, 1])))
    with pytest.raises(ValueError, match="codes: 4, and the bitmap lists 5 rows"):
        native.ops().mark_rows(codes[:4].clone(), 1, lines, first, zero)
    with pytest.raises(ValueError, match="bitmap"):
        native.ops().mark_rows(codes, 1, lines[:0], first, zero)
    with pytest.raises(TypeError, match="codes"):
        native.ops().mark_rows(codes.float(), 1, lines, first, zero)
