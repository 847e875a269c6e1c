"""The integer head: a lower bound that knows that the hottest rows cannot be split.

The Lagrangian of `bound.py` lets every row be held in parts. Where single rows are a sizeable part
of a rank's time, the rows of the hottest classes (the head) are kept whole here, in a mixed
integer programme; all others (the tail) enter by what they take on each rank: t_r seconds, u_j
bytes and e bytes of extra copies, of which any prices λ, μ, ν ≥ 0 tell

    Σ λ_r t_r + Σ μ_j u_j + ν e ≥ Σ_{c in tail} rows_c · (least price of a row of class c)

so the tail is there exactly class by class, without a variable for any. Cuts come in turn (Benders'
decomposition): the programme places the head, the tail is priced around it, its prices are the
next cut. Each programme's own dual bound is a bound on every plan, whenever one stops.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from oper.cost import Floats, Method, Workload
from oper.planner import programme
from oper.planner.bound import SAFETY, Bound, good_prices, lagrangian, usable_methods
from oper.planner.classes import Classes
from oper.planner.patterns import Demand, Prices, cheapest, demand, everywhere_seconds, looks_alike
from oper.topology import Topology

HEAD_ROWS = 60  # kept whole, at most
HEAD_SHARE = 1e-3  # of the bound: rows that take less of a rank's time are left to the tail
CUTS = 20  # rounds of them
NODES = 500  # of branch and bound in each round: a limit on work that is the same in every run
TOLERANCE = 1e-4  # of the bound, to which a round's programme and the rounds are taken


def integer_head(
    classes: Classes,
    topology: Topology,
    workload: Workload,
    capacity_bytes: Floats,
    budget_bytes: float,
) -> Bound:
    """A bound as `lower_bound`'s, with the hottest rows whole. `hot_class` is the class of the
    hottest row with one owner, where that is what lifts the bound above the Lagrangian."""
    options: list[tuple[float, Method]] = []
    for method in usable_methods(workload, topology.ranks, budget_bytes):
        rows = demand(classes, topology, workload, method)
        prices = good_prices(rows, topology, capacity_bytes, budget_bytes)
        bound = lagrangian(rows, topology, prices, capacity_bytes, budget_bytes)
        options.append((bound + rows.latency_seconds, method))
    least = Bound(np.inf, None)
    # The least over methods: one whose split bound is above another's whole one is not needed.
    for split, method in sorted(options):
        if split >= least.seconds:
            break
        rows = demand(classes, topology, workload, method)
        head = _Head(rows, topology, capacity_bytes, budget_bytes, split - rows.latency_seconds)
        least = min(least, head.bound(), key=lambda bound: bound.seconds)
    return least


def head_classes(rows: Demand, topology: Topology, seconds: float) -> NDArray[np.int64]:
    """The hottest classes, up to `HEAD_ROWS` rows, of which a row takes its owner long."""
    owner_seconds = rows.weight_bytes * topology.ranks * float(np.diag(topology.link_cost).min())
    order = np.argsort(-rows.weight_bytes, kind="stable")[:HEAD_ROWS]
    few = np.cumsum(rows.rows[order]) <= HEAD_ROWS
    return order[few & (owner_seconds[order] > HEAD_SHARE * seconds)]


class _Head:
    """The programme for one AllReduce method: columns T, t [M], u [M], e, then the head's.

    Seconds and bytes are scaled to about 1 a rank.
    """

    def __init__(
        self,
        rows: Demand,
        topology: Topology,
        capacity_bytes: Floats,
        budget_bytes: float,
        split_seconds: float,
    ) -> None:
        M = topology.ranks
        self.topology, self.rows = topology, rows
        self.capacity, self.budget = np.asarray(capacity_bytes, dtype=np.float64), budget_bytes
        self.split_seconds = split_seconds
        self.classes = head_classes(rows, topology, split_seconds)
        self.head = rows.take(self.classes)
        self.tail = rows.take(np.setdiff1d(np.arange(len(rows)), self.classes))
        self.second, self.byte = split_seconds or 1.0, rows.total_bytes / M
        self.first = 2 * M + 2  # column of the head
        self.owned: list[list[int]] = []  # columns of class h with one owner, by rank
        self.upper: list[float] = [np.inf] * self.first
        self.whole: list[int] = [0] * self.first
        self.entries: list[tuple[int, int, float]] = []  # row, column, coefficient
        self.low: list[float] = []
        self.high: list[float] = []
        self._limits()
        for h in range(len(self.head)):
            self._place(h)

    def bound(self) -> Bound:
        """Rounds of cuts until the tail fits around the head, or `CUTS` of them."""
        latency = self.rows.latency_seconds
        if not len(self.classes):
            return Bound(self.split_seconds + latency, None)
        best, hot = self.split_seconds, None
        M = self.topology.ranks
        self._cut(Prices(np.zeros(M), np.ones(M), 0.0))
        self._cut(good_prices(self.rows, self.topology, self.capacity, self.budget))
        for _ in range(CUTS):
            result = milp(
                np.r_[1.0, np.zeros(len(self.upper) - 1)],
                integrality=self.whole,
                bounds=Bounds(0, self.upper),
                constraints=LinearConstraint(self._matrix(), self.low, self.high),
                options={"node_limit": NODES, "mip_rel_gap": TOLERANCE},
            )
            if result.mip_dual_bound is not None:
                best = max(best, float(result.mip_dual_bound) * self.second * (1 - 1e-6))
            if result.x is None:
                break
            if best > self.split_seconds * (1 + TOLERANCE):
                held = [h for h, o in enumerate(self.owned) if result.x[o].max() > 0.5]
                hot = int(self.classes[held[0]]) if held else None
            prices = self._prices_around(result.x)
            if not self._cut(prices, result.x):
                break
        return Bound(best + latency, hot)

    def _limits(self) -> None:
        """Rows 0 to 2M: each rank's time, each rank's memory, the budget."""
        M = self.topology.ranks
        for r in range(M):
            self._row(-np.inf, 0.0, [(0, -1.0), (1 + r, 1.0)])
        for r in range(M):
            self._row(-np.inf, self.capacity[r] / self.byte, [(1 + M + r, 1.0)])
        self._row(-np.inf, self.budget / self.byte, [(2 * M + 1, 1.0)])

    def _place(self, h: int) -> None:
        """Columns and rows of head class h: its rows by owner, by reader and source where the
        budget lets inference copy them, and everywhere where it lets training do so."""
        M, head = self.topology.ranks, self.head
        link, local = self.topology.link_cost, np.diag(self.topology.link_cost)
        rows, memory = float(head.rows[h]), float(head.memory_bytes[h]) / self.byte
        weight = float(head.weight_bytes[h]) / self.second
        copied = head.replicas and M > 1 and memory * self.byte <= self.budget
        if copied and head.any_holders:
            y = [[self._column(rows, whole=i == j) for j in range(M)] for i in range(M)]
            for i in range(M):
                self._row(rows, rows, [(column, 1.0) for column in y[i]])
                for j in range(M):
                    self._add(j, y[i][j], weight * local[j])
                    if i != j:
                        self._add(i, y[i][j], weight * link[i, j])
                        self._row(-np.inf, 0.0, [(y[i][j], 1.0), (y[j][j], -1.0)])
                self._add(M + i, y[i][i], memory)
                self._add(2 * M, y[i][i], memory)
            self.high[2 * M] += memory * rows  # of which one copy is not extra
            self.owned.append([y[i][i] for i in range(M)])
            return
        owner = [self._column(rows, whole=True) for _ in range(M)]
        self.owned.append(owner)
        for j in range(M):
            self._add(j, owner[j], weight * M * local[j])
            self._add(M + j, owner[j], memory)
            for i in range(M):
                if i != j:
                    self._add(i, owner[j], weight * link[i, j])
        choices = list(owner)
        if copied and (M - 1) * memory * self.byte <= self.budget:
            everywhere = self._column(rows, whole=True)
            seconds = everywhere_seconds(head, self.topology)[h] / self.second
            for i in range(M):
                self._add(i, everywhere, float(seconds[i]))
                self._add(M + i, everywhere, memory)
            self._add(2 * M, everywhere, (M - 1) * memory)
            choices.append(everywhere)
        self._row(rows, rows, [(column, 1.0) for column in choices])

    def _cut(self, prices: Prices, placed: Floats | None = None) -> bool:
        """Add what the tail costs at `prices`; whether the programme's solution `placed` had put
        it below that. Alike ranks get the cut under each renaming that turns them round."""
        M = self.topology.ranks
        least = float(self.tail.rows @ cheapest(self.tail, self.topology, prices)) * (1 - SAFETY)
        scale = least or 1.0
        terms = np.r_[prices.rank * self.second, prices.capacity * self.byte] / scale
        extra = prices.budget * self.byte / scale
        turns = _turns(self.topology) if looks_alike(self.topology, self.capacity) else [range(M)]
        for turn in turns:
            order = np.array(turn)
            turned = np.r_[terms[:M][order], terms[M:][order], extra]
            self._row(least / scale, np.inf, [(1 + n, float(v)) for n, v in enumerate(turned) if v])
        if placed is None:
            return True
        return float(np.r_[terms, extra] @ placed[1 : self.first]) < least / scale - TOLERANCE

    def _prices_around(self, placed: Floats) -> Prices:
        """Prices of the tail where the head is as in `placed`."""
        M = self.topology.ranks
        used = self._matrix()[: 2 * M + 1, self.first :] @ placed[self.first :]
        left = np.maximum(np.array(self.high[M : 2 * M + 1]) - used[M:], 0.0) * self.byte
        # Room for rounding: prices may come from any limits.
        around = left[:M] * (1 + TOLERANCE) + TOLERANCE * self.byte
        return programme.solve_demand(
            self.tail, self.topology, around, float(left[M]), fixed_seconds=used[:M] * self.second
        ).prices

    def _column(self, upper: float, whole: bool) -> int:
        self.upper.append(upper)
        self.whole.append(int(whole))
        return len(self.upper) - 1

    def _row(self, low: float, high: float, terms: list[tuple[int, float]]) -> None:
        self.low.append(low)
        self.high.append(high)
        for column, value in terms:
            self._add(len(self.low) - 1, column, value)

    def _add(self, row: int, column: int, value: float) -> None:
        self.entries.append((row, column, value))

    def _matrix(self) -> csr_array:
        row, column, value = zip(*self.entries, strict=True)
        return csr_array((value, (row, column)), shape=(len(self.low), len(self.upper)))


def _turns(topology: Topology) -> list[list[int]]:
    """Renamings of alike ranks: for each shift of the nodes and of the ranks in every node, the
    rank that each one becomes."""
    node_of = np.asarray(topology.node_of)
    members = [np.flatnonzero(node_of == node) for node in np.unique(node_of)]
    turns = []
    for a in range(len(members)):
        for b in range(len(members[0])):
            becomes = np.zeros(topology.ranks, dtype=np.int64)
            for n, ranks in enumerate(members):
                becomes[ranks] = np.roll(members[(n + a) % len(members)], b)
            turns.append(becomes.tolist())
    return turns
