"""Rows counted by class and column, and taken from counts: the kernels against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from oper.plan.layout import SLOT_BITS
from tests.support.examples import at_least, examples

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, int]


def drawn(seed: int, rows: int, classes: int) -> Rows:
    """Addresses, the column of each extent, the class of each row, and how many columns."""
    random = np.random.default_rng(seed)
    extents, columns = int(random.integers(1, 9)), int(random.integers(1, 5))
    address = random.integers(0, extents, rows) << SLOT_BITS | random.integers(0, 1 << 30, rows)
    row_class = random.integers(0, classes, rows).astype(np.int32)
    return address, random.integers(0, columns, extents), row_class, columns


@at_least(20)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 1, 500, 200_000]), st.sampled_from([1, 7]))
@examples(20)
def test_counts_and_rows_taken_are_numpys(seed: int, rows: int, classes: int) -> None:
    address, column, row_class, columns = drawn(seed, rows, classes)
    cell = row_class * np.int64(columns) + column[address >> SLOT_BITS]
    counts = np.arange(classes * columns).reshape(classes, columns)
    expected = counts + np.bincount(cell, minlength=counts.size).reshape(counts.shape)
    given_rows = [torch.from_numpy(each) for each in (address, column, row_class)]
    native.ops().count_rows(*given_rows, torch.from_numpy(counts))
    np.testing.assert_array_equal(counts, expected)

    left = np.random.default_rng(seed).integers(0, 3 + rows // 10, counts.shape)
    before = left.copy()
    taken = native.ops().leaving_rows(*given_rows, torch.from_numpy(left)).numpy()
    wanted = [np.flatnonzero(cell == n)[:most] for n, most in enumerate(before.ravel())]
    np.testing.assert_array_equal(taken, np.sort(np.concatenate(wanted)))
    gone = np.bincount(cell[taken], minlength=left.size).reshape(left.shape)
    np.testing.assert_array_equal(left, before - gone)


def test_as_many_cells_as_threads_do_not_count_apart() -> None:
    address = torch.zeros(5, dtype=torch.int64)
    column, row_class = torch.zeros(1, dtype=torch.int64), torch.full((5,), 299_999)
    counts = torch.zeros(300_000, 1, dtype=torch.int64)
    native.ops().count_rows(address, column, row_class.int(), counts)
    assert counts[-1].item() == counts.sum().item() == 5


@pytest.mark.parametrize("wrong", ["extent", "class", "column"])
def test_numbers_out_of_range_are_refused(wrong: str) -> None:
    address = torch.tensor([(3 if wrong == "extent" else 1) << SLOT_BITS])
    column = torch.tensor([0, 5 if wrong == "column" else 1])
    row_class = torch.tensor([7 if wrong == "class" else 0], dtype=torch.int32)
    for name in ("count_rows", "leaving_rows"):
        with pytest.raises(IndexError, match=" is none of 2 "):
            getattr(native.ops(), name)(
                address, column, row_class, torch.zeros(2, 2, dtype=torch.int64)
            )
