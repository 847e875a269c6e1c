"""The capacity of a cache: how its bytes are shared by rows of several widths."""

import math

import numpy as np

from oper.base.arrays import Ints
from oper.scheduler.row_addresses import width_of


def rows_that_fit(total_bytes: float, addresses: Ints, rows: Ints, row_bytes: Ints) -> Ints:
    """Rows of each of W widths that a cache of `total_bytes` holds, [W], where `addresses` are
    those of the first batch; see `split`."""
    return split(total_bytes, rows_asked(addresses, len(row_bytes)), rows, row_bytes)


def rows_asked(addresses: Ints, widths: int) -> Ints:
    """Distinct rows of each width among a batch's addresses, [W]."""
    return np.bincount(width_of(np.unique(addresses)), minlength=widths)


def split(total_bytes: float, asked: Ints, rows: Ints, row_bytes: Ints) -> Ints:
    """Rows of each of W widths that a cache of `total_bytes` holds, [W].

    Each width gets of the bytes what its rows take of those that a batch asks for, `asked` [W],
    and no more than all of its `rows` [W], of `row_bytes` [W] each.
    """
    each = np.maximum(asked, 1)
    return np.minimum(rows, np.ceil(each * (total_bytes / int(each @ row_bytes))).astype(np.int64))


def least_bytes(needed: Ints, asked: Ints, row_bytes: Ints) -> int:
    """The least bytes of a cache that `split` gives room for `needed` [W] rows of each width."""
    each = np.maximum(asked, 1)
    return math.ceil((needed / each).max() * int(each @ row_bytes))
