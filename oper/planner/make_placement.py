"""From a profile to a placement of every row: classes, rows, certificate, or a better baseline.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Planned`. The steps are those of the
paper's §4 (partition, place with backtracking, replicate), then swaps of rows, then the lower bound
that certifies the result. If the certificate leaves room for a better baseline, all quick baselines
that keep the capacities are priced, and the best one, its rows swapped too, is taken if it wins;
the plan says which step produced it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.objective import Cost
from oper.cost.workload import Workload
from oper.plan.certificate import Certificate
from oper.plan.memories import GreedyBalance, PlanningRecord, ThresholdReason
from oper.plan.settings import Limits, PlanSettings
from oper.planner.baselines.baseline import Baseline, price_baseline
from oper.planner.baselines.registry import quick_baselines
from oper.planner.bounds.certify import certify
from oper.planner.class_placement.class_placement import MANY_RANKS, ClassPlacement
from oper.planner.class_placement.partitions import partitions
from oper.planner.class_placement.place_classes import by_programme, place_classes
from oper.planner.exact_placement import place_exactly
from oper.planner.problem.problem import ClassProblem, Problem, make_problem
from oper.planner.row_placement.row_placement import RowPlacement, place_rows
from oper.profiling.profile import Profile
from oper.topology.capacity import CapacityError
from oper.topology.topology import Topology

# With a certified gap below this, no baseline can be better by more, and none is priced.
BASELINES_FROM_GAP = 1e-8

# With a certified gap above the first, more rows are listed, so that swaps have more to choose
# from: that share of all rows. One in eight is half a byte a row in the address map. All of them,
# four to eight bytes a row, are the last resort, for ranks with a hot row that should otherwise
# hold the coldest.
LARGER_RESERVES = ((2e-5, 1 / 32), (2e-5, 1 / 8), (1e-3, 1.0))
# On many ranks each takes seconds: on 1,024 in training gaps are 0.086 % without more listed rows,
# 0.070 % with one in 32 and 0.038 % with one in eight (Kaggle sizes, benchmarks/README.md). From
# 0.0028 and 0.0137 % on, on 128x8-h100, one in eight gained nothing for a third of the time.
MANY_RANKS_RESERVES = ((2e-4, 1 / 8), LARGER_RESERVES[-1])
# Reserves if a programme places the rows: one in eight is listed from the start, and hot rows
# are kept whole.
WHOLE_ROWS = ((5e-4, 1 / 8), (1e-3, 1.0))
# Relative, of the extra memory: sums of bytes over millions of rows are rounded.
BUDGET_TOLERANCE = 1e-9
# With a certified gap above this, a small problem is solved as an integer programme.
EXACT_FROM_GAP = 1e-3


class InfeasibleError(OperError):
    """No placement was found that keeps the capacities and the extra memory."""


class OverCapacityError(InfeasibleError, CapacityError):
    """No placement was found that keeps the capacities."""


@dataclass(frozen=True)
class Planned:
    """A placement of every row with its cost and its certificate, in memory.

    seconds: time spent on each step of planning, by its name. unpooled_step_seconds: predicted step
    of the best placement without pooled tables; None if pooled tables were no choice.
    """

    problem: Problem
    class_placement: ClassPlacement
    row_placement: RowPlacement
    certificate: Certificate
    seconds: dict[str, float] = field(default_factory=dict)
    unpooled_step_seconds: float | None = None

    @property
    def cost(self) -> Cost:
        return self.row_placement.cost

    @property
    def step(self) -> str:
        """Name of the planning step that placed the rows."""
        return self.class_placement.step

    @property
    def record(self) -> PlanningRecord:
        """Steps that made the placement, and their results."""
        greedy = self.class_placement.greedy
        return PlanningRecord(
            threshold=self.class_placement.partitions.threshold,
            step=self.step,
            threshold_reason=(
                greedy.reason if greedy else ThresholdReason.NOT_PLACED_BY_PARTITIONS
            ),
            greedy_dob=GreedyBalance(greedy.dob_memory, greedy.dob_lookups) if greedy else None,
            dob_before_swaps=self.row_placement.cost_before_swaps.dob,
            swaps=self.row_placement.swaps,
        )


class _Placement(NamedTuple):
    classes: ClassPlacement
    rows: RowPlacement

    @property
    def seconds(self) -> float:
        """Objective in seconds; infinite if a capacity is exceeded."""
        cost = self.rows.cost
        return cost.objective_seconds if cost.feasible else np.inf


def make_placement(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None] = lambda step: None,
    limits: Limits | None = None,
    by_table: bool = False,
) -> Planned:
    """Plan for all rows of `profile`, within `limits` or the settings; `report` is called with the
    name of each step as it begins. `by_table` as for `make_problem`.

    Raises CapacityError if the capacities cannot hold the tables, InfeasibleError if no placement
    was found that keeps all limits.
    """
    watch = Watch(report)
    with watch("classes"):
        problem = make_problem(profile, topology, workload, asked, limits, by_table=by_table)
    return place(problem, watch)


def place(problem: Problem, watch: "Watch") -> Planned:
    """Plan for all rows of a problem, within its limits."""
    with watch("draft"):
        class_placement = place_classes(problem)
    with watch("rows"):
        placement = _Placement(class_placement, place_rows(problem, class_placement))
    with watch("bound"):
        certificate = certify(problem, placement.rows.cost.objective_seconds)
    for gap, share in _reserves(problem):
        good_enough = certificate.is_within(gap) or problem.asked.balance == "link"
        if good_enough and placement.rows.cost.feasible:
            break
        with watch("rows"):
            wider = class_placement
            if by_programme(problem):
                wider = place_classes(problem, share, whole=True)
            again = _Placement(wider, place_rows(problem, wider, share))
        if again.seconds < placement.seconds:
            placement = again
            certificate = certificate.of(again.seconds)
    feasible = placement.rows.cost.feasible
    uncertain = not (certificate.is_within(BASELINES_FROM_GAP) and feasible)
    if uncertain and problem.asked.balance == "time":
        with watch("baselines"):
            placement = better_baseline(problem, placement.seconds) or placement
        certificate = certificate.of(placement.rows.cost.objective_seconds)
        if not (certificate.is_within(EXACT_FROM_GAP) and placement.rows.cost.feasible):
            with watch("integer programme"):
                placement, certificate = _exact(problem, placement, certificate)
    check_limits(problem, placement.rows.cost)
    return Planned(problem, placement.classes, placement.rows, certificate, watch.seconds)


def _reserves(problem: ClassProblem) -> tuple[tuple[float, float], ...]:
    """Return the gaps above which more rows are listed, and shares of all rows."""
    if by_programme(problem):
        return WHOLE_ROWS
    return MANY_RANKS_RESERVES if problem.ranks > MANY_RANKS else LARGER_RESERVES


def _exact(
    problem: Problem, placement: _Placement, certificate: Certificate
) -> tuple[_Placement, Certificate]:
    """Return the placement of the integer programme if the problem is small enough and it is
    better; the certificate is by the better of both bounds."""
    exact = place_exactly([problem], placement.seconds, placement.rows.cost.objective_seconds)
    if exact is None:
        return placement, certificate
    if exact.placements is not None:
        placed = _Placement(exact.placements[0], place_rows(problem, exact.placements[0]))
        if placed.seconds < placement.seconds:
            placement = placed
    certificate = certificate.at_least(exact.bound_seconds)
    return placement, certificate.of(placement.rows.cost.objective_seconds)


def within_limits(problem: ClassProblem, cost: Cost) -> bool:
    """Return True if a placement keeps the capacities and the extra memory, for which bounds
    hold."""
    return cost.feasible and cost.extra_bytes <= _most_extra_bytes(problem, cost)


def check_limits(problem: ClassProblem, cost: Cost) -> None:
    """Raise InfeasibleError if a placement exceeds a capacity or the extra memory."""
    if within_limits(problem, cost):
        return
    if cost.feasible:
        raise InfeasibleError(
            f"extra memory: the best placement found has {cost.extra_bytes:,.0f} bytes of extra "
            f"copies, and {problem.budget_bytes:,.0f} are allowed; give more "
            f"{option('--extra-memory')}"
        )
    over = cost.memory_bytes - problem.capacity_bytes
    rank = int(over.argmax())
    raise OverCapacityError(
        f"in the best placement found, rank {rank} would hold "
        f"{cost.memory_bytes[rank]:,.0f} bytes and may hold {problem.capacity_bytes[rank]:,.0f}, "
        f"{over[rank]:,.0f} too few ({int((over > 0).sum())} of {problem.ranks} ranks exceed "
        "theirs); raise the capacity by a row of each width, or give less extra memory"
    )


def _most_extra_bytes(problem: ClassProblem, cost: Cost) -> float:
    return problem.budget_bytes + BUDGET_TOLERANCE * cost.total_bytes


def better_baseline(problem: Problem, limit_seconds: float) -> _Placement | None:
    """Return the best quick baseline, its rows swapped, that keeps the capacities and whose
    objective is below `limit_seconds`; None without one."""
    best = None
    for baseline in quick_baselines(problem):
        cost = price_baseline(problem, baseline)
        if not within_limits(problem, cost) or cost.objective_seconds >= limit_seconds:
            continue
        placement = _class_placement(problem, baseline, cost)
        if placement is None:
            continue
        candidate = _Placement(placement, place_rows(problem, placement))
        if candidate.seconds < limit_seconds:
            best, limit_seconds = candidate, candidate.seconds
    return best


def _class_placement(problem: Problem, baseline: Baseline, cost: Cost) -> ClassPlacement | None:
    """Return a baseline as a class placement, all of its rows listed; None if it splits rows."""
    if baseline.cells is None:
        return None
    classes = problem.classes
    return ClassPlacement(
        step=baseline.name,
        holder_sets=baseline.holder_sets,
        counts=baseline.cells.dense(len(classes), len(baseline.holder_sets)),
        striped=np.zeros(len(classes), dtype=np.int64),
        shares=cost.memory_bytes / cost.memory_bytes.sum(),
        partitions=partitions(classes, problem.asked.threshold),
    )


class Watch:
    """Seconds spent in each named step."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self._report = report
        self._step, self._since = "", 0.0

    def __call__(self, step: str) -> "Watch":
        self._step = step
        return self

    def __enter__(self) -> None:
        self._report(self._step)
        self._since = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds.setdefault(self._step, 0.0)
        self.seconds[self._step] += time.perf_counter() - self._since
