"""What an existing plan costs under counts that it may not have been made from.

In: `Plan`, `Profile`. Out: `Cost`s. The plan's rows are counted where they are, class by class of
the new counts (row_locator.py), and priced as if the plan had been made for them.
"""

from dataclasses import dataclass, replace

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.objective import Cost
from oper.cost.vectors_per_bag import vector_ratios
from oper.plan.plan import Plan
from oper.plan.plan_parts import plans_of_memories
from oper.plan.row_locator import RowLocator
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.problem import ClassProblem, Problem, make_problem
from oper.profiling.profile import Profile
from oper.topology.pooled_links import PooledTopology, pooled_of


@dataclass(frozen=True)
class PricedPlan:
    """A plan's rows under counts: by class and counted column, [C, K + M], and what they cost."""

    holder_sets: HolderSets  # [K]
    counted: Ints
    table_sums: list[Sums]  # [T] of [K] each
    cost: Cost


def problem_of(plan: Plan, profile: Profile, as_counted: bool = False) -> Problem:
    """The problem that a plan of one memory is a solution of, under the counts of its tables;
    `as_counted` as for `make_problem`."""
    topology = plan.cost_topology
    pooled = isinstance(topology, PooledTopology)
    if isinstance(topology, PooledTopology):  # whose bags are the profile's
        lengths, least = profile.bag_lengths, 0.0
        if lengths is not None:
            nowhere = np.zeros(len(profile.tables))
            which = pooled_of(topology, profile.tables)
            least = vector_ratios(lengths, profile.tables, topology.nodes, nowhere, which).least
        topology = replace(topology, least_ratio=min(least, topology.least_ratio))
    return make_problem(
        profile, topology, plan.workload, plan.asked, plan.limits, as_counted, by_table=pooled
    )


def problems_of_memories(plan: Plan, profile: Profile, as_counted: bool = False) -> list[Problem]:
    """The problem of each of a plan's memories that has tables, in order; `as_counted`, to judge a
    plan by data that it was not made from."""
    tables = [memory.tables for memory in plan.memories if memory.tables]
    parts = zip(plans_of_memories(plan), tables, strict=True)
    return [problem_of(part, profile.select(of_part), as_counted) for part, of_part in parts]


def costs_under(parts: list[Plan], problems: list[Problem]) -> list[Cost]:
    """What the plans of single memories cost, each in its problem, of whatever counts."""
    return [
        price_tables(problem, RowLocator(part), ClassFinder(problem.profile, problem.classes)).cost
        for part, problem in zip(parts, problems, strict=True)
    ]


def rank_seconds(costs: list[Cost]) -> Floats:
    """T of each rank, [M], of one memory or of both."""
    return np.asarray(np.sum([cost.rank_seconds for cost in costs], axis=0))


def price_tables(problem: ClassProblem, locator: RowLocator, finder: ClassFinder) -> PricedPlan:
    """Count the rows of a plan, table by table, and price them."""
    sets = locator.holder_sets
    counted = np.zeros((finder.classes, len(sets) + locator.ranks), dtype=np.int64)
    table_sums = []
    for table in range(len(locator.layout.rows)):
        of_table = locator.count_table(table, finder)
        counted += of_table
        table_sums.append(problem.classes.sums(locator.by_holder_set(of_table)))
    cost = price_counts(problem, sets, locator.by_holder_set(counted))
    return PricedPlan(sets, counted, table_sums, cost)


def price_counts(problem: ClassProblem, sets: HolderSets, counts: Ints) -> Cost:
    """The cost of `counts` [C, K] rows in the columns."""
    return problem.price(sets, problem.classes.sums(counts))
