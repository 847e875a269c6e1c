"""Rows of pooled tables to copy, and a lower bound on the cost of any placement.

In: a `Problem` whose classes are of one table each, on homogeneous ranks. Out: `PooledCopies`.

A row with one owner costs the ranks its reads and gradients within its owner's node, and its table
costs vectors: if the share x of the table's accesses goes to rows with one owner, at least
chance(x) vectors per bag, reached if these rows lie on one node (oper/cost/vectors_per_bag.py).
That is concave in x, so a table pays for nearly a whole vector until nearly all of its accesses are
local: tables are copied whole, or only as far as copies pay within nodes. Tables that are not
pooled have no vectors, and links between nodes cost their rows as always. Of a table the rows with
the largest gain per access come first; their gain is concave too, and linear between two rows, so
the best x is at the end of a class, and is found by trying every end.

Copies are of two kinds: one on each of the N nodes, which spares all vectors, or on all M ranks, in
training by one of the AllReduce methods; the kinds in a plan decide its waits. In inference other
numbers of copies, k on q of the nodes, occur only in the bound. With q_r nodes for each row,
vectors are fewest if rows are missing on the same nodes, V/N · Σ_j chance(share of rows with
q_r ≤ N - j) over j from 1 to N - 1. A straight line from q = 1 that never exceeds the remaining
cost of copies makes that cost linear in q. So each j is the same problem by itself, whose best set
is copied to all nodes at the end of that line.

The budget of extra copies has a price λ per byte: Σ_t min_x (…) - λ·budget is a lower bound on the
mean over ranks of T for every λ ≥ 0, so on T, for each AllReduce method; and a λ within the budget
gives the copies. Rows that need whole ranks or nodes are not considered here: certify.py does that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.allreduce import METHODS, NodeCopiesCost, allreduce_cost
from oper.cost.holder_sets import trained_node_sets
from oper.cost.read_charges import Charges
from oper.cost.vectors_per_bag import VectorsPerBag, pooled_of
from oper.planner.class_placement.homogeneous_replicas import everywhere_seconds, single_seconds
from oper.planner.lp.pricing import DualPrices, homogeneous_lines, relayed_copies
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import Problem, copies_cost_memory_alone
from oper.tables.bag_lengths import BagLengths
from oper.topology.pooled_links import PooledTopology, without_pooling
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

# Prices of memory are halved in their logarithm, from so little of the highest: to 1e-4 of each.
_BISECTIONS = 18
_LOWEST_PRICE = 1e-12
SAFETY = 1e-9  # relative: beyond the rounding of the sums


@dataclass(frozen=True)
class PooledCopies:
    """Copies of pooled rows: `everywhere[c]` rows of each class have a copy on every rank, [C], and
    `a_node[c]` on one rank of every node. extra_bytes: memory of all copies but the first.
    copy_seconds: time of the copies on each rank. seconds: the mean of T if all other rows are as
    supposed; table_seconds: of each table, [T], without the AllReduce's latency."""

    everywhere: Ints
    a_node: Ints
    extra_bytes: float
    copy_seconds: float
    seconds: float
    table_seconds: Floats


class Supposed(NamedTuple):
    """Assumption on the places of rows: each pooled table's rows with one owner on `spread` nodes,
    whose ranks take for them `load` times the mean over all nodes. `a_node`: in training, rows may
    have a copy on each node. The cheapest assumption is one node, the mean, and such copies."""

    spread: int = 1
    load: float = 1.0
    a_node: bool = True


_LEAST = Supposed()


def may_copy_to_nodes(topology: Topology) -> bool:
    """Return True if in training rows of pooled tables may have a copy on each node."""
    ranks = without_pooling(topology)
    return ranks.homogeneous and 1 < ranks.nodes < ranks.ranks


def choose_copies(
    problem: Problem, lengths: BagLengths, budget_bytes: float, supposed: Supposed = _LEAST
) -> PooledCopies:
    """Return the copies with the least mean of T within a budget of extra bytes."""
    methods = _methods(problem, lengths, supposed)
    tried = [methods[0].found(methods[0].nothing)]
    if budget_bytes > 0:
        kinds = [each.within(budget_bytes)[0] for each in methods]
        if copies_cost_memory_alone(problem.topology, problem.workload):
            kinds = [
                each.with_unread(of, budget_bytes) for each, of in zip(methods, kinds, strict=True)
            ]
        tried += [each.found(of) for each, of in zip(methods, kinds, strict=True)]
    return min(tried, key=lambda each: (each.seconds, -each.extra_bytes))


def least_mean_seconds(problem: Problem, lengths: BagLengths, budget_bytes: float) -> float:
    """Return a lower bound, in seconds, on the mean of T of any placement with so many bytes of
    extra copies."""
    methods = _methods(problem, lengths, _LEAST, bound=True)
    nothing = methods[0]
    bounds = [nothing.seconds(nothing.nothing)]
    if budget_bytes > 0:
        bounds += [each.within(budget_bytes)[1] for each in methods]
    return max(min(bounds) * (1 - SAFETY), 0.0)


def enough_extra_bytes(
    problem: Problem,
    lengths: BagLengths,
    budget_bytes: float,
    tolerance: float,
    supposed: Supposed = _LEAST,
) -> float:
    """Return a small number of bytes of extra copies with which the mean of T is longer than within
    the whole budget by `tolerance`, relative, at most."""
    best = choose_copies(problem, lengths, budget_bytes, supposed)
    methods = _methods(problem, lengths, supposed)
    enough = min(budget_bytes, best.extra_bytes)
    for copying in methods:
        low, high = copying.prices
        for _ in range(_BISECTIONS):
            price = math.sqrt(low * high)
            kinds, _ = copying.at(price)
            if copying.seconds(kinds) > best.seconds * (1 + tolerance):
                high = price
            else:
                low, enough = price, min(enough, copying.extra_bytes(kinds))
    return enough


def vector_seconds(problem: Problem, lengths: BagLengths) -> Floats:
    """Return a rank's seconds per iteration for one vector per bag of each pooled table, [T], if
    each vector comes from some node: the mean over all ranks; the ranks of that node need no
    vectors."""
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
    """Return the topology that prices reads and gradients of pooled rows without their vectors."""
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
        accesses = classes.rows * classes.expected
        of_table = np.bincount(table, accesses, minlength=lengths.tables)
        share = accesses / np.maximum(of_table, 1)[table]
        seconds = vector_seconds(problem, lengths)
        return _Tables(VectorsPerBag(lengths), seconds, table, share, spread)

    def _vectors(self, left: Floats) -> Floats:
        """Return the vectors per bag, [T, N], if the share `left` of the accesses is to rows with
        one owner."""
        return self.spread * self.bags.chances(left / self.spread)

    def vectors(self, copied: NDArray[np.bool_]) -> Floats:
        """Return the seconds of each table's vectors, [T], if the rows of the `copied` classes,
        [C], have copies."""
        left = np.bincount(self.table, self.share * ~copied, len(self.vector_seconds))
        vectors = self._vectors(np.clip(left.astype(np.float64), 0.0, 1.0)[:, None])[:, 0]
        seconds: Floats = self.vector_seconds * vectors
        return seconds

    def cheapest(self, gain: Floats) -> tuple[NDArray[np.bool_], float]:
        """Return the classes to copy, [C], if all rows of a class save `gain` [C] seconds without
        their vectors; and the cost of vectors and copies then, less the cost without copies."""
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
    """Return the table of each class, [C]; classes are of one table each."""
    table = np.empty(len(classes), dtype=np.int64)
    table[classes.entry_class] = classes.entry_table
    return table


@dataclass(frozen=True)
class _Copying:
    """Copies of K kinds, in training by one AllReduce method: the seconds of each class's rows with
    them, without vectors, and their extra bytes. The first kind is none; those on one node leave
    vectors as they are. An infinity is a kind that a class has no use for."""

    tables: _Tables
    rows: Ints  # [C]
    copies: Ints  # [K] of a row
    nodes: Ints  # [K] that have any
    kind_seconds: Floats  # [K, C] of all rows of each class
    extra: Floats  # [K, C]
    latency: float
    ranks: int
    all_nodes: int

    @property
    def nothing(self) -> Ints:
        """The kinds of classes without copies, [C]."""
        return np.zeros(len(self.rows), dtype=np.int64)

    @property
    def prices(self) -> tuple[float, float]:
        """Seconds per byte, from next to nothing to the price at which no copy pays."""
        first = float(self.kind_seconds[0].sum() + self.tables.vector_seconds.sum())
        highest = first / max(float(self.extra[self.extra > 0].min(initial=np.inf)), 1.0)
        return _LOWEST_PRICE * highest, highest

    def at(self, price: float) -> tuple[Ints, float]:
        """Return the kinds of copies at a price per byte, [C], and the total cost at it, without
        latency."""
        classes = np.arange(len(self.rows))
        cost = self.kind_seconds + price * self.extra
        away = self.nodes == 1
        left = np.where(away[:, None], cost, np.inf).argmin(axis=0)
        least = cost[left, classes]
        steps = (self.all_nodes - 1) / np.maximum(self.nodes - 1, 1)  # 1 if all nodes have copies
        copied = least + steps[:, None] * (cost - least)
        copied[away] = np.inf
        best = copied.argmin(axis=0)
        everywhere, seconds = self.tables.cheapest(least - copied[best, classes])
        return np.where(everywhere, best, left), float(least.sum()) + seconds

    def seconds(self, kinds: Ints) -> float:
        """Return the mean of T with these kinds of copies, [C], and one node a table."""
        return float(self.table_seconds(kinds).sum()) + self._latency(kinds)

    def table_seconds(self, kinds: Ints) -> Floats:
        """Return the seconds of each table, [T], without the latency, if classes are copied by
        `kinds`."""
        vectors = self.tables.vectors(self.nodes[kinds] > 1)
        beside = self.kind_seconds[kinds, np.arange(len(kinds))]
        return vectors + np.bincount(self.tables.table, beside, minlength=len(vectors))

    def extra_bytes(self, kinds: Ints) -> float:
        """Return the extra bytes of these kinds of copies, [C]."""
        return float(self.extra[kinds, np.arange(len(kinds))].sum())

    def within(self, budget_bytes: float) -> tuple[Ints, float]:
        """Return the kinds of copies, [C], within a budget of extra bytes, and the bound of this
        method."""
        kinds, bound = self.at(0.0)
        if self.extra_bytes(kinds) > budget_bytes:
            kinds, bound = self.nothing, 0.0
            low, high = self.prices
            for _ in range(_BISECTIONS):
                price = math.sqrt(low * high)
                tried, seconds = self.at(price)
                bound = max(bound, seconds - price * budget_bytes)
                if self.extra_bytes(tried) > budget_bytes:
                    low = price
                else:
                    kinds, high = tried, price
        return kinds, bound + self.latency

    def with_unread(self, kinds: Ints, budget_bytes: float) -> Ints:
        """Return these kinds of copies, [C], with copies of rows that are not expected to be read,
        in tables whose other rows all have some: on all ranks if they fit, else on all nodes."""
        kinds, tables = kinds.copy(), self.tables.table
        unread = (self.tables.share == 0) & (self.rows > 0) & (self.nodes[kinds] < self.all_nodes)
        bare = ~unread & (self.rows > 0) & (self.nodes[kinds] < self.all_nodes)
        unread &= ~np.isin(tables, tables[bare])
        for kind in np.argsort(-self.copies, kind="stable").tolist():
            if self.nodes[kind] < self.all_nodes:
                continue
            may = np.flatnonzero(unread & np.isfinite(self.kind_seconds[kind]))
            left = budget_bytes - self.extra_bytes(kinds)
            fitting = may[np.cumsum(self.extra[kind, may]) <= left]
            kinds[fitting], unread[fitting] = kind, False
        return kinds

    def found(self, kinds: Ints) -> PooledCopies:
        """Return the copies of these kinds, [C]."""
        copied = kinds > 0
        everywhere = copied & (self.copies[kinds] == self.ranks)
        row_seconds = float(dot(self.kind_seconds[kinds, np.arange(len(kinds))], copied))
        return PooledCopies(
            everywhere=np.where(everywhere, self.rows, 0),
            a_node=np.where(copied & ~everywhere, self.rows, 0),
            extra_bytes=self.extra_bytes(kinds),
            copy_seconds=row_seconds + self._latency(kinds),
            seconds=self.seconds(kinds),
            table_seconds=self.table_seconds(kinds),
        )

    def _latency(self, kinds: Ints) -> float:
        return self.latency * bool((kinds > 0).any())


class _Kinds(NamedTuple):
    """Numbers of copies, of nodes that have any, [K] each, and seconds of a row of each class,
    [K, C]."""

    copies: Ints
    nodes: Ints
    seconds: Floats


def _methods(
    problem: Problem, lengths: BagLengths, supposed: Supposed, bound: bool = False
) -> list[_Copying]:
    """Return the AllReduce methods that copies may use in training; in inference one, without
    AllReduce. For a bound with all kinds of copies."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    tables = _Tables.of(problem, lengths, supposed.spread)
    load = np.where(classes.pooled, supposed.load, 1.0)

    def copying(kinds: _Kinds, latency: float) -> _Copying:
        seconds = kinds.seconds * classes.rows
        seconds[0] *= load
        extra = np.outer(kinds.copies - 1, classes.m * classes.rows)
        numbers = (topology.ranks, topology.nodes)
        return _Copying(
            tables, classes.rows, kinds.copies, kinds.nodes, seconds, extra, latency, *numbers
        )

    if not workload.training:
        return [copying(_inference_kinds(problem, bound), 0.0)]
    M, N = topology.ranks, topology.nodes
    near = single_seconds(classes, without_vectors(topology), workload)
    copied = NodeCopiesCost.of(topology)
    a_node, ways = [], []
    if supposed.a_node and may_copy_to_nodes(topology):
        a_node = [((N, N), _a_node_seconds(problem, copied), copied.latency)]
        ways.append(a_node)
    for method in METHODS[1:]:
        row_seconds = everywhere_seconds(classes, topology, workload, method)
        everywhere = [((M, N), row_seconds, allreduce_cost(topology, method).latency)]
        if bound or not a_node:
            ways.append(everywhere)
        if a_node:
            ways.append(a_node + everywhere)
    return [copying(_kinds(near, each), sum(latency for *_, latency in each)) for each in ways]


def _kinds(near: Floats, copied: Sequence[tuple[tuple[int, int], Floats, float]]) -> _Kinds:
    """Return the kinds of copies, the first of which is none: the number of copies and of their
    nodes, and their seconds."""
    copies, nodes = np.array([(1, 1), *(numbers for numbers, *_ in copied)]).T
    return _Kinds(copies, nodes, np.stack([near, *(seconds for _, seconds, _ in copied)]))


def _a_node_seconds(problem: Problem, copied: NodeCopiesCost) -> Floats:
    """Return the mean rank's seconds in training for a row of each class with a copy on each node,
    without the latency, [C]; infinite if its table is not pooled."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    sets = trained_node_sets(topology).take([0])
    traffic = classes.traffic(without_vectors(topology), workload)
    of_holders = float(copied.union.mean()) * topology.nodes / topology.ranks
    seconds = traffic.mean_set_seconds(sets)[:, 0] + of_holders * classes.row_sums.union_bytes
    return np.where(classes.pooled, seconds, np.inf)


def _inference_kinds(problem: Problem, bound: bool) -> _Kinds:
    """Return the kinds of copies in inference: those of plans, on one node, all nodes or all ranks;
    for a bound all kinds."""
    classes, topology = problem.classes, problem.topology
    assert isinstance(topology, PooledTopology)
    is_pooled = np.broadcast_to(classes.pooled, len(classes))
    pooled = _kinds_of_pooled(topology, classes, bound)
    others = _kinds_of_others(topology, classes, bound)
    return _Kinds(
        np.concatenate([pooled.copies, others.copies[1:]]),
        np.concatenate([pooled.nodes, others.nodes[1:]]),
        np.concatenate(
            [
                np.where(is_pooled, pooled.seconds[:1], others.seconds[:1]),
                np.where(is_pooled, pooled.seconds[1:], np.inf),
                np.where(is_pooled, np.inf, others.seconds[1:]),
            ]
        ),
    )


def _kinds_of_pooled(topology: PooledTopology, classes: Classes, bound: bool) -> _Kinds:
    M, N = topology.ranks, topology.nodes
    G = M // N
    kinds = [(1, 1), (N, N), (M, N)]
    if bound:  # on q nodes fewest, one on each rank of a node, and all that there is room for,
        # between which their savings are linear
        kinds += [(G, 1), *((k, q) for q in range(2, N) for k in (q, max(q, G), q * G))]
    copies, nodes = np.array(kinds).T
    sums = classes.row_sums
    seconds = np.outer(_links_in_nodes(topology, copies, nodes), sums.pooled_read_bytes)
    if not topology.shares_memory:  # if some readers use it alone, it is left out
        memory = Charges.of_memory(topology).mean_memory_seconds
        seconds += memory * sums.pooled_gradient_bytes
    return _Kinds(copies, nodes, seconds)


def _kinds_of_others(topology: PooledTopology, classes: Classes, bound: bool) -> _Kinds:
    """Return the kinds of copies of rows that are not pooled. These rows have no vectors, so all
    their copies count as copies on all nodes."""
    M, N = topology.ranks, topology.nodes
    even = DualPrices(np.full(M, 1 / M), np.zeros(M), 0.0)
    sums = classes.row_sums
    if isinstance(topology.unpooled, RelayedTopology):
        copies, of_rank, of_node = relayed_copies(topology.unpooled, even)
        seconds: Floats = np.outer(of_rank, sums.read_bytes)
        seconds += np.outer(of_node, sums.node_bytes[:, 0])
    else:
        line, _ = homogeneous_lines(topology.unpooled, even)
        copies = np.array([1, N, M, *range(2, M)])
        seconds = np.outer(line[copies - 1], sums.read_bytes)
    if not bound:  # the first are those of plans
        copies, seconds = copies[:3], seconds[:3]
    return _Kinds(copies, np.where(copies > 1, N, 1), seconds)


def _links_in_nodes(topology: PooledTopology, copies: Ints, nodes: Ints) -> Floats:
    """Return a lower bound on the mean rank's seconds per byte of a pooled row that ranks read in
    the nodes of its copies, for themselves or for others, by `copies` on `nodes` of the nodes, [K]
    each. Reads of a rank in other nodes at its own position take no link."""
    M, N = topology.ranks, topology.nodes
    mates = topology.masks()["same_node"]
    link = float(topology.own_link_cost[mates].min()) if mates.any() else 0.0
    linkless = copies + (N - nodes) * np.minimum(copies, M // N)
    return np.asarray(link * np.maximum(M - linkless, 0) / M)
