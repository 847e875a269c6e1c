"""The iteration time over memory: a placement for each of some shares of extra memory.

In: `Planned`. Out: `CurvePoint`s, by memory. The shares go from none to all that the devices hold,
or, where that does not decide, to a copy of each row on each rank; they end where more memory is
not used. The placement that was made is one of them. Those of pooled tables are made as it was
(place_pooled.py). A placement that is slower than one in less memory gives way to the latter, which
fits as well: so time never rises with memory.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from oper.planner.device_limits import DeviceLimits
from oper.planner.make_placement import InfeasibleError, Planned, Watch
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
    certified_gap: float | None
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
    placed: list[Planned] = []
    found: list[Planned] = []  # by memory, none slower than the one before
    for share in sorted(shares):
        if share == mine:
            placed.append(planned)
        elif _is_enough(placed):
            continue
        else:
            # A share that no placement was found for is left out, as the plan itself is good.
            try:
                placed.append(place_alone(within(share), Watch(lambda step: None)))
            except InfeasibleError:
                continue
        slower = found and share != mine and _is_faster(found[-1], placed[-1])
        found.append(_in_memory_of(placed[-1], found[-1]) if slower else placed[-1])
    return [_point(each, each is planned) for each in found]


def _is_faster(smaller: Planned, larger: Planned) -> bool:
    """Return whether the placement in the smaller memory is faster and fits the larger memory."""
    limits, cost = larger.problem, smaller.cost
    fits = (cost.memory_bytes <= limits.capacity_bytes).all()
    fits &= cost.extra_bytes <= limits.budget_bytes
    return bool(fits) and cost.objective_seconds < larger.cost.objective_seconds


def _in_memory_of(limits: Planned, planned: Planned) -> Planned:
    """Return `planned` under the limits of another placement, with that one's bound."""
    certificate = limits.certificate.of(planned.cost.objective_seconds)
    return replace(planned, problem=limits.problem, certificate=certificate)


def _is_enough(placed: list[Planned]) -> bool:
    """Return whether more memory is not used: the last placement has no more copies than the one
    before, and had room for those of another row."""
    if len(placed) < 2:
        return False
    problem = placed[-1].problem
    before, last = (each.cost.extra_memory_ratio for each in placed[-2:])
    left = (problem.limits.extra_memory - last) * problem.classes.total_bytes
    row_bytes = max(problem.classes.width_memory) * (problem.ranks - 1)
    return last <= before and left >= row_bytes


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
