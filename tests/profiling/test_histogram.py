"""The histogram of counters against NumPy's unique."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.profiling.histogram import histogram

ALL_BITS = {np.uint32: 2**32 - 1, np.uint64: 2**64 - 1}


def reference(accesses, samples_with_row, offsets, samples_with_row_offsets):
    """Rows of each (piece, accesses, samples with it) as a list of tuples, as ordered."""
    found = []
    for piece, (begin, end) in enumerate(pairwise(offsets)):
        a = accesses[begin:end]
        start, stop = samples_with_row_offsets[piece : piece + 2]
        c = samples_with_row[start:stop] if stop > start else a
        pairs, rows = np.unique(np.stack([a, c], axis=1), axis=0, return_counts=True)
        found += [
            (piece, int(p[0]), int(p[1]), int(n))
            for p, n in zip(pairs[::-1], rows[::-1], strict=True)
        ]
    return found


def entries(*arguments):
    return [tuple(map(int, entry)) for entry in zip(*histogram(*arguments), strict=True)]


def counters(rng, pieces, dtype, largest):
    """Counters of pieces of (rows, bagged), most of them small, with a few up to `largest`."""
    offsets = np.r_[0, np.cumsum([rows for rows, _ in pieces])].astype(np.int64)
    kept = [rows if bagged else 0 for rows, bagged in pieces]
    samples_with_row_offsets = np.r_[0, np.cumsum(kept)].astype(np.int64)
    total = int(offsets[-1])
    accesses = rng.zipf(1.3, total).clip(1, largest).astype(dtype) - dtype(1)
    samples_with_row = np.concatenate(
        [
            np.minimum(accesses[begin:end], rng.integers(0, 100, end - begin).astype(dtype))
            if bagged
            else accesses[:0]
            for (_, bagged), begin, end in zip(pieces, offsets[:-1], offsets[1:], strict=True)
        ]
        + [accesses[:0]]
    )
    return accesses, samples_with_row, offsets, samples_with_row_offsets


@given(
    seed=st.integers(0, 2**32 - 1),
    pieces=st.lists(st.tuples(st.integers(0, 3000), st.booleans()), min_size=1, max_size=6),
    dtype=st.sampled_from([np.uint32, np.uint64]),
    largest=st.sampled_from([3, 70, 5000, 10**9]),
)
def test_rows_are_those_of_unique(seed, pieces, dtype, largest):
    arguments = counters(np.random.default_rng(seed), pieces, dtype, largest)
    assert entries(*arguments) == reference(*arguments)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_counters_near_overflow(dtype):
    # int64 results: a counter of uint64 beyond 2^63 - 1 accesses is not to be reached.
    top = min(ALL_BITS[dtype], 2**63 - 1)
    accesses = np.array([top, 0, top - 1, top], dtype=dtype)
    found = entries(accesses, accesses[:0], np.array([0, 4]), np.array([0, 0]))
    assert found == [(0, top, top, 2), (0, top - 1, top - 1, 1), (0, 0, 0, 1)]


def test_threads_and_chunks_do_not_matter():
    pieces = [(1_100_000, False), (1_100_000, True), (5, True)]  # two chunks each
    arguments = counters(np.random.default_rng(0), pieces, np.uint32, 10**6)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = entries(*arguments)
        torch.set_num_threads(4)
        four = entries(*arguments)
    finally:
        torch.set_num_threads(threads)
    assert one == four
    assert sum(rows for *_, rows in one) == 2_200_005


def test_rejects_signed_counters():
    signed: Any = np.zeros(3, np.int32)
    with pytest.raises(TypeError, match="uint32 or uint64"):
        histogram(signed, signed[:0], np.array([0, 3]), np.array([0, 0]))


def test_rejects_offsets_beyond_the_counters():
    zeros = np.zeros(3, np.uint32)
    with pytest.raises(ValueError, match="offsets end at 4"):
        histogram(zeros, zeros[:0], np.array([0, 4]), np.array([0, 0]))
