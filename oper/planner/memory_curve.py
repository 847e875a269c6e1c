"""Predicted step over memory: a placement for each of some shares of extra memory.

In: `Planned`. Out: `MemoryCurve`, by memory. The shares go from none to all that the devices hold,
or, if that does not decide, to a copy of each row on each rank; they end at the share from which
more memory is not used. The placement that was made is one of them. Those of pooled tables are made
as it was (place_pooled.py). Placements minimise the transfer time, and more copies can lengthen the
step: a placement with a longer step than one in less memory gives way to the latter, which fits as
well. So the step never rises with memory.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, NamedTuple

from oper.plan.certificate import gap_above
from oper.planner.device_limits import DeviceLimits
from oper.planner.make_placement import InfeasibleError, Planned, Watch
from oper.planner.place_pooled import predicted_seconds
from oper.planner.place_together import place_alone
from oper.planner.problem.problem import Problem, round_down, with_limits
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import RelayedTopology, relayed
from oper.topology.topology import Topology

_SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5)  # then doubled from 1 on


@dataclass(frozen=True)
class CurvePoint:
    """A plan with this share of extra memory, and its figures."""

    extra_memory: float
    extra_memory_ratio: float  # used
    memory_bytes: int  # of the fullest rank
    step_seconds: float
    objective_seconds: float
    lower_bound_seconds: float
    certified_gap: float | None
    plan: bool  # true at the point of the plan that was made

    def to_json(self) -> dict[str, Any]:
        """Return an entry of `curve` in `oper plan --json`."""
        return asdict(self)

    def in_memory_of(self, larger: "CurvePoint") -> "CurvePoint":
        """Return this plan as the point of a larger share of extra memory."""
        return replace(
            self,
            extra_memory=larger.extra_memory,
            lower_bound_seconds=larger.lower_bound_seconds,
            certified_gap=gap_above(self.objective_seconds, larger.lower_bound_seconds),
            plan=larger.plan,
        )


class MemoryCurve(NamedTuple):
    """Points by memory, and the placement of the plan's point: the one that was made, or one in
    less memory with a shorter step."""

    points: list[CurvePoint]
    placement: Planned


def memory_curve(planned: Planned, topology: Topology) -> MemoryCurve:
    """Return the curve through a placement, for `topology` as it was given."""
    pooled = planned.problem.topology
    links = topology
    if isinstance(pooled, PooledTopology):
        links = pooled.on(topology)
    elif isinstance(pooled, RelayedTopology):
        links = relayed(topology, distinct=True)
    problem = replace(planned.problem, topology=links)
    within, most = _limits(problem)
    plan_share = _share(planned)
    doubled = (2.0**power for power in count())
    used = planned.cost.extra_memory_ratio
    # Users often ask for twice the memory of this placement.
    shares = {share for share in (*_SHARES, 1 + 2 * used) if share < most} | {most, plan_share}
    while (share := next(doubled)) < most:
        shares.add(share)
    placed: list[Planned] = []
    curve: list[_Placed] = []  # by memory, none with a longer step than the one before
    for share in sorted(shares):
        if share == plan_share:
            placed.append(planned)
        elif _is_enough(placed):
            continue
        else:
            # A share without a placement is left out, because the plan itself is good.
            try:
                placed.append(place_alone(within(share), Watch(lambda step: None)))
            except InfeasibleError:
                continue
        here = _Placed(
            placed[-1], predicted_seconds(placed[-1]), _share(placed[-1]), share == plan_share
        )
        # A plan with even links as its aim does not give way to a faster one.
        if curve and (not here.plan or planned.problem.asked.balance == "time"):
            fastest = min(curve, key=lambda each: each.step_seconds)
            here = here if here.step_seconds <= fastest.step_seconds else here.held_by(fastest)
        curve.append(here)
    at_plan = next(each for each in curve if each.plan)
    return MemoryCurve([_point(each) for each in curve], at_plan.placement)


def _share(planned: Planned) -> float:
    return planned.problem.limits.extra_memory


class _Placed(NamedTuple):
    """A placement with its predicted step, at a share of extra memory; `plan`: whether that is the
    share of the plan."""

    placement: Planned
    step_seconds: float
    extra_memory: float
    plan: bool

    def held_by(self, smaller: "_Placed") -> "_Placed":
        """Return the placement in less memory at this share, under this one's limits and with its
        bound; under its own limits if more copies would leave its rows less room than they take."""
        limits, made = self.placement.problem, smaller.placement
        problem, cost = made.problem, made.cost
        fits = bool((cost.memory_bytes <= limits.capacity_bytes).all())
        if fits and cost.extra_bytes <= limits.budget_bytes:
            ranks = replace(problem.topology, capacity=limits.topology.capacity)
            problem = with_limits(problem, ranks, limits.limits)
        placement = replace(
            made,
            problem=replace(problem, asked=limits.asked),
            certificate=self.placement.certificate.of(cost.objective_seconds),
            seconds=self.placement.seconds,
            unpooled_step_seconds=self.placement.unpooled_step_seconds,
        )
        return self._replace(placement=placement, step_seconds=smaller.step_seconds)


def _is_enough(placed: list[Planned]) -> bool:
    """Return True if more memory is not used: the last placement has no more copies than the one
    before, and had room for those of another row."""
    if len(placed) < 2:
        return False
    problem = placed[-1].problem
    before, last = (each.cost.extra_memory_ratio for each in placed[-2:])
    left = (problem.limits.extra_memory - last) * problem.classes.total_bytes
    row_bytes = max(problem.classes.width_memory) * (problem.ranks - 1)
    return last <= before and left >= row_bytes


def _limits(problem: Problem) -> tuple[Callable[[float], Problem], float]:
    """Return the problem with a share of extra memory, and the largest share."""
    topology = problem.topology
    if topology.memory_for_plans is not None and topology.capacity is None:
        limits = DeviceLimits.of(problem)
        return limits.within, limits.most_extra

    def within(share: float) -> Problem:
        return with_limits(problem, topology, replace(problem.limits, extra_memory=share))

    total, most = problem.classes.total_bytes, problem.ranks - 1.0
    if topology.capacity is not None and total:
        room = float(within(0.0).capacity_bytes.sum()) - total
        most = min(most, round_down(room / total))
    return within, most


def _point(placed: _Placed) -> CurvePoint:
    planned, certificate = placed.placement, placed.placement.certificate
    return CurvePoint(
        extra_memory=placed.extra_memory,
        extra_memory_ratio=planned.cost.extra_memory_ratio,
        memory_bytes=int(planned.cost.memory_bytes.max()),
        step_seconds=placed.step_seconds,
        objective_seconds=planned.cost.objective_seconds,
        lower_bound_seconds=certificate.lower_bound_seconds,
        certified_gap=certificate.certified_gap,
        plan=placed.plan,
    )
