"""The figures that a plan's prediction is compared with (oper/plan/reference_figures.py).

In: `Plan`, the `Profile` that it was made from. Out: the plan with these figures. Whole tables in
turn and equal slices of every table are placed without looking at counts, so that their cost on
later data is simply theirs under later counts.
"""

from dataclasses import replace

from oper.cost.objective import Cost
from oper.plan.plan import Plan
from oper.plan.plan_parts import plans_of_memories
from oper.plan.reference_figures import HeldOut, HeldOutSource, SimpleMethod, SimplePlan
from oper.planner.baselines.simple import row_wise, table_wise
from oper.planner.bounds.certify import certify
from oper.planner.bounds.tier_bound import Certified, certify_together
from oper.planner.enough_accesses import warn_if_too_small
from oper.planner.price_fetched import predict_fetched
from oper.planner.price_plan import (
    PlanTime,
    priced_under,
    problems_of_memories,
    rank_seconds,
)
from oper.planner.problem.problem import Problem, make_problem
from oper.profiling.profile import Profile
from oper.topology.pooled_links import without_pooling

UNSEEN_DATA = "the data that the plan was not made from"  # in warnings
_SIMPLE = {SimpleMethod.TABLE_WISE: table_wise, SimpleMethod.ROW_WISE: row_wise}


def with_reference_figures(
    plan: Plan, profile: Profile, problems: list[Problem] | None = None
) -> Plan:
    """Return the plan with its cost on the data that follow the profile's, if these are known, and
    with the cost of simple plans. `problems` are those that it solves, if they are at hand.
    """
    if problems is None:
        problems = problems_of_memories(plan, profile)
    later = later_profile(profile)
    if later is not None:
        warn_if_too_small(later, plan.ranks, UNSEEN_DATA)
    unseen = None if later is None else problems_of_memories(plan, later, as_counted=True)
    ways = [(problems, unseen)]
    if plan.pooled_tables:
        later_unpooled = None if unseen is None else _unpooled(unseen, as_counted=True)
        ways.append((_unpooled(problems), later_unpooled))
    return replace(
        plan,
        held_out=None if unseen is None else held_out(plan, profile, unseen),
        simple_plans=tuple(_simple_plan(method, ways) for method in _SIMPLE),
    )


def _unpooled(problems: list[Problem], as_counted: bool = False) -> list[Problem]:
    """Return the problems with the same limits in which no table is pooled; `as_counted` as for
    `make_problem`."""
    return [
        make_problem(
            problem.profile,
            (topology := without_pooling(problem.topology)),
            problem.workload.unpooled(topology.nodes),
            problem.asked,
            problem.limits,
            as_counted,
        )
        for problem in problems
    ]


def later_profile(profile: Profile) -> Profile | None:
    """Return the counts of the data that follow a profile's, if these are known and read any
    row."""
    later = profile.following
    return None if later is None or not later.accesses_of_tables.any() else later


def later_data(profile: Profile) -> HeldOutSource:
    """Return the kind of data that follow a profile's, if such data are known."""
    return HeldOutSource.LAST_PART if profile.holds_out else HeldOutSource.NEXT_WINDOW


def held_out(plan: Plan, profile: Profile, problems: list[Problem]) -> HeldOut:
    """Price a plan made from `profile` in the problems of the data that follow it."""
    priced = priced_under(plans_of_memories(plan), problems)
    time = PlanTime.of(problems, priced)
    parts = [
        Certified(problem, certify(problem, each.cost.objective_seconds))
        for problem, each in zip(problems, priced, strict=True)
    ]
    devices, seconds = parts[0] if len(parts) > 1 else None, time.transfer_seconds
    bound = certify_together(devices, parts[-1], seconds).lower_bound_seconds
    samples = problems[0].profile.samples
    return HeldOut(later_data(profile), samples, time.step_seconds, seconds, bound)


def _simple_plan(
    method: SimpleMethod, ways: list[tuple[list[Problem], list[Problem] | None]]
) -> SimplePlan:
    """Return the plan with the shorter step of those in which tables are pooled as in OPER's plan,
    or none is: for each the problems of these and of later data."""
    plans = []
    for problems, unseen in ways:
        costs, step, seconds = _priced(method, problems)
        later_step = later = None
        if unseen is not None:
            _, later_step, later = _priced(method, unseen)
        plans.append(
            SimplePlan(
                method,
                step,
                seconds,
                max(float((cost.memory_bytes / cost.capacity_bytes).max()) for cost in costs),
                all(cost.feasible for cost in costs),
                later_step,
                later,
            )
        )
    return min(plans, key=lambda plan: plan.step_seconds)


def _priced(method: SimpleMethod, problems: list[Problem]) -> tuple[list[Cost], float, float]:
    """Return the cost in each problem, and the step and the objective of all of them, in
    seconds."""
    predicted = [predict_fetched(problem, _SIMPLE[method](problem)) for problem in problems]
    costs = [cost for cost, _ in predicted]
    return costs, sum(step.seconds for _, step in predicted), float(rank_seconds(costs).max())
