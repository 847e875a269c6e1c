"""Number of rows of a table with equal counts, in one pass over all counters."""

from typing import Any, NamedTuple

import numpy as np

from oper.base import native
from oper.base.arrays import Counts, Ints, as_int64, as_tensor


class RowHistogram(NamedTuple):
    """rows[n] rows of a piece have accesses[n] accesses and are in samples_with_row[n] samples.

    int64 [N] each, sorted by piece, then accesses and samples_with_row, both descending.
    """

    piece: Ints
    accesses: Ints
    samples_with_row: Ints
    rows: Ints


def histogram(
    accesses: Counts,
    samples_with_row: Counts,
    offsets: Ints,
    samples_with_row_offsets: Ints,
) -> RowHistogram:
    """Count the rows of each piece that have equal counts.

    Piece n is the rows offsets[n] … offsets[n + 1] - 1, such as a table. Its `samples_with_row`
    begin at samples_with_row_offsets[n]; if that range is empty they equal its accesses.
    """
    tensors = native.ops().histogram(
        as_tensor(accesses),
        samples_with_row_tensor(samples_with_row, accesses),
        as_int64(offsets),
        samples_with_row_starts(samples_with_row_offsets),
    )
    return RowHistogram(*(tensor.numpy() for tensor in tensors))


def samples_with_row_tensor(samples_with_row: Counts, accesses: Counts) -> Any:
    """Return `samples_with_row` in the type of `accesses`, as the native kernels take it."""
    return as_tensor(np.asarray(samples_with_row, dtype=accesses.dtype))


def samples_with_row_starts(samples_with_row_offsets: Ints) -> Any:
    """Return the start of each piece's `samples_with_row`; -1 for pieces without."""
    kept = np.diff(samples_with_row_offsets) > 0
    return as_int64(np.where(kept, samples_with_row_offsets[:-1], -1))
