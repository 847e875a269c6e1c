"""Which rows of pooled tables to copy to all ranks in training, and what any placement costs.

In: a `Problem` whose classes are of one table each, on homogeneous ranks. Out: `PooledCopies`.
With one owner a row costs the ranks its reads and gradients within its owner's node, and its table
costs vectors: of the share x of the table's accesses that are to rows with one owner, chance(x) a
bag at the least, where they lie on one node (oper/cost/vectors_per_bag.py). That is concave in x,
so that a table pays for nearly a whole vector until nearly all of its accesses are local: tables
are copied whole, or only as far as copies pay within nodes. Tables that are not pooled have no
vectors, and links between nodes cost their rows as always. Of a table the rows with most gain per
access come first; what they gain is concave too, and between two of them linear, so that the best x
is where a class ends, and is found by looking at every end.

The budget of extra copies has a price λ per byte: Σ_t min_x (…) - λ·budget is a lower bound on the
mean over ranks of T for every λ ≥ 0, so on T, for each AllReduce method; and a λ within the budget
gives the copies. Rows that need whole ranks or nodes are not looked at: certify.py does that.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.cost.allreduce import METHODS, allreduce_cost
from oper.cost.vectors_per_bag import VectorsPerBag, pooled_of
from oper.planner.class_placement.homogeneous_replicas import everywhere_seconds, single_seconds
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import Problem
from oper.tables.bag_lengths import BagLengths
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology

_BISECTIONS = 30
SAFETY = 1e-9  # relative: beyond the rounding of the sums


@dataclass(frozen=True)
class PooledCopies:
    """`everywhere[c]` rows of each class have a copy on every rank, [C]. copy_seconds: what these
    take each rank. seconds: the mean of T where all other rows are as supposed; table_seconds: of
    each table, [T], the AllReduce's latency left out. bound_seconds: no placement has a smaller
    mean where that supposes the least."""

    everywhere: Ints
    copy_seconds: float
    seconds: float
    table_seconds: Floats
    bound_seconds: float


class Supposed(NamedTuple):
    """Where rows with one owner are supposed to be: those of each pooled table on `spread` nodes,
    whose ranks take for them `load` times the mean over all nodes. The least is one node, and the
    mean."""

    spread: int = 1
    load: float = 1.0


_LEAST = Supposed()


def choose_copies(
    problem: Problem, lengths: BagLengths, budget_bytes: float, supposed: Supposed = _LEAST
) -> PooledCopies:
    """The copies with the least mean of T within a budget of extra bytes."""
    methods = _methods(problem, lengths, supposed)
    nothing = np.zeros(len(problem.classes), dtype=np.int64)
    without = methods[0].seconds(nothing > 0)
    of_tables = methods[0].table_seconds(nothing > 0)
    tried = [PooledCopies(nothing, 0.0, without, of_tables, without)]
    if budget_bytes > 0:
        tried += [each.within(budget_bytes) for each in methods]
    best = min(tried, key=lambda each: each.seconds)
    bound = min(each.bound_seconds for each in tried)
    return replace(best, bound_seconds=max(bound * (1 - SAFETY), 0.0))


def enough_extra_bytes(
    problem: Problem,
    lengths: BagLengths,
    budget_bytes: float,
    tolerance: float,
    supposed: Supposed = _LEAST,
) -> float:
    """Bytes of extra copies with which the mean of T is longer than within the whole budget by
    `tolerance`, relative, at most: few such."""
    best = choose_copies(problem, lengths, budget_bytes, supposed)
    methods = _methods(problem, lengths, supposed)
    enough = min(budget_bytes, methods[0].extra_bytes(best.everywhere > 0))
    for each in methods:
        low, high = 0.0, each.highest_price
        for _ in range(_BISECTIONS):
            price = (low + high) / 2
            copied, _ = each.at(price)
            if each.seconds(copied) > best.seconds * (1 + tolerance):
                high = price
            else:
                low, enough = price, min(enough, each.extra_bytes(copied))
    return enough


def vector_seconds(problem: Problem, lengths: BagLengths) -> Floats:
    """What a vector for each bag of a pooled table takes a rank in an iteration, [T], where each
    comes from some node: the mean over all ranks, of which those of that node need none."""
    topology, workload = problem.topology, problem.workload
    assert isinstance(topology, PooledTopology)
    away, nodes = topology.masks()["other_node"], topology.nodes
    cost = float(topology.own_link_cost[away].mean()) if away.any() else 0.0
    dims = np.array([table.dim for table in problem.profile.tables], dtype=np.float64)
    a_rank = workload.batch_size / topology.ranks / max(problem.profile.samples, 1)
    seconds: Floats = 4 * dims * lengths.bags_of_tables * a_rank * cost * (nodes - 1) / nodes
    pooled = pooled_of(topology, problem.profile.tables)
    return seconds * pooled * (2 if workload.training else 1)


def without_vectors(topology: Topology) -> PooledTopology:
    """What reads and gradients of pooled rows cost beside vectors."""
    assert isinstance(topology, PooledTopology)
    return topology.with_ratio(0.0, 0.0)


@dataclass(frozen=True)
class _Tables:
    """T tables: their bags' chances, vectors' seconds [T], and classes with accesses' shares."""

    bags: VectorsPerBag
    vector_seconds: Floats  # [T]
    table: Ints  # [C]
    share: Floats  # [C] of its table's accesses that are to the rows of each class
    spread: int  # nodes of each table

    @staticmethod
    def of(problem: Problem, lengths: BagLengths, spread: int) -> "_Tables":
        classes = problem.classes
        table = table_of_class(classes)
        accesses = (classes.rows * classes.accesses).astype(np.float64)
        of_table = np.bincount(table, accesses, minlength=lengths.tables)
        share = accesses / np.maximum(of_table, 1)[table]
        seconds = vector_seconds(problem, lengths)
        return _Tables(VectorsPerBag(lengths), seconds, table, share, spread)

    def _vectors(self, left: Floats) -> Floats:
        """Vectors a bag where so much of the accesses is to rows with one owner, [T, N]."""
        return self.spread * self.bags.chances(left / self.spread)

    def vectors(self, copied: NDArray[np.bool_]) -> Floats:
        """The seconds of each table's vectors, [T], where the rows of these classes, [C], have
        copies."""
        left = np.bincount(self.table, self.share * ~copied, len(self.vector_seconds))
        vectors = self._vectors(np.clip(left.astype(np.float64), 0.0, 1.0)[:, None])[:, 0]
        found: Floats = self.vector_seconds * vectors
        return found

    def cheapest(self, gain: Floats) -> tuple[NDArray[np.bool_], float]:
        """The classes to copy, [C], where all rows of a class save `gain` [C] seconds beside
        vectors; and what vectors and copies cost then, less what a copy of nothing does."""
        some = np.flatnonzero(self.share > 0)
        table = self.table[some]
        order = some[np.lexsort((-gain[some] / self.share[some], table))]
        table = self.table[order]
        first = np.searchsorted(table, np.arange(len(self.vector_seconds) + 1))
        place = np.arange(len(order)) - first[table] + 1
        shape = len(self.vector_seconds), int(np.diff(first).max(initial=0)) + 1
        saved, near = np.zeros(shape), np.zeros(shape)
        saved[table, place], near[table, place] = gain[order], self.share[order]
        left = np.clip(1 - np.cumsum(near, axis=1), 0.0, 1.0)
        counts = np.diff(first)
        left[np.arange(shape[1]) >= counts[:, None]] = 0.0  # all of the table's accesses
        left[counts == 0] = 0.0
        seconds = self.vector_seconds[:, None] * self._vectors(left) - np.cumsum(saved, axis=1)
        seconds[np.arange(shape[1]) > counts[:, None]] = np.inf
        best = seconds.argmin(axis=1)
        copied = np.zeros(len(gain), dtype=bool)
        copied[order[place <= best[table]]] = True
        return copied, float(seconds[np.arange(shape[0]), best].sum())


def table_of_class(classes: Classes) -> Ints:
    """The table of each class, [C], where classes are of one table each."""
    table = np.empty(len(classes), dtype=np.int64)
    table[classes.entry_class] = classes.entry_table
    return table


@dataclass(frozen=True)
class _Copying:
    """Copies by one AllReduce method: what copies of all rows of a class save beside vectors, [C],
    may be negative, and their extra bytes."""

    rows: Ints  # [C]
    tables: _Tables
    single: Floats  # seconds of the rows of each class with one owner each, beside vectors
    gain: Floats
    copied_seconds: Floats  # of a copy of each row of a class on every rank
    extra: Floats
    latency: float

    @property
    def highest_price(self) -> float:
        """Seconds per byte at which no copy pays."""
        gains = float(np.abs(self.gain).sum() + self.tables.vector_seconds.sum())
        return gains / max(float(self.extra[self.extra > 0].min(initial=np.inf)), 1.0)

    def at(self, price: float) -> tuple[NDArray[np.bool_], float]:
        """The classes to copy at a price per byte, [C], and what all costs at it, but latency."""
        copied, seconds = self.tables.cheapest(self.gain - price * self.extra)
        return copied, float(self.single.sum()) + seconds

    def seconds(self, copied: NDArray[np.bool_]) -> float:
        """The mean of T with copies of the rows of these classes, [C], and one node a table."""
        return float(self.table_seconds(copied).sum()) + self.latency * bool(copied.any())

    def table_seconds(self, copied: NDArray[np.bool_]) -> Floats:
        """The same of each table, [T], the latency left out."""
        vectors = self.tables.vectors(copied)
        left = self.single - np.where(copied, self.gain, 0.0)
        return vectors + np.bincount(self.tables.table, left, minlength=len(vectors))

    def extra_bytes(self, copied: NDArray[np.bool_]) -> float:
        """The extra bytes of copies of the rows of these classes, [C]."""
        return float(self.extra @ copied)

    def within(self, budget_bytes: float) -> PooledCopies:
        """The copies within a budget of extra bytes, with the bound of this method."""
        copied, bound = self.at(0.0)
        if self.extra_bytes(copied) > budget_bytes:
            copied, bound = np.zeros(len(self.rows), dtype=bool), 0.0
            low, high = 0.0, self.highest_price
            for _ in range(_BISECTIONS):
                price = (low + high) / 2
                tried, seconds = self.at(price)
                bound = max(bound, seconds - price * budget_bytes)
                if self.extra_bytes(tried) > budget_bytes:
                    low = price
                else:
                    copied, high = tried, price
        rows = np.where(copied, self.rows, 0)
        own = float(self.copied_seconds @ copied) + self.latency * bool(copied.any())
        seconds, of_tables = self.seconds(copied), self.table_seconds(copied)
        return PooledCopies(rows, own, seconds, of_tables, bound + self.latency)


def _methods(problem: Problem, lengths: BagLengths, supposed: Supposed) -> list[_Copying]:
    """The AllReduce methods that copies may use."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    tables = _Tables.of(problem, lengths, supposed.spread)
    near = single_seconds(classes, without_vectors(topology), workload)
    near = near * np.where(classes.pooled, supposed.load, 1.0)
    extra = (topology.ranks - 1) * classes.m * classes.rows
    found = []
    for method in METHODS[1:]:
        own = everywhere_seconds(classes, topology, workload, method) * classes.rows
        gain = near * classes.rows - own
        latency = allreduce_cost(topology, method).latency
        single = near * classes.rows
        found.append(_Copying(classes.rows, tables, single, gain, own, extra, latency))
    return found
