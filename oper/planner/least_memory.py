"""A placement in the memory that is asked for, or, by default, in as little as is enough.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Planned`. If the topology states the
memory of its devices and neither a capacity nor the extra memory is given, a plan may use the
devices' memory (device_limits.py), and uses the least with which the slowest rank takes at most
TOLERANCE longer than with all of it. That is proved, or seen from a plan with all of it.

Copies of ever colder rows save ever less, so most of the memory would be spent on the last percent.
If that is not so, and the percent saves less than LITTLE of the memory that loses no time, a plan
uses the latter.

This search knows only the rows that are expected to be read, and later data read others. So in
inference over links, in which a copy costs only memory, a plan uses at least the part MODEST of the
free memory, for copies of whole tables, unread rows included
(docs/design/copies-of-unread-rows.md).

In training copies cost an AllReduce in each step, most of it latency, whether or not later data
read the copied rows. So if a profile tells earlier from later counts, a plan has copies only if
they shorten the step on the later counts too, in plans made from the earlier ones.

The bound of bounds/lagrangian_bound.py is within a fraction of a percent of the times of plans,
falls as memory grows, and takes milliseconds: the shares, of three digits each, are searched by
bisection on it, and then it is seen whether the plans themselves are as close.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace
from functools import cache

from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.bounds.lagrangian_bound import lower_bound
from oper.planner.device_limits import DeviceLimits
from oper.planner.make_placement import (
    InfeasibleError,
    Planned,
    Watch,
    make_placement,
    place,
)
from oper.planner.price_plan import time_under
from oper.planner.problem.problem import copies_cost_memory_alone, make_problem
from oper.profiling.profile import Profile
from oper.topology.topology import Topology

TOLERANCE = 0.01  # relative, of the iteration's time: copies that save less are not made
LITTLE = 0.1  # of the bytes of all ranks: no time is given for less
MODEST = 0.25  # of the memory that one copy of each row leaves free: for copies without a gain too
EQUAL = 1e-9  # relative: times that are the same but for rounding

_SMALLEST_EXPONENT = -6  # a millionth of the tables' bytes, which is hardly a row


def shares_up_to(most: float) -> list[float]:
    """Return all shares of three digits from none to `most`, ascending."""
    shares = [0.0]
    exponent = _SMALLEST_EXPONENT
    while shares[-1] < most:
        shares += [float(f"{digits}e{exponent - 2}") for digits in range(100, 1000)]
        exponent += 1
    return shares[: bisect_left(shares, most)] + ([most] if most > 0 else shares[:1])


def bound_seconds(limits: DeviceLimits, extra_memory: float) -> float:
    """Return a lower bound on the iteration of any plan with this share of extra memory."""
    problem = limits.beside_most_replicas(extra_memory)
    return lower_bound(
        problem.classes,
        limits.problem.topology,  # one object, whose prices are found once
        problem.workload,
        problem.capacity_bytes,
        problem.budget_bytes,
    ).seconds


def least_share(limits: DeviceLimits, shares: list[float]) -> int:
    """Return the index of the least of `shares` whose bound is within TOLERANCE of the last one's.
    If the last share, or else the least one whose bound equals the last one's, is at most LITTLE
    larger, return its index instead."""
    bound = cache(lambda index: bound_seconds(limits, shares[index]))
    last = len(shares) - 1
    best = bound(last)

    def least_within(tolerance: float, low: int, high: int) -> int:
        most = best * (1 + tolerance)
        return bisect_left(range(high), True, lo=low, key=lambda index: bound(index) <= most)

    least = least_within(TOLERANCE, 0, last)
    little_more = bisect_right(shares, (1 + shares[least]) / (1 - LITTLE) - 1) - 1
    if little_more == last:
        return last
    equal = best * (1 + EQUAL)
    if bound(least) <= equal or bound(little_more) > equal:
        return least
    return least_within(EQUAL, least, little_more)


def modest_share(limits: DeviceLimits, shares: list[float]) -> int:
    """Return the index of the largest of `shares` that takes the part MODEST of the free memory; 0
    if copies cost more than memory."""
    if not copies_cost_memory_alone(limits.problem.topology, limits.problem.workload):
        return 0
    return bisect_right(shares, limits.free_share(MODEST)) - 1


# Plans made to find the least memory, if the bound of all memory is not within reach.
_MOST_PLANS = 6


def by_devices(topology: Topology, asked: PlanSettings) -> bool:
    """Return True if the devices' memory decides how much memory a plan may use."""
    known = topology.memory_for_plans is not None and topology.capacity is None
    return known and asked.extra_memory is None


def place_in_memory(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None] = lambda step: None,
    by_table: bool = False,
) -> Planned:
    """Plan for all rows of `profile`; `report` is called with the name of each step as it begins.
    `by_table` as for `make_problem`.

    Raises OperError if the ranks cannot hold the tables.
    """
    if not by_devices(topology, asked):
        return make_placement(profile, topology, workload, asked, report, by_table=by_table)
    watch = Watch(report)
    with watch("classes"):
        problem = make_problem(profile, topology, workload, asked, by_table=by_table)
    with watch("memory"):
        limits = DeviceLimits.of(problem)
        shares = shares_up_to(limits.most_extra)
        least, most = modest_share(limits, shares), len(shares) - 1
        if least < most:
            least = max(least, least_share(limits, shares))
        bound = bound_seconds(limits, shares[most])

    errors: list[InfeasibleError] = []

    def placed(index: int) -> Planned | None:
        try:
            return place(limits.within(shares[index]), watch)
        except InfeasibleError as error:
            errors.append(error)
            return None

    planned, best = placed(least), bound
    if too_slow(planned, best) and least < most and (full := placed(most)) is not None:
        best = full.cost.objective_seconds
        if too_slow(planned, best):
            planned = full
            for _ in range(_MOST_PLANS):
                middle = (least + most) // 2
                if middle == least:
                    break
                tried = placed(middle)
                if too_slow(tried, best):
                    least = middle
                else:
                    planned, most = tried, middle
        if planned is None or saves_little(planned, full):
            planned = full
    if planned is None:
        raise errors[0]
    if planned.cost.extra_bytes and workload.training and not by_table:
        with watch("later counts"):
            pays = copies_pay_later(profile, topology, workload, asked)
        if not pays:
            planned = placed(0) or planned
    certificate = replace(planned.certificate, full_memory_bound_seconds=bound)
    return replace(planned, certificate=certificate)


def copies_pay_later(
    profile: Profile, topology: Topology, workload: Workload, asked: PlanSettings
) -> bool:
    """Return whether a plan made from the earlier counts of a profile has a step on the later ones
    that is no longer than without copies; True if nothing tells which counts are later, or no
    placement without copies is found."""
    parts = profile.parts
    if parts is None or not all(part.accesses.any() for part in parts):
        return True
    earlier, later = parts

    def step_seconds(settings: PlanSettings) -> float:
        made = assemble(place_in_memory(earlier, topology, workload, settings))
        return time_under(made, later, as_counted=True).step_seconds

    try:
        return step_seconds(asked) <= step_seconds(replace(asked, extra_memory=0.0))
    except InfeasibleError:
        return True


def saves_little(planned: Planned, full: Planned) -> bool:
    """Return True if a plan is slower than the plan with all memory and needs only little less
    memory."""
    if planned.cost.objective_seconds <= full.cost.objective_seconds:
        return False
    share = (1 + planned.cost.extra_memory_ratio) / (1 + full.cost.extra_memory_ratio)
    return share > 1 - LITTLE


def too_slow(planned: Planned | None, best_seconds: float) -> bool:
    """Return True if a plan takes over TOLERANCE longer than the best, or none was found."""
    return planned is None or planned.cost.objective_seconds > best_seconds * (1 + TOLERANCE)
