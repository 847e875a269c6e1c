"""Expected vectors that a bag of a pooled table costs: one for each node that has any of its rows.

A node that has a share x of a table's accesses adds up its rows of a bag and sends one vector. With
ids that are independent within a bag, and a share p(ℓ) of the bags of ℓ ids, empty bags too, the
chance that a bag has any row there is

    chance(x) = Σ_ℓ p(ℓ) · (1 − (1 − x)^ℓ)

and the sum over nodes is the expected number of vectors. Accesses to replicas are at no node, so
that shares may sum to less than 1. The sum is taken as Σ_j t_j · ((1 − x)^ℓ_(j−1) − (1 − x)^ℓ_j),
with t_j the share of bags of at least the j-th length and ℓ_0 = 0: no term is negative, so that it
is accurate to the last digits however small x is, and Horner's rule takes it with one
multiplication a length.

In x it is concave, 0 at 0, and does not descend. So two linear functions enclose it:

    x · chance(1)  ≤  chance(x)  ≤  x · slope(0)

chance(1) is the share of bags that are not empty, slope(0) the mean length. Rows that get the price
chance(x) / x each (the chord) cost together what their node's bags do; slope(x) is what one access
more adds.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import Table

# Steps between lengths up to this one are kept, for as many arrays of shares at most.
_SHORT_STEP = 16


class VectorsPerBag:
    """The chances of T tables by the lengths of their bags; 0 of a table without bags.

    All functions take shares [T, N] from 0 to 1, of T tables and N nodes, and give [T, N].
    """

    def __init__(self, lengths: BagLengths) -> None:
        positive = lengths.length > 0
        self._lengths: Ints = np.unique(lengths.length[positive])  # of any table, ascending
        bags = np.zeros((len(self._lengths), lengths.tables))
        place = np.searchsorted(self._lengths, lengths.length[positive])
        bags[place, lengths.table[positive]] = lengths.bags[positive]
        # Of each table the share of bags that have each length, [L, T, 1].
        self._share = (bags / np.maximum(lengths.bags_of_tables, 1))[:, :, None]
        self._mean = lengths.mean_lengths[:, None]

    def chances(self, shares: Floats) -> Floats:
        """The chance that a bag has any row at a node that has these shares of the accesses."""
        with np.errstate(divide="ignore"):
            log_missed = np.log1p(-shares)  # of one access; -inf where the node has all
        hits = _of_steps(lambda step: shares if step == 1 else -np.expm1(step * log_missed))
        chance = np.zeros_like(shares)
        at_least = np.zeros_like(self._mean)  # of the bags have at least so many ids
        before = np.concatenate([[0], self._lengths[:-1]])
        steps = (self._lengths - before)[::-1].tolist()
        for step, of_length in zip(steps, self._share[::-1], strict=True):
            at_least = at_least + of_length
            more = at_least - chance
            more *= hits(step)
            chance += more
        return chance

    def slopes(self, shares: Floats) -> Floats:
        """The derivative of the chance in the share: the mean length at 0, and falling."""
        missed = 1 - shares
        powers = _of_steps(lambda step: missed**step)
        slope = np.zeros_like(shares)
        # The derivative's powers are the lengths less 1, so that the first step is from 1.
        before = np.concatenate([[1], self._lengths[:-1]])
        steps = (self._lengths - before)[::-1].tolist()
        ids = self._share * self._lengths[:, None, None]
        for step, of_length in zip(steps, ids[::-1], strict=True):
            slope += of_length
            slope *= powers(step)
        return slope

    def chords(self, shares: Floats) -> Floats:
        """The chance over the share, slope of the line from 0; at 0 its limit, the mean length."""
        chords: Floats = np.broadcast_to(self._mean, shares.shape).copy()
        np.divide(self.chances(shares), shares, out=chords, where=shares > 0)
        return chords


class VectorRatios(NamedTuple):
    """Bytes of vectors that a rank gets from other nodes, for a byte of the rows they are sums of.

    even: with each table's rows spread evenly over the nodes. least: wherever its rows are.
    """

    even: float
    least: float


def vector_ratios(
    lengths: BagLengths, tables: Sequence[Table], nodes: int, local_shares: Floats
) -> VectorRatios:
    """The ratios of tables of which the nodes' ranks have `local_shares` [T] of the accesses on
    replicas, all other rows lying on one of `nodes` nodes each."""
    of_bags, bags = VectorsPerBag(lengths), lengths.bags_of_tables
    shares = (1 - local_shares)[:, None] / nodes
    vector_bytes = np.array([4.0 * table.dim for table in tables])
    row_bytes = np.array([table.row_bytes for table in tables], dtype=np.float64)
    read = row_bytes * lengths.ids_of_tables
    remote = shares[:, 0]
    vectors = float((vector_bytes * bags * remote) @ of_bags.chords(shares)[:, 0])
    rows = float(read @ remote)
    some = read > 0
    whole = of_bags.chances(np.ones_like(shares))[:, 0]
    least = (vector_bytes * bags * whole)[some] / read[some]
    found = vectors / rows if rows > 0 else 1.0
    lowest = min(float(least.min(initial=np.inf)), found)
    return VectorRatios(found, lowest)


def _of_steps(function: Callable[[int], Floats]) -> Callable[[int], Floats]:
    """The function of a step between lengths, taken once of short steps, which recur."""
    known: dict[int, Floats] = {}

    def found(step: int) -> Floats:
        if step > _SHORT_STEP:
            return function(step)
        if step not in known:
            known[step] = function(step)
        return known[step]

    return found
