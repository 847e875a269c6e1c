"""How many rows of a table have equal counts, in one pass over all counters."""

from typing import Any, NamedTuple

import numpy as np

from oper.base import native
from oper.base.arrays import Counts, Ints
from oper.base.tensors import as_int64, as_tensor


class RowHistogram(NamedTuple):
    """rows[n] rows of a piece have accesses[n] accesses and are in containing[n] samples.

    int64 [N] each, sorted by piece, then accesses and containing, both descending.
    """

    piece: Ints
    accesses: Ints
    containing: Ints
    rows: Ints


def histogram(
    accesses: Counts,
    containing: Counts,
    offsets: Ints,
    containing_offsets: Ints,
) -> RowHistogram:
    """How many rows of each piece have equal counts.

    Piece n is the rows offsets[n] … offsets[n + 1] - 1, such as a table. Its `containing` begin at
    containing_offsets[n]; where that range is empty they equal its accesses.
    """
    found = native.ops().histogram(
        as_tensor(accesses),
        containing_tensor(containing, accesses),
        as_int64(offsets),
        containing_starts(containing_offsets),
    )
    return RowHistogram(*(tensor.numpy() for tensor in found))


def containing_tensor(containing: Counts, accesses: Counts) -> Any:
    """`containing` as the native kernels take it: of the type of `accesses`."""
    return as_tensor(np.asarray(containing, dtype=accesses.dtype))


def containing_starts(containing_offsets: Ints) -> Any:
    """Where the `containing` of each piece begin; -1 for those without."""
    kept = np.diff(containing_offsets) > 0
    return as_int64(np.where(kept, containing_offsets[:-1], -1))
