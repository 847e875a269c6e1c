"""Stripes: memory-bounded rows go to the ranks by a fixed pattern, so that an address is arithmetic
and takes no entry in the address map (§4.1 made compact).

In: each rank's share, and the striped rows of each table. Out: `Stripes`. A table's striped rows,
in order of id, follow a pattern of P ranks, again and again. Each table begins at the position of
the pattern at which the table before it stopped, so that all tables of a width together are as even
as one. Equal shares need P = M. Unequal ones (the memory each rank has left) take up to 65,536
positions; the few rows of rounding are evened out among the listed rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.plan.layout import LONGEST_PERIOD


@dataclass(frozen=True)
class Stripes:
    """The stripes of one width."""

    order: NDArray[np.uint16]  # [P] the rank at each position of the pattern
    rotation: Ints  # [T] the position at which each table begins
    rows: Ints  # [T, M] striped rows of each table on each rank


def make_stripes(shares: Floats, table_rows: Ints) -> Stripes:
    """Stripe `table_rows[t]` rows (0 for tables of other widths) in proportion to `shares` [M]."""
    order = period(shares)
    before = np.cumsum(table_rows) - table_rows
    rotation = before % len(order)
    ranks = len(shares)
    # Rows of table t at rank r: the occurrences of r in [rotation, rotation + rows) of the pattern
    # repeated without end, by prefix counts.
    prefix = np.zeros((len(order) + 1, ranks), dtype=np.int64)
    np.cumsum(order[:, None] == np.arange(ranks), axis=0, out=prefix[1:])

    def occurrences(position: Ints) -> Ints:
        turns, rest = np.divmod(position, len(order))
        return np.asarray(turns[:, None] * prefix[-1] + prefix[rest])

    rows = occurrences(rotation + table_rows) - occurrences(rotation)
    return Stripes(order, rotation, rows)


def period(shares: Floats) -> NDArray[np.uint16]:
    """Return the pattern [P] in which any stretch holds each rank in proportion to its share."""
    ranks = len(shares)
    if not shares.sum():
        shares = np.ones(ranks)
    shares = shares / shares.sum()
    if np.allclose(shares, 1 / ranks, rtol=1e-12, atol=0):
        return np.arange(ranks, dtype=np.uint16)
    exact = shares * LONGEST_PERIOD
    slots = np.floor(exact).astype(np.int64)
    short = LONGEST_PERIOD - slots.sum()
    slots[np.argsort(slots - exact, kind="stable")[:short]] += 1
    divisor = np.gcd.reduce(slots)
    slots //= divisor
    # Rank r's k-th position of n belongs at (k + 1/2)/n of the pattern: sorting spreads them.
    rank = np.repeat(np.arange(ranks), slots)
    turn = np.concatenate([(np.arange(n) + 0.5) / n for n in slots if n])
    return rank[np.lexsort((rank, turn))].astype(np.uint16)
