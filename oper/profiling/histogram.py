"""The histogram of rows: how many rows of a table have equal counts. One pass over all counters."""

from typing import Any

import numpy as np

from oper.base import native
from oper.base.arrays import Counts, Ints
from oper.base.tensors import as_int64, as_tensor


def histogram(
    accesses: Counts,
    containing: Counts,
    offsets: Ints,
    containing_offsets: Ints,
) -> tuple[Ints, Ints, Ints, Ints]:
    """Rows of each (piece, accesses, containing): four vectors piece, accesses, containing, rows.

    Pieces are ranges of rows [offsets[n], offsets[n + 1]), such as tables; piece n has its
    `containing` from containing_offsets[n] on, and where that range is empty they equal its
    accesses. Sorted by piece, then accesses and containing, both descending.
    """
    found = native.ops().histogram(
        as_tensor(accesses),
        containing_tensor(containing, accesses),
        as_int64(offsets),
        containing_starts(containing_offsets),
    )
    piece, a, c, rows = (tensor.numpy() for tensor in found)
    return piece, a, c, rows


def containing_tensor(containing: Counts, accesses: Counts) -> Any:
    return as_tensor(np.asarray(containing, dtype=accesses.dtype))


def containing_starts(containing_offsets: Ints) -> Any:
    """Where each piece's containing begins; -1 for those that keep none."""
    kept = np.diff(containing_offsets) > 0
    return as_int64(np.where(kept, containing_offsets[:-1], -1))
