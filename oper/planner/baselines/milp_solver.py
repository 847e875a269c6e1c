"""The exact reference: the placement of whole partitions as a mixed integer programme.

In: sums of partitions and the limits. Out: `Reference`, the best placement and a bound.

For partitions p of any size, down to single rows, with read weight w_p and memory m_p:

    y[p, i, j] = 1: rank i reads p from rank j;  Σ_j y[p, i, j] = 1,  y[p, i, j] ≤ x[p, j]
    Σ_p m_p x[p, j] ≤ capacity_j,   Σ_p m_p (Σ_j x[p, j] - 1) ≤ budget
    T ≥ Σ_p w_p (Σ_{j≠i} L[i][j] y[p, i, j] + L[i][i] Σ_k y[p, k, i])       for each rank i
                 (the last sum without ranks k that share memory with i, but for i itself)
    minimise T

With relays (oper/topology/relays.py) the ranks of a node read in it if it has a copy, and else from
one rank, and the terms of y are those of `Charges`.

x[p, j] is "rank j holds p", and y[p, j, j] is the same variable if no other rank's copy is cheaper
to read for j. If the budget allows no second copy, and in training, all ranks read from one owner,
and there are no y. In training Σ_j x[p, j] + r[p] = 1 with r[p] = 1 for copies everywhere, whose
AllReduce is chosen by solving for each method in turn. Homogeneous ranks are ordered by load, or
each optimum would come in M! copies. PuLP passes it to HiGHS. Plans never depend on it.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pulp

from oper.base import standard_streams
from oper.base.arrays import Floats
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.objective import Cost, evaluate
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.planner.bounds.lagrangian_bound import usable_methods
from oper.planner.lp.pricing import (
    PricingItems,
    everywhere_seconds,
    pricing_items_of,
)
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

Status = Literal["optimal", "time_limit", "infeasible"]
RELATIVE_GAP = 1e-4  # at which an optimum counts as found: HiGHS's own default
_BUILDING = 0.5  # of the time: PuLP takes as long again to hand a programme to the solver
FEASIBILITY = 1e-9  # of constraints, scaled to 1 a rank: less than a byte in a gigabyte


@dataclass(frozen=True)
class Reference:
    """The best placement found. `holder_sets` has one a partition; None, as is its cost, without a
    placement. `bound_seconds` is the solver's: no placement of these partitions is below it, and
    with status "optimal" none is more than the asked gap below `objective_seconds`."""

    status: Status
    holder_sets: HolderSets | None
    cost: Cost | None
    bound_seconds: float
    seconds: float  # that solving took

    @property
    def objective_seconds(self) -> float:
        return self.cost.objective_seconds if self.cost else np.inf

    @property
    def gap(self) -> float:
        """(objective - bound) / objective."""
        objective = self.objective_seconds
        if objective == 0:
            return 0.0
        return max(1 - self.bound_seconds / objective, 0.0) if self.cost else np.inf


def solve(
    sums: Sums,
    topology: Topology,
    workload: Workload,
    capacity_bytes: Floats,
    budget_bytes: float,
    time_limit_seconds: float,
    relative_gap: float = RELATIVE_GAP,
) -> Reference:
    """Place the partitions whose `sums` [P] are given within `capacity_bytes` [M] and
    `budget_bytes` of extra copies, so that the largest rank time is least.

    Building the programmes is a part of the time: if one takes too much of it, nothing is found,
    and the bound is 0.
    """
    began = time.monotonic()
    capacity = np.asarray(capacity_bytes, dtype=np.float64)
    ones = np.ones(len(sums.rows))
    methods = usable_methods(workload, topology.ranks, budget_bytes)
    methods = methods[1:] or methods  # with replicas allowed, "none" is a case of every other
    outcomes = []
    for n, method in enumerate(methods):
        rows = pricing_items_of(sums, ones, topology, workload, method)
        now = time.monotonic()
        share = (began + time_limit_seconds - now) / (len(methods) - n)
        try:
            model = _Model(rows, topology, capacity, budget_bytes, now + share * _BUILDING)
        except _LateError:
            outcomes.append(_Outcome("time_limit", None, 0.0))
        else:
            outcomes.append(model.solve(now + share, relative_gap))
    status: Status = "optimal"
    if any(outcome.status == "infeasible" for outcome in outcomes):
        status = "infeasible"
    elif any(outcome.status == "time_limit" for outcome in outcomes):
        status = "time_limit"
    candidates = [outcome.holder_sets for outcome in outcomes if outcome.holder_sets is not None]
    costs = [evaluate(topology, workload, sets, sums, capacity) for sets in candidates]
    best = min(range(len(candidates)), key=lambda n: costs[n].objective_seconds, default=None)
    return Reference(
        status=status,
        holder_sets=None if best is None else candidates[best],
        cost=None if best is None else costs[best],
        # A solver's bound may exceed the cost of its own placement by a little, by its tolerance.
        bound_seconds=min(
            *(outcome.bound_seconds for outcome in outcomes),
            *(cost.objective_seconds for cost in costs),
            np.inf,
        ),
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True)
class _Outcome:
    status: Status
    holder_sets: HolderSets | None
    bound_seconds: float


class _LateError(Exception):
    """A programme was not built in time."""


class _Model:
    """The programme for one AllReduce method. Seconds and bytes are scaled to about 1 a rank.

    Raises _LateError if it is not built by the time `built_by` (of `time.monotonic`).
    """

    def __init__(
        self,
        rows: PricingItems,
        topology: Topology,
        capacity_bytes: Floats,
        budget_bytes: float,
        built_by: float,
    ) -> None:
        self.rows, self.topology, self._built_by = rows, topology, built_by
        M, P = topology.ranks, range(len(rows))
        charges = Charges.of(topology)
        self.second = charges.mean_seconds * float(rows.weight_bytes.sum()) or 1.0
        byte = rows.total_bytes / M
        weight, memory = rows.weight_bytes / self.second, rows.memory_bytes / byte
        node_weight = rows.node_bytes / self.second
        traffic = rows.traffic(topology)
        owned = [traffic.owner_seconds(p) / self.second for p in self._in_time(P)]
        spare = budget_bytes if rows.replicas else 0.0
        price = rows.memory_bytes * (1 if rows.any_holders else M - 1)
        self.copied = np.flatnonzero(price <= spare).tolist() if M > 1 else []

        self.problem = pulp.LpProblem("placement", pulp.LpMinimize)
        largest = self.problem.add_variable("T", lowBound=0)
        self.problem += largest
        self.holds = [[self._binary(f"x_{p}_{j}") for j in range(M)] for p in self._in_time(P)]
        self.reads: dict[int, list[list[Any]]] = {}  # inference: y[p][i][j] of the copied
        self.everywhere: dict[int, Any] = {}  # training: r[p]
        for p in self._in_time(self.copied):
            if rows.any_holders:
                self._add_reads(p)
            else:
                self.everywhere[p] = self._binary(f"r_{p}")
        for p in P:
            if p not in self.reads:
                shared = [self.everywhere[p]] if p in self.everywhere else []
                self.problem += pulp.lpSum(self.holds[p] + shared) == 1

        on_all = everywhere_seconds(rows, topology) / self.second
        any_copy = self._binary("any_copy") if self.everywhere else 0
        for copied in self.everywhere.values():
            self.problem += copied <= any_copy
        load = []
        payer, seconds = charges.payer[charges.resource], charges.seconds[charges.resource]
        for i in range(M):
            served, fetched, held = [], [], []
            paid = np.flatnonzero(payer == i)
            for p in self._in_time(P):
                x = self.holds[p]
                y = self.reads.get(p)
                held.append(memory[p] * x[i])
                if y is None:
                    owner = owned[p][:, i]
                    served.append(owner[i] * x[i])
                    fetched += [owner[j] * x[j] for j in range(M) if j != i]
                else:
                    for n in paid.tolist():
                        reader, source = charges.reader[n], charges.source[n]
                        term = weight[p] * seconds[n] * y[reader][source]
                        (served if source == i else fetched).append(term)
                    for of, of_node in zip(charges.of_nodes, node_weight.T, strict=True):
                        fetched += self._by_relay(of, of_node[p], i, y)
                if p in self.everywhere:
                    served.append(on_all[p, i] * self.everywhere[p])
                    held.append(memory[p] * self.everywhere[p])
            load.append(pulp.lpSum(served))
            latency = rows.latency / self.second * any_copy
            self.problem += load[i] + pulp.lpSum(fetched) + latency <= largest
            self.problem += pulp.lpSum(held) <= capacity_bytes[i] / byte
        if self.copied:
            extra = [memory[p] * x for p in self.reads for x in self.holds[p]]
            extra += [(M - 1) * memory[p] * r for p, r in self.everywhere.items()]
            once = sum(memory[p] for p in self.reads)
            self.problem += pulp.lpSum(extra) <= budget_bytes / byte + once
        if topology.is_homogeneous(capacity_bytes):
            self._order(load)

    @staticmethod
    def _by_relay(of: Charges, weight: float, rank: int, y: list[list[Any]]) -> list[Any]:
        """Return the terms that a rank pays for reads of a node's `weight`, each of which is one
        read of a relay."""
        entries = np.flatnonzero(of.payer[of.resource] == rank)
        seconds = of.seconds[of.resource[entries]]
        pairs = zip(of.reader[entries].tolist(), of.source[entries].tolist(), strict=True)
        return [weight * s * y[i][j] for s, (i, j) in zip(seconds.tolist(), pairs, strict=True)]

    def _add_reads(self, p: int) -> None:
        """Add y[p]: each rank reads from one holder."""
        M, x = self.topology.ranks, self.holds[p]
        # Ranks that read their own copy wherever they have one.
        reads_own = [not others.any() for others in Charges.of(self.topology).cheaper_than_own]
        y = [
            [x[i] if i == j and reads_own[i] else self._binary(f"y_{p}_{i}_{j}") for j in range(M)]
            for i in range(M)
        ]
        for i in range(M):
            self.problem += pulp.lpSum(y[i]) == 1
            for j in range(M):
                if y[i][j] is not x[j]:
                    self.problem += y[i][j] <= x[j]
        if isinstance(self.topology, RelayedTopology):
            self._read_as_one(x, y)
        self.reads[p] = y

    def _read_as_one(self, x: list[Any], y: list[list[Any]]) -> None:
        """Let the ranks of a node, with relays, read inside it if it has a copy, and else all from
        one rank."""
        node_of = np.asarray(self.topology.node_of)
        for i, node in enumerate(node_of):
            members = np.flatnonzero(node_of == node).tolist()
            inside = pulp.lpSum(y[i][k] for k in members)
            for j in range(len(x)):
                if j in members:
                    self.problem += inside >= x[j]
                elif i != members[0]:
                    self.problem += y[i][j] == y[members[0]][j]

    def _in_time(self, items: Iterable[int]) -> Iterator[int]:
        """Yield the items, as long as there is time to build."""
        for item in items:
            if time.monotonic() > self._built_by:
                raise _LateError
            yield item

    def _binary(self, name: str) -> Any:
        return self.problem.add_variable(name, cat=pulp.LpBinary)

    def _order(self, load: list[Any]) -> None:
        """Order homogeneous ranks by descending load inside each node, and nodes by the load of
        theirs."""
        node_of = np.asarray(self.topology.node_of)
        nodes = [np.flatnonzero(node_of == node).tolist() for node in np.unique(node_of)]
        # With relays a rank's place in its node counts too: only that of all nodes can be changed.
        free = nodes[:1] if isinstance(self.topology, RelayedTopology) else nodes
        for members in free:
            for first, second in pairwise(self._in_time(members)):
                self.problem += load[first] >= load[second]
        sums = [pulp.lpSum(load[r] for r in members) for members in nodes]
        for before, after in pairwise(sums):
            self.problem += before >= after

    def solve(self, solved_by: float, relative_gap: float) -> _Outcome:
        highs = _Highs(
            solved_by,
            msg=False,
            gapRel=relative_gap,
            gapAbs=0.0,
            mip_feasibility_tolerance=FEASIBILITY,
            primal_feasibility_tolerance=FEASIBILITY,
        )
        with standard_streams.native_output_dropped():
            self.problem.solve(highs)
        # PuLP calls a solution found at the time limit "Optimal": ask the solver itself.
        info = self.problem.solverModel.getInfo()
        bound = float(info.mip_dual_bound)
        optimal = self.problem.sol_status == pulp.LpSolutionOptimal
        if self.problem.status in (pulp.LpStatusInfeasible, pulp.LpStatusUnbounded):
            return _Outcome("infeasible", None, np.inf)
        is_feasible = info.primal_solution_status == 2  # kSolutionStatusFeasible
        sets = self._holder_sets() if is_feasible else None
        status: Status = "optimal" if optimal else "time_limit"
        return _Outcome(status, sets, max(bound, 0.0) * self.second)

    def _holder_sets(self) -> HolderSets:
        """Return the group of each partition, read off the solution."""
        M, P = self.topology.ranks, len(self.rows)
        holds = np.array([[_value(x) for x in row] for row in self.holds]).reshape(P, M) > 0.5
        source = np.repeat(holds.argmax(axis=1)[:, None], M, axis=1)
        for p, y in self.reads.items():
            source[p] = np.array([[_value(v) for v in row] for row in y]).argmax(axis=1)
        for p, r in self.everywhere.items():
            if _value(r) > 0.5:
                holds[p], source[p] = True, np.arange(M)
        return HolderSets(source.astype(np.uint16), holds)


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS with a time by which it ends, because handing it a large programme takes a while
    too."""

    def __init__(self, solved_by: float, **options: Any) -> None:
        super().__init__(**options)
        self._solved_by = solved_by

    def callSolver(self, lp: Any) -> None:  # noqa: N802 - PuLP calls it
        lp.solverModel.setOptionValue("time_limit", _left(self._solved_by))
        super().callSolver(lp)


def _left(end: float) -> float:
    """Return the seconds until a time; 0.01 if it is over, because solvers take 0 for no limit."""
    return max(end - time.monotonic(), 0.01)


def _value(variable: Any) -> float:
    return float(variable.varValue or 0.0)
