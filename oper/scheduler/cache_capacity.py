"""The capacity of a cache: how its bytes are shared by rows of several widths."""

import numpy as np

from oper.base.arrays import Ints
from oper.scheduler.cache import WIDTH_SHIFT


def rows_that_fit(total_bytes: float, addresses: Ints, rows: Ints, row_bytes: Ints) -> Ints:
    """Rows of each of W widths that a cache of `total_bytes` holds, [W].

    Each width gets of the bytes what its distinct rows take of the first batch's, whose
    `addresses` are given, and no more than all of its `rows` [W], of `row_bytes` [W] each.
    """
    asked = np.bincount(np.unique(addresses) >> WIDTH_SHIFT, minlength=len(row_bytes))
    shares = asked * row_bytes / max(int(asked @ row_bytes), 1)
    return np.minimum(rows, np.ceil(shares * total_bytes / row_bytes).astype(np.int64))
