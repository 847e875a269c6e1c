"""Expected vectors per bag of a pooled table: one for each node that has any of its rows.

A node that has a share x of the rows of a table's bags (each row once a bag: its samples with the
row over those of all rows) adds up its rows of a bag and sends one vector. Ids are taken to be
independent within a bag, except that rows repeat: of the ids after a bag's first, a share s,
counted by the profile, names a row that the bag does not have yet. With a share p(ℓ) of the bags of
ℓ ids, including empty bags, the chance that a bag has any row at the node is

    chance(x) = Σ_ℓ p(ℓ) · (1 − (1 − x) · (1 − s·x)^(ℓ−1))        ℓ ≥ 1

and the sum over nodes is the expected number of vectors. Accesses to replicas are at no node, so
that shares may sum to less than 1. In x it is concave, 0 at 0, and does not descend. So two linear
functions enclose it:

    x · chance(1)  ≤  chance(x)  ≤  x · slope(0)

chance(1) is the share of bags that are not empty, slope(0) the mean number of distinct rows of a
bag. With the price chance(x) / x per row (the chord), a node's rows together cost as much as its
bags; slope(x) is the cost of one more row.

Sums are taken without differences, so that they are accurate to the last digits however small x is,
and by Horner's rule, with one multiplication a length. Their distance from the vectors counted in
logs: docs/design/vectors-per-bag.md.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot, expm1, log1p, whole_power
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import Table
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology

# Results for steps between lengths up to this one are cached.
_SHORT_STEP = 16


class VectorsPerBag:
    """Chances of T tables by the lengths of their bags; 0 for a table without bags.

    All functions take shares [T, N] from 0 to 1, of T tables and N nodes, and give [T, N].
    """

    def __init__(self, lengths: BagLengths) -> None:
        several = lengths.length > 1
        # Numbers of ids of bags after their first, ascending, and each table's share of bags with
        # that number, [L, T, 1].
        self._more: Ints = np.unique(lengths.length[several]) - 1
        bags = np.zeros((len(self._more), lengths.tables))
        place = np.searchsorted(self._more, lengths.length[several] - 1)
        bags[place, lengths.table[several]] = lengths.bags[several]
        total = np.maximum(lengths.bags_of_tables, 1)
        self._share = (bags / total)[:, :, None]
        self._filled = (lengths.filled_bags / total)[:, None]
        single = np.where(lengths.length == 1, lengths.bags, 0)
        self._single = (lengths.summed(single) / total)[:, None]
        self._new = lengths.new_shares[:, None]
        self._mean = (lengths.distinct / total)[:, None]

    def chances(self, shares: Floats) -> Floats:
        """Return the chance that a bag has any row at a node that has these shares of the rows."""
        # A bag's first id is there, or one of those after it.
        chances: Floats = self._filled * shares + (1 - shares) * self._chances_of_more(shares)
        return chances

    def _chances_of_more(self, shares: Floats) -> Floats:
        """Return Σ p · (1 − (1 − s·x)^(ℓ−1)), the chance that a bag has a new row there after its
        first id, as a sum over ascending lengths of the share of bags that reach each length."""
        new = self._new * shares
        with np.errstate(divide="ignore"):
            log_missed = log1p(-new)  # of one id; -inf if the node has all rows
        hits = _of_steps(lambda step: new if step == 1 else -expm1(step * log_missed))
        chance = np.zeros_like(shares)
        at_least = np.zeros_like(self._mean)
        before = np.concatenate([[0], self._more[:-1]])
        steps = (self._more - before)[::-1].tolist()
        for step, of_length in zip(steps, self._share[::-1], strict=True):
            at_least = at_least + of_length
            rest = at_least - chance
            rest *= hits(step)
            chance += rest
        return chance

    def slopes(self, shares: Floats) -> Floats:
        """Return the derivative of the chance in the share: the mean distinct rows at 0, and
        falling."""
        missed = 1 - self._new * shares
        powers = _of_steps(lambda step: whole_power(missed, step))
        first = np.zeros_like(shares)  # Σ p · (1 − s·x)^(ℓ−1), of bags with several ids
        later = np.zeros_like(shares)  # Σ p · (ℓ−1) · (1 − s·x)^(ℓ−2)
        # The powers of the second are one less, so that its first step is from 1.
        before = np.concatenate([[1], self._more[:-1]])
        steps = (self._more - before)[::-1].tolist()
        for step, more, of_length in zip(
            steps, self._more[::-1].tolist(), self._share[::-1], strict=True
        ):
            first += of_length
            first *= powers(step)
            later += more * of_length
            later *= powers(step)
        slopes: Floats = self._single + first * missed + self._new * (1 - shares) * later
        return slopes

    def chords(self, shares: Floats) -> Floats:
        """Return the chance over the share, the slope of the line from 0; at 0 its limit,
        slope(0)."""
        chords: Floats = np.broadcast_to(self._mean, shares.shape).copy()
        np.divide(self.chances(shares), shares, out=chords, where=shares > 0)
        return chords


def pooled_of(topology: Topology, tables: Sequence[Table]) -> NDArray[np.bool_]:
    """Return a mask of the tables that are pooled on a topology, [T]."""
    if not isinstance(topology, PooledTopology):
        return np.zeros(len(tables), dtype=bool)
    names = topology.tables
    return np.array([names is None or table.name in names for table in tables], dtype=bool)


def pooled_names(topology: Topology, tables: Sequence[Table]) -> tuple[str, ...]:
    """Return the names of the tables that are pooled on a topology, in their order."""
    which = pooled_of(topology, tables).tolist()
    return tuple(table.name for table, pooled in zip(tables, which, strict=True) if pooled)


class PartAccesses(NamedTuple):
    """Accesses of each table to rows in each holder set, [T, G], to whole rows or to some of their
    columns, which give the `tables` their width."""

    tables: Sequence[Table]
    accesses: Floats


class VectorRatios(NamedTuple):
    """Bytes of vectors that a rank gets from other nodes, per byte of the rows that they sum.

    even: with each table's rows spread evenly over the nodes. least: the lower bound over all
    placements.
    """

    even: float
    least: float


def vector_ratios(
    lengths: BagLengths,
    tables: Sequence[Table],
    nodes: int,
    local_shares: Floats,
    pooled: NDArray[np.bool_] | bool = True,
) -> VectorRatios:
    """Return the ratios of the `pooled` [T] tables. `local_shares` [T] of the accesses go to
    replicas; every other row lies on one of `nodes` nodes."""
    shares = np.broadcast_to((1 - local_shares)[:, None] / nodes, (lengths.tables, nodes))
    vectors = vector_bytes(lengths, tables, shares)
    read = np.array([table.row_bytes for table in tables]) * lengths.ids_of_tables.astype(float)
    read = read * pooled
    rows = float(dot(read, shares[:, 0]))
    some = read > 0
    whole = vector_bytes(lengths, tables, np.ones((lengths.tables, 1)))[:, 0]
    least = whole[some] / read[some]
    even = float((vectors[:, 0] * pooled).sum()) / rows if rows > 0 else 1.0
    lowest = min(float(least.min(initial=np.inf)), even)
    return VectorRatios(even, lowest)


def vector_bytes(lengths: BagLengths, tables: Sequence[Table], shares: Floats) -> Floats:
    """Return the expected bytes of vectors, float32, for all bags of the log, if each node has
    `shares` of the tables' accesses, [T, N]."""
    a_bag = np.array([4.0 * table.dim for table in tables])[:, None]
    bytes: Floats = a_bag * lengths.bags_of_tables[:, None] * VectorsPerBag(lengths).chances(shares)
    return bytes


def _of_steps(function: Callable[[int], Floats]) -> Callable[[int], Floats]:
    """Return `function` of a step between lengths, cached for short steps, which recur."""
    known: dict[int, Floats] = {}

    def found(step: int) -> Floats:
        if step > _SHORT_STEP:
            return function(step)
        if step not in known:
            known[step] = function(step)
        return known[step]

    return found
