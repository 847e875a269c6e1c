"""Number of bags of each length, by table: over samples and features, with empty bags.

In: pairs of a length and its bags, and the number of the bags' distinct rows, counted or drawn.
Out: `BagLengths`, and its summary by table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot, whole_dot

# Lengths are int32 in logs. Ids of all bags are summed as int64; half of its range leaves room for
# the sum of two.
_LONGEST = int(np.iinfo(np.int32).max)
_MOST_IDS = 2.0**62


@dataclass(frozen=True)
class BagSummary:
    """Bags of one table: their number, the share of empty ones, and lengths.

    percentile_99: the least length that 99 % of the bags do not exceed. new_share: the share of the
    ids after a bag's first that name a row that the bag does not have yet.
    """

    bags: int
    empty_share: float
    mean: float
    percentile_99: int
    longest: int
    new_share: float


@dataclass(frozen=True, eq=False)
class BagLengths:
    """`bags[n]` bags of table `table[n]` have `length[n]` ids, int64 [N] each, of T tables; and the
    rows of each table's bags, each once a bag, are `distinct` int64 [T].

    Sorted by table, then length; no pair of them repeats, and no number of bags is 0.
    """

    table: Ints
    length: Ints
    bags: Ints
    distinct: Ints

    @classmethod
    def of_pairs(cls, pairs: Ints, distinct: Ints) -> "BagLengths":
        """Return the sum of pairs in any order: table, length and bags of each, int64 [N, 3]."""
        table, length, bags = pairs[pairs[:, 2] > 0].T
        order = np.lexsort((length, table))
        table, length, bags = table[order], length[order], bags[order]
        new = np.ones(len(table), dtype=bool)
        new[1:] = (table[1:] != table[:-1]) | (length[1:] != length[:-1])
        first = np.flatnonzero(new)
        summed = np.add.reduceat(bags, first) if len(first) else bags
        return cls(table[first], length[first], summed, distinct)

    @classmethod
    def sum(cls, counted: "Sequence[BagLengths]") -> "BagLengths":
        """Return the bags of several logs of the same tables."""
        distinct = np.sum([c.distinct for c in counted], axis=0)
        return cls.of_pairs(np.concatenate([c.pairs for c in counted]), distinct)

    def without(self, part: "BagLengths") -> "BagLengths":
        """Return the bags that are not those of a part of the same log."""
        pairs = self.pairs
        place = np.searchsorted(self._keys, part._keys)
        pairs[place, 2] -= part.bags
        return BagLengths.of_pairs(pairs, self.distinct - part.distinct)

    @property
    def _keys(self) -> Ints:
        """Ascending numbers of the pairs of table and length, int64 [N]."""
        return self.table << 32 | self.length

    @classmethod
    def joined(cls, counted: "Sequence[BagLengths]") -> "BagLengths":
        """Return the bags of several lists of tables as those of one list."""
        before = np.cumsum([0, *(c.tables for c in counted)])[:-1]
        return cls(
            np.concatenate([c.table + n for c, n in zip(counted, before, strict=True)]),
            np.concatenate([c.length for c in counted]),
            np.concatenate([c.bags for c in counted]),
            np.concatenate([c.distinct for c in counted]),
        )

    @classmethod
    def checked(cls, pairs: NDArray[np.generic], distinct: Ints) -> "BagLengths":
        """Return bag lengths from `pairs` and `distinct` of files; raise ValueError if invalid."""
        if pairs.dtype != np.int64 or pairs.ndim != 2 or pairs.shape[1] != 3:
            raise ValueError(f"expected int64 [pairs, 3], got {pairs.dtype} {pairs.shape}")
        table, length, bags = np.array(pairs, dtype=np.int64).T
        if len(table) and (table.min() < 0 or table.max() >= len(distinct)):
            raise ValueError(f"a table that is not one of {len(distinct):,}")
        if len(table) and (length.min() < 0 or length.max() > _LONGEST or bags.min() < 1):
            raise ValueError("lengths or numbers of bags out of range")
        if float(dot(np.maximum(length, 1).astype(np.float64), bags)) > _MOST_IDS:
            raise ValueError(f"more than {_MOST_IDS:.4g} ids")
        keys = table << 32 | length
        if (keys[1:] <= keys[:-1]).any():
            raise ValueError("they are not ascending")
        made = cls(table, length, bags, distinct)
        if (distinct < made.filled_bags).any() or (distinct > made.ids_of_tables).any():
            raise ValueError("distinct rows are fewer than bags, or more than ids")
        return made

    @property
    def tables(self) -> int:
        """T, the number of tables."""
        return len(self.distinct)

    @property
    def pairs(self) -> Ints:
        """Table, length and bags of each pair, int64 [N, 3], as files hold them."""
        return np.stack([self.table, self.length, self.bags], axis=1)

    @cached_property
    def first(self) -> Ints:
        """Beginning of each table's pairs, int64 [T + 1]."""
        return np.searchsorted(self.table, np.arange(self.tables + 1)).astype(np.int64)

    @property
    def bags_of_tables(self) -> Ints:
        """The bags of each table, int64 [T]."""
        return self.summed(self.bags)

    @property
    def ids_of_tables(self) -> Ints:
        """The ids of all bags of each table, int64 [T]: its accesses."""
        return self.summed(self.bags * self.length)

    @property
    def filled_bags(self) -> Ints:
        """The bags of each table that are not empty, int64 [T]."""
        return self.summed(np.where(self.length > 0, self.bags, 0))

    @property
    def new_shares(self) -> Floats:
        """Share of a bag's ids after its first that name a row that the bag does not have yet, [T];
        1 if no bag has several ids."""
        filled = self.filled_bags
        more = self.ids_of_tables - filled
        shares: Floats = np.where(more > 0, (self.distinct - filled) / np.maximum(more, 1), 1.0)
        return shares

    @property
    def mean_lengths(self) -> Floats:
        """Mean length of each table's bags, including empty ones, [T]; 0 without bags."""
        means: Floats = self.ids_of_tables / np.maximum(self.bags_of_tables, 1)
        return means

    def of_table(self, table: int) -> tuple[Ints, Ints]:
        """Return the lengths of a table's bags, ascending, and the number of bags of each."""
        pairs = slice(*self.first[table : table + 2].tolist())
        return self.length[pairs], self.bags[pairs]

    def select(self, tables: Sequence[int]) -> "BagLengths":
        """Return the bags of the tables with these numbers, ascending, numbered from 0."""
        chosen = np.asarray(tables, dtype=np.int64)
        kept = np.isin(self.table, chosen)
        table = np.searchsorted(chosen, self.table[kept]).astype(np.int64)
        return BagLengths(table, self.length[kept], self.bags[kept], self.distinct[chosen])

    def summary(self, table: int) -> BagSummary:
        """Return the bags of one table in a few numbers; zeros without bags."""
        length, bags = self.of_table(table)
        if not len(bags):
            return BagSummary(0, 0.0, 0.0, 0, 0, 1.0)
        up_to = np.cumsum(bags)
        total = int(up_to[-1])
        ninety_nine_percent = total - total // 100  # rounded up
        return BagSummary(
            total,
            int(bags[0]) / total if length[0] == 0 else 0.0,
            int(whole_dot(length, bags)) / total,
            int(length[np.searchsorted(up_to, ninety_nine_percent)]),
            int(length[-1]),
            float(self.new_shares[table]),
        )

    def summed(self, values: Ints) -> Ints:
        """Return the sums by table of a value for each pair, int64 [T] of [N], exact."""
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])
        return np.diff(before[self.first])


class BagLengthSums:
    """Sum of the pairs of many batches, in a few times the memory of the result."""

    _FEW = 1 << 14  # pairs that are kept before they are summed

    def __init__(self) -> None:
        self._parts: list[Ints] = [np.zeros((0, 3), np.int64)]
        self._held = 0
        self._limit = self._FEW

    def add(self, pairs: Ints) -> None:
        """Add pairs in the form of `BagLengths.of_pairs`."""
        self._parts.append(pairs)
        self._held += len(pairs)
        if self._held > self._limit:
            none = np.zeros(0, dtype=np.int64)
            self._parts = [BagLengths.of_pairs(self.pairs, none).pairs]
            self._held = len(self._parts[0])
            self._limit = 2 * self._held + self._FEW

    @property
    def pairs(self) -> Ints:
        """Pairs with the sum so far, int64 [N, 3], in any order."""
        return np.concatenate(self._parts)
