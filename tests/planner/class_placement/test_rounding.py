"""Whole rows from shares, by the native kernels and by Python, class by class."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from oper.planner.class_placement.rounding import split_evenly, whole_by_shares, whole_rows


def split_evenly_in_python(
    rows: NDArray, shares: NDArray, load: NDArray, traffic: NDArray
) -> NDArray:
    shares = shares / shares.sum(axis=1, keepdims=True)
    counts = np.floor(rows[:, None] * shares + 1e-9).astype(np.int64)
    load += (counts * traffic[:, None]).sum(axis=0)
    given_so_far = np.zeros(shares.shape[1])
    for c, share in enumerate(shares):
        usable = [g for g, part in enumerate(share) if part > 0]
        first = sorted(
            (int(given_so_far[g] / share[g] / len(share) + 1e-9), load[g] / share[g], g)
            for g in usable
        )
        for _, _, g in first[: rows[c] - counts[c].sum()]:
            counts[c, g] += 1
            load[g] += traffic[c]
            given_so_far[g] += 1
    return counts


def whole_by_shares_in_python(
    rows: NDArray, shares: NDArray, bucket: NDArray, traffic: NDArray
) -> NDArray:
    counts = np.zeros(shares.shape, dtype=np.int64)
    owed_traffic = np.zeros(shares.shape[1])
    owed_rows = np.zeros((bucket.max() + 1, shares.shape[1]))
    for c, n in enumerate(rows):
        exact, b = n * shares[c], bucket[c]
        if n <= shares.shape[1] and traffic[c] > 0:
            wanted = np.where(shares[c] > 0, exact + owed_traffic / traffic[c], 0)
            bounded = np.clip(wanted, 0, n)
            counts[c] = whole_rows(bounded if bounded.any() else exact, n)
            owed_traffic += (exact - counts[c]) * traffic[c]
        else:
            wanted = exact + owed_rows[b]
            bounded = np.maximum(wanted, 0)
            counts[c] = whole_rows(bounded if bounded.any() else exact, n)
            owed_rows[b] = wanted - counts[c]
    return counts


SIZES = (st.integers(1, 30), st.integers(1, 12), st.integers(0, 2**32 - 1), st.booleans())


def _rows_shares_and_traffic(
    sets: int, classes: int, seed: int, equal: bool
) -> tuple[NDArray, NDArray, NDArray]:
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 3 * sets, classes)
    traffic = rng.integers(0 if equal else 1, 4, classes).astype(float)
    shares = (
        np.ones((classes, sets)) if equal else rng.integers(0, 3, (classes, sets)).astype(float)
    )
    shares[:, 0] += not equal  # some set of each class is used
    return rows, shares, traffic


@given(*SIZES)
def test_leftovers_go_in_turn_and_to_the_least_load(
    sets: int, classes: int, seed: int, equal: bool
) -> None:
    rows, shares, traffic = _rows_shares_and_traffic(sets, classes, seed, equal)
    load, expected_load = np.zeros(sets), np.zeros(sets)
    found = split_evenly(rows, shares, load, traffic)
    expected = split_evenly_in_python(rows, shares, expected_load, traffic)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(load, expected_load)


@given(*SIZES)
def test_what_rounding_takes_is_made_up_for_by_the_next_classes(
    sets: int, classes: int, seed: int, equal: bool
) -> None:
    rows, shares, traffic = _rows_shares_and_traffic(sets, classes, seed, equal)
    # Rows of a bucket have the same shares. Sums of these are exact in any order.
    rng = np.random.default_rng(seed + 1)
    bucket = rng.integers(0, min(3, classes), classes)
    shares = rng.multinomial(64, shares / shares.sum(axis=1, keepdims=True))[bucket] / 64
    found = whole_by_shares(rows, shares, bucket, traffic)
    np.testing.assert_array_equal(found.sum(axis=1), rows)
    assert not found[shares == 0].any()
    expected = whole_by_shares_in_python(rows, shares, bucket, traffic)
    np.testing.assert_array_equal(found, expected)
