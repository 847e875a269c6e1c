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


class CacheDivision:
    """How a cache of `total_bytes` is divided among rows of W widths, each of `rows` [W] of
    `row_bytes` [W], while batches come that ask for others: anew where one does not fit.

    Training and the replay of its caches in a loader divide by the same rule, so that they agree.
    """

    def __init__(self, total_bytes: float, rows: Ints, row_bytes: Ints) -> None:
        self._bytes, self._rows, self._row_bytes = total_bytes, rows, row_bytes
        self._asked = np.zeros(len(rows), dtype=np.int64)  # the most of the batches so far

    def capacity(self, addresses: Ints) -> Ints:
        """Rows of each width, [W], by this batch and those by which it was divided before."""
        self._asked = np.maximum(self._asked, rows_asked(addresses, len(self._rows)))
        return split(self._bytes, self._asked, self._rows, self._row_bytes)

    def least_bytes(self, needed: Ints) -> int:
        """The least bytes that give room for `needed` [W] rows by the last division."""
        return least_bytes(needed, self._asked, self._row_bytes)
