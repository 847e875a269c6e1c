"""Bounds on T where tables are pooled, on homogeneous ranks: the mean over ranks of what any
placement takes.

In: a `Problem` whose classes are of one table each. Out: seconds. In training copies are chosen
table by table, with vectors as the concave function of a table's share that they are
(pooled_copies.py). In inference a row has k copies, 1 to M, on N nodes of equal size, and costs the
mean rank at least

    near(k)                            its links within nodes, or all links if it is not pooled
    + V · (1 - min(k, N) / N)          its part of its table's vectors, to nodes without a copy
    + memory · k                       where copies of it take budget

of which the first two fall, piece by piece linear in k, so that 1, N or M copies are best; V is the
row's share of one vector a bag, the fewest that a table with one owner has. The price of memory is
what makes the bound largest. Whole rows and uneven nodes are not looked at: certify.py does that.
"""

from dataclasses import dataclass

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.read_charges import Charges
from oper.cost.vectors_per_bag import VectorsPerBag
from oper.planner.class_placement.pooled_copies import (
    SAFETY,
    choose_copies,
    table_of_class,
    vector_seconds,
    without_vectors,
)
from oper.planner.lp.pricing import DualPrices, homogeneous_lines, relayed_copies
from oper.planner.problem.problem import Problem
from oper.tables.bag_lengths import BagLengths
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import RelayedTopology

_BISECTIONS = 50


def pooled_bound(problem: Problem) -> float:
    """The bound in seconds; 0 where the bags are not known, or ranks differ."""
    lengths, topology = problem.profile.bag_lengths, problem.topology
    assert isinstance(topology, PooledTopology)
    if lengths is None or not topology.unpooled.is_homogeneous(problem.capacity_bytes):
        return 0.0
    if problem.workload.training:
        return choose_copies(problem, lengths, problem.budget_bytes).bound_seconds
    return MeanOfCopies.of(problem, lengths).bound(problem.budget_bytes)


@dataclass(frozen=True)
class MeanOfCopies:
    """What the rows of each class take of the mean rank with some numbers of copies, in inference.

    table [C]; seconds [C, K] of all rows of a class with each of K numbers of copies, and their
    bytes of extra copies, extra [C, K].
    """

    table: Ints
    tables: int
    seconds: Floats
    extra: Floats

    @staticmethod
    def of(problem: Problem, lengths: BagLengths, spread: int = 1) -> "MeanOfCopies":
        """Where rows with one owner lie on `spread` nodes, which is least for one."""
        classes, topology = problem.classes, problem.topology
        assert isinstance(topology, PooledTopology)
        M, N = topology.ranks, topology.nodes
        even = DualPrices(np.full(M, 1 / M), np.zeros(M), 0.0)
        table, sums = table_of_class(classes), classes.row_sums
        near, _ = homogeneous_lines(without_vectors(topology), even)
        of_pooled = _bends(near, N)
        chance = VectorsPerBag(lengths).chances(np.full((lengths.tables, 1), 1 / spread))[:, 0]
        a_table = vector_seconds(problem, lengths) * N / max(N - 1, 1) * spread * chance
        a_row = a_table[table] * classes.accesses / np.maximum(lengths.ids_of_tables, 1)[table]
        pooled = np.outer(sums.pooled_read_bytes, near[of_pooled - 1])
        pooled += np.outer(a_row, 1 - np.minimum(of_pooled, N) / N)
        if isinstance(topology.unpooled, RelayedTopology):
            of_others, of_rank, of_node = relayed_copies(topology.unpooled, even)
            others: Floats = np.outer(sums.read_bytes, of_rank)
            others += np.outer(sums.node_bytes[:, 0], of_node)
        else:
            fetched, _ = homogeneous_lines(topology.unpooled, even)
            of_others = _bends(fetched, N)
            others = np.outer(sums.read_bytes, fetched[of_others - 1])
        # As many numbers of copies for either: the last one is there again.
        kinds = max(len(of_pooled), len(of_others))
        is_pooled = np.broadcast_to(classes.pooled, len(classes))[:, None]
        seconds = np.where(is_pooled, _wider(pooled, kinds), _wider(others, kinds))
        copies = np.where(is_pooled, _wider(of_pooled, kinds), _wider(of_others, kinds))
        if not topology.shares_memory:  # where some readers use it alone, it is left out
            memory = Charges.of_memory(topology).mean_memory_seconds
            seconds += memory * sums.pooled_gradient_bytes[:, None]
        rows = classes.rows.astype(np.float64)[:, None]
        extra = classes.m[:, None] * (copies - 1)
        return MeanOfCopies(table, lengths.tables, seconds * rows, extra * rows)

    def cheapest(self, price: float) -> Ints:
        """The best number of copies of each class, [C], at a price per byte."""
        found: Ints = (self.seconds + price * self.extra).argmin(axis=1)
        return found

    def price(self, budget_bytes: float) -> float:
        """The least price, nearly, at which copies keep the budget."""
        each = np.arange(len(self.table))
        if self.extra[each, self.cheapest(0.0)].sum() <= budget_bytes:
            return 0.0
        low, high = 0.0, float(np.ptp(self.seconds, axis=1).sum()) + 1e-300
        while self.extra[each, self.cheapest(high)].sum() > budget_bytes:
            high *= 2  # rows without bytes have nothing to save
        for _ in range(_BISECTIONS):
            price = low + (high - low) / 2 if low else high / 1024
            if self.extra[each, self.cheapest(price)].sum() > budget_bytes:
                low = price
            else:
                high = price
        return high

    def bound(self, budget_bytes: float) -> float:
        """Seconds that no placement within the budget has a smaller mean of."""
        price = self.price(budget_bytes)
        least = float((self.seconds + price * self.extra).min(axis=1).sum())
        owed = price * budget_bytes
        return max(least - owed - SAFETY * (least + owed), 0.0)

    def table_seconds(self, budget_bytes: float) -> Floats:
        """What each table takes with the copies of the budget, [T]."""
        chosen = self.cheapest(self.price(budget_bytes))
        seconds = self.seconds[np.arange(len(chosen)), chosen]
        return np.bincount(self.table, seconds, minlength=self.tables).astype(np.float64)


def _bends(line: Floats, nodes: int) -> Ints:
    """The numbers of copies of which one is best for every row, by what 1 to M of them cost: where
    the line over them bends, or all of them where it is not the least there."""
    copies = np.arange(1, len(line) + 1)
    bends = np.unique([1, nodes, len(line)])
    between = np.interp(copies, bends, line[bends - 1])
    return bends if (line >= between * (1 - 1e-12)).all() else copies


def _wider(values: Floats | Ints, kinds: int) -> Floats:
    """The values with the last one repeated, so that there are so many, in the last axis."""
    last = values.shape[-1] - 1
    return np.asarray(values, dtype=np.float64)[..., np.minimum(np.arange(kinds), last)]
