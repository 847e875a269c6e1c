"""A lower bound that knows that the hottest rows (the head) cannot be split.

In: `Classes` and the limits. Out: `Bound`, in seconds.

The Lagrangian of `lagrangian_bound.py` lets every row be held in parts. If single rows are a
sizeable part of a rank's time, the rows of the hottest classes (the head) are kept whole here, in a
mixed integer programme over owners, and copies everywhere in training:

    minimise T over n[c, j] rows of class c owned by rank j and e[c] rows everywhere, whole in the
    head; T ≥ rank r's time, Σ memory ≤ capacity_j, Σ (M - 1) m e ≤ budget

All other classes (the tail) are bucketed by width and density so that the bound still holds: a
bucket gives rank j some rows n and some weight W with w_least·n ≤ W ≤ w_most·n, all its rows and
all its weight in the end, which every placement of its rows does. Copies everywhere are charged by
a line in n and W that is below the cost of each of the bucket's classes.

Inference with a budget for copies is not covered: there the hottest rows are copied first, and the
Lagrangian is near. The work has limits, so that the bound is the same in every run: the programme
is solved up to `NODES` nodes of branch and bound, and above `ENTRIES`, which grow with the square
of the ranks, it is not made: rows with one owner are then bounded by `node_loads_bound.py`, copies
by the Lagrangian. The bound's `note` names omissions and cuts.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from oper.base import standard_streams
from oper.base.arrays import Floats
from oper.base.portable_math import dot, log
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.plan.certificate import BoundNote
from oper.planner.bounds.lagrangian_bound import Bound, lower_bound, split_bound, usable_methods
from oper.planner.bounds.node_loads_bound import node_loads_bound
from oper.planner.lp.pricing import PricingItems, everywhere_seconds, pricing_items
from oper.planner.lp.restricted_master import MemoryItems
from oper.planner.problem.classes import Classes
from oper.topology.topology import Topology

HEAD_ROWS = 60  # kept whole, at most
HEAD_SHARE = 2e-3  # of the split bound: rows that take their owner less go to the tail
TAIL_RATIO = 1.5  # of densities in one bucket
NODES = 1000  # of branch and bound
ENTRIES = 100_000  # of the programme's matrix, nearly: up to here it takes about a second
GAP = 1e-4  # at which it may stop
FEASIBILITY = 1e-9  # of constraints and reduced costs that are scaled to 1
SAFETY = 1e-6  # of the solver's bound: above the sum of its tolerances


class _Solved(NamedTuple):
    """A bound, and whether the solver stopped before it could not be better."""

    seconds: float
    cut: bool


def hot_rows_bound(
    classes: Classes,
    topology: Topology,
    workload: Workload,
    capacity_bytes: Floats,
    budget_bytes: float,
    split: Bound | None = None,
) -> Bound:
    """Return a bound at least `lower_bound`'s, with the hottest rows whole; `hot_class` is the
    hottest class if that lifts it. Equal to `lower_bound`'s if copies in inference are allowed.
    `split` is `lower_bound`'s if it is known."""
    if split is None:
        split = lower_bound(classes, topology, workload, capacity_bytes, budget_bytes)
    if not workload.training and budget_bytes >= classes.m.min():
        return split
    least, hottest = np.inf, 0
    note: BoundNote | None = None  # parts of the deciding method left out or cut
    for method in usable_methods(workload, topology.ranks, budget_bytes):
        rows = pricing_items(classes, topology, workload, method)
        head = head_classes(rows, topology, split.seconds)
        if not len(head):
            return split
        if rows.latency >= least:
            continue
        seconds = split_bound(rows, topology, capacity_bytes, budget_bytes)
        if seconds >= least:  # with whole rows it takes no less
            continue
        if entries(rows, head, topology) > ENTRIES:
            by_nodes = None if rows.replicas and rows.training else node_loads_bound(rows, topology)
            seconds = max(seconds, by_nodes or 0.0)
            left_out: BoundNote | None = (
                BoundNote.HOT_ROWS_ALONE if by_nodes is None else BoundNote.HOT_ROWS_BY_NODES
            )
        else:
            items = MemoryItems(rows, topology, capacity_bytes, budget_bytes)
            solved = _Model([items], [head]).bound()
            seconds, left_out = solved.seconds, BoundNote.SEARCH_CUT if solved.cut else None
        if seconds < least:
            least, hottest, note = seconds, int(head[0]), left_out
        if least <= split.seconds * (1 + GAP):
            break
    # The solver may stop within GAP of the optimum: a smaller rise of the bound is not noted.
    if least <= split.seconds * (1 if note else 1 + GAP):
        return replace(split, note=note)
    return Bound(least, hottest, note)


def whole_rows_bound(memories: Sequence[MemoryItems], seconds: float) -> float:
    """Return a bound on the slowest rank's time for rows in several memories, with the AllReduce
    methods of the items and the hottest rows whole in each; `seconds` is about that. 0 if no row is
    hot, or the programme is too large."""
    heads = [head_classes(each.rows, each.topology, seconds) for each in memories]
    size = sum(entries(m.rows, h, m.topology) for m, h in zip(memories, heads, strict=True))
    if size > ENTRIES or not any(len(head) for head in heads):
        return 0.0
    return _Model(memories, heads).bound().seconds


def head_classes(rows: PricingItems, topology: Topology, seconds: float) -> NDArray[np.int64]:
    """Return the hottest classes whose single row takes its owner long, up to `HEAD_ROWS` rows."""
    owner_seconds = rows.traffic(topology).own_seconds
    order = np.argsort(-rows.weight_bytes, kind="stable")[:HEAD_ROWS]
    few = np.cumsum(rows.rows[order]) <= HEAD_ROWS
    return order[few & (owner_seconds[order] > HEAD_SHARE * seconds)]


def entries(rows: PricingItems, head: NDArray[np.int64], topology: Topology) -> int:
    """Return the size of the programme: its entries in the time limits, which are nearly all
    entries."""
    buckets = tail_buckets(rows, np.setdiff1d(np.arange(len(rows)), head))
    return topology.ranks**2 * (len(head) + len(np.unique(buckets)))


def tail_buckets(rows: PricingItems, tail: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the bucket of each class of the tail: by memory, then by density on a log scale."""
    step = np.zeros(len(tail))
    used = rows.density[tail] > 0
    step[used] = np.floor(log(rows.density[tail[used]]) / log(TAIL_RATIO))
    keys = np.stack([rows.memory_bytes[tail], used, step], axis=1)
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1].ravel(), dtype=np.int64)


class _Model:
    """The programme for one AllReduce method of each memory. Seconds and bytes are scaled to about
    1 a rank.

    Row r < M is rank r's time; then each memory has rows of its own. Column 0 is T.
    """

    def __init__(self, memories: Sequence[MemoryItems], heads: Sequence[NDArray[np.int64]]) -> None:
        M = memories[0].topology.ranks
        self.latency = sum(memory.rows.latency for memory in memories)
        work = (
            Charges.of(memory.topology).mean_seconds
            * float(dot(memory.rows.rows, memory.rows.weight_bytes))
            for memory in memories
        )
        self.second = sum(work) or 1.0
        # Ranks that are equal in every memory are numbered in the order in which they get rows.
        self.alike = all(m.topology.is_homogeneous(m.capacity_bytes) for m in memories)
        self.placed = 0  # rows of the heads so far
        self.upper, self.whole = [np.inf], [0]
        self.row: list[int] = []
        self.column: list[int] = []
        self.value: list[float] = []
        self.low, self.high = [-np.inf] * M, [0.0] * M
        for r in range(M):
            self.add(r, 0, -1.0)
        self.memories = [_Memory(self, *each) for each in zip(memories, heads, strict=True)]

    def bound(self) -> _Solved:
        """Return the solver's dual bound in seconds, with the AllReduce's latency."""
        import highspy  # a quarter of a second, which most certificates do without

        matrix = csr_array(
            (self.value, (self.row, self.column)), shape=(len(self.low), len(self.upper))
        )
        model = highspy.HighsLp()
        model.num_row_, model.num_col_ = matrix.shape
        model.col_cost_ = np.r_[1.0, np.zeros(len(self.upper) - 1)]
        model.col_lower_, model.col_upper_ = np.zeros(len(self.upper)), np.array(self.upper)
        model.row_lower_, model.row_upper_ = np.array(self.low), np.array(self.high)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = matrix.indptr
        model.a_matrix_.index_ = matrix.indices
        model.a_matrix_.value_ = matrix.data
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        model.integrality_ = [kinds[whole] for whole in self.whole]
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("mip_max_nodes", NODES)
        solver.setOptionValue("mip_rel_gap", GAP)
        for tolerance in ("primal", "dual", "mip"):
            solver.setOptionValue(f"{tolerance}_feasibility_tolerance", FEASIBILITY)
        solver.passModel(model)
        with standard_streams.native_output_dropped():
            solver.run()
        bound = solver.getInfo().mip_dual_bound
        status = solver.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return _Solved(np.inf, False)
        bound = max(bound, 0.0) if np.isfinite(bound) else 0.0
        seconds = bound * (1 - SAFETY) * self.second + self.latency
        return _Solved(seconds, status != highspy.HighsModelStatus.kOptimal)

    def new_column(self, upper: float, whole: bool = False) -> int:
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.upper) - 1

    def limit(self, low: float, high: float, terms: list[tuple[int, float]]) -> int:
        """Add a row that keeps the sum of the terms within [low, high]; return its number."""
        self.low.append(low)
        self.high.append(high)
        for column, value in terms:
            self.add(len(self.low) - 1, column, value)
        return len(self.low) - 1

    def add(self, row: int, column: int, value: float) -> None:
        self.row.append(row)
        self.column.append(column)
        self.value.append(float(value))


class _Memory:
    """The rows of one memory in a model: row `first` + j is rank j's memory, `first` + M the
    budget."""

    def __init__(self, model: _Model, items: MemoryItems, head: NDArray[np.int64]) -> None:
        self.model, self.rows, self.topology = model, items.rows, items.topology
        rows, topology, M = items.rows, items.topology, items.topology.ranks
        self.copied = rows.replicas and rows.training and M > 1
        self.byte = rows.total_bytes / M
        # Bytes of each part, and the time of the ranks [M] for a byte owned by rank j, in row j.
        self.owned = [
            (part.bytes, part.charges.owner_seconds / model.second)
            for part in rows.traffic(topology).parts
        ]
        self.everywhere = everywhere_seconds(rows, topology) / model.second
        for capacity in [*items.capacity_bytes, items.budget_bytes]:
            last = model.limit(-np.inf, capacity / self.byte, [])
        self.first = last - M
        for c in head.tolist():
            model.placed += int(rows.rows[c])
            self._place_whole(c, model.placed)
        tail = np.setdiff1d(np.arange(len(rows)), head)
        bucket = tail_buckets(rows, tail)
        for b in range(int(bucket.max()) + 1 if len(tail) else 0):
            self._place_bucket(tail[bucket == b])

    def _place_whole(self, c: int, placed: int) -> None:
        """Place the rows of head class c whole. They and hotter ones are `placed` rows: homogeneous
        ranks are numbered in the order in which they get rows, hottest first."""
        M, rows = self.topology.ranks, float(self.rows.rows[c])
        memory = self.rows.memory_bytes[c] / self.byte
        chosen = []
        for j in range(M):
            if self.model.alike and max(self._position(j)) >= placed:
                continue
            owned = self.model.new_column(rows, whole=True)
            chosen.append((owned, 1.0))
            for weight, seconds in self.owned:
                self._own(seconds[j], owned, weight[c])
            self.model.add(self.first + j, owned, memory)
        if self.copied:
            copied = self.model.new_column(rows, whole=True)
            chosen.append((copied, 1.0))
            self._copy(copied, self.everywhere[c], memory)
        self.model.limit(rows, rows, chosen)

    def _place_bucket(self, classes: NDArray[np.int64]) -> None:
        """Place the classes of one bucket of the tail: rows and weight by owner and everywhere."""
        M, rows = self.topology.ranks, self.rows.rows[classes]
        memory, parts = self.rows.memory_bytes[classes[0]], range(len(self.owned))
        weights = [weight[classes] for weight, _ in self.owned]
        totals = [float(dot(rows, weight)) for weight in weights]
        # Rows as their memory, weight as a part of the bucket's: columns of about equal size.
        size = memory / self.byte
        units = [total or 1.0 for total in totals]
        held: list[tuple[int, float]] = []
        moved: list[list[tuple[int, float]]] = [[] for _ in parts]
        for j in range(M + self.copied):
            n, of_part = (
                self.model.new_column(np.inf),
                [self.model.new_column(np.inf) for _ in parts],
            )
            held.append((n, 1.0))
            for p, w in enumerate(of_part):
                moved[p].append((w, 1.0))
                least, most = weights[p].min() / size / units[p], weights[p].max() / size / units[p]
                self.model.limit(-np.inf, 0.0, [(n, least), (w, -1.0)])
                self.model.limit(-np.inf, 0.0, [(w, 1.0), (n, -most)])
                if j < M:
                    self._own(self.owned[p][1][j], w, units[p])
            if j < M:
                self.model.add(self.first + j, n, 1.0)
                continue
            # A line in the rows and the weight of the first part, below the cost of each class.
            weight, cost = weights[0], self.everywhere[classes]
            spread = float(np.ptp(weight))
            slope = (cost[weight.argmax()] - cost[weight.argmin()]) / max(spread, 1e-300)
            slope = slope if spread > 0 else np.zeros(M)
            self._copy(n, (cost - weight[:, None] * slope).min(axis=0) / size, 1.0)
            for r in range(M):
                self.model.add(r, of_part[0], float(slope[r]) * units[0])
        self.model.limit(float(rows.sum()) * size, float(rows.sum()) * size, held)
        for p in parts:
            self.model.limit(totals[p] / units[p], totals[p] / units[p], moved[p])

    def _own(self, seconds: Floats, column: int, weight: float) -> None:
        """Add a unit of `column`, weight whose owner costs the ranks `seconds` [M] a byte, to the
        time limits."""
        for r in range(self.topology.ranks):
            self.model.add(r, column, float(seconds[r]) * weight)

    def _copy(self, column: int, seconds: Floats, memory: float) -> None:
        """Add a unit of `column`, rows on all ranks, to the time limits and the limits of
        memory."""
        M = self.topology.ranks
        for r in range(M):
            self.model.add(r, column, float(seconds[r]))
            self.model.add(self.first + r, column, memory)
        self.model.add(self.first + M, column, (M - 1) * memory)

    def _position(self, rank: int) -> tuple[int, int]:
        """Return the number of the rank's node, and of the rank's place there."""
        node_of = np.asarray(self.topology.node_of)
        nodes = np.unique(node_of[: rank + 1])
        return len(nodes) - 1, int((node_of[:rank] == node_of[rank]).sum())
