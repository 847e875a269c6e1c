"""The iteration time over memory: a placement for each of some shares of extra memory.

In: `Planned`. Out: `CurvePoint`s, by memory. The shares go from none to all that the devices hold,
or, where that does not decide, to a copy of each row on each rank; they end where more memory is
not used. The placement that was made is one of them. Those of pooled tables are made as it was
(place_pooled.py).
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from oper.planner.device_limits import DeviceLimits
from oper.planner.make_placement import InfeasibleError, Planned, Watch
from oper.planner.place_nearly_alike import place_nearly_alike
from oper.planner.place_pooled import place_pooled
from oper.planner.place_together import place_alone
from oper.planner.problem.problem import Problem, round_down, with_limits
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import RelayedTopology, relayed
from oper.topology.topology import Topology

_SHARES = (0.0, 0.001, 0.01, 0.05, 0.1, 0.2, 0.5)  # then doubled from 1 on


@dataclass(frozen=True)
class CurvePoint:
    """What a plan with this share of extra memory comes to."""

    extra_memory: float
    extra_memory_ratio: float  # used
    memory_bytes: int  # of the fullest rank
    objective_seconds: float
    lower_bound_seconds: float
    certified_gap: float
    plan: bool  # whether it is the plan that was made

    def to_json(self) -> dict[str, Any]:
        """An entry of `curve` in `oper plan --json`."""
        return asdict(self)


def memory_curve(planned: Planned, topology: Topology) -> list[CurvePoint]:
    """The curve through a placement, for `topology` as it was given."""
    pooled = planned.problem.topology
    links = topology
    if isinstance(pooled, PooledTopology):
        links = pooled.on(topology)
    elif isinstance(pooled, RelayedTopology):
        links = relayed(topology, distinct=True)
    problem = replace(planned.problem, topology=links)
    within, most = _limits(problem)
    mine = planned.problem.limits.extra_memory
    doubled = (2.0**power for power in count())
    used = planned.cost.extra_memory_ratio
    # Twice the memory of this placement is what people ask for.
    shares = {share for share in (*_SHARES, 1 + 2 * used) if share < most} | {most, mine}
    while (share := next(doubled)) < most:
        shares.add(share)
    points: list[CurvePoint] = []
    for share in sorted(shares):
        if share == mine:
            points.append(_point(planned, True))
        elif not _is_enough(points, problem):
            # A share that no placement was found for is left out, as the plan itself is good.
            with suppress(InfeasibleError):
                points.append(_point(_placed(within(share), topology), False))
    return points


def _placed(problem: Problem, topology: Topology) -> Planned:
    """Return a placement within the limits of `problem`, for `topology` as it was given."""
    if not isinstance(problem.topology, PooledTopology):
        return place_alone(problem, Watch(lambda step: None))
    asked = replace(problem.asked, extra_memory=problem.limits.extra_memory)
    given, tables = (problem.workload, asked), problem.topology.tables
    return place_nearly_alike(
        topology, lambda ranks: place_pooled(problem.profile, ranks, *given, tables=tables)
    )


def _is_enough(points: list[CurvePoint], problem: Problem) -> bool:
    """Whether more memory is not used: the last point has as many copies as the one before, and had
    room for those of another row."""
    if len(points) < 2:
        return False
    before, last = points[-2:]
    left = (last.extra_memory - last.extra_memory_ratio) * problem.classes.total_bytes
    row_bytes = max(problem.classes.width_memory) * (problem.ranks - 1)
    return last.extra_memory_ratio <= before.extra_memory_ratio and left >= row_bytes


def _limits(problem: Problem) -> tuple[Callable[[float], Problem], float]:
    """The problem with a share of extra memory, and the largest share."""
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


def _point(planned: Planned, plan: bool) -> CurvePoint:
    cost, certificate = planned.cost, planned.certificate
    return CurvePoint(
        extra_memory=planned.problem.limits.extra_memory,
        extra_memory_ratio=cost.extra_memory_ratio,
        memory_bytes=int(cost.memory_bytes.max()),
        objective_seconds=cost.objective_seconds,
        lower_bound_seconds=certificate.lower_bound_seconds,
        certified_gap=certificate.certified_gap,
        plan=plan,
    )
