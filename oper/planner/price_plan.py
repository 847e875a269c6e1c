"""Cost of an existing plan under counts that it may not have been made from.

In: `Plan`, `Profile`. Out: `Cost`s. The plan's rows are counted where they are, class by class of
the new counts (row_locator.py), and priced as if the plan had been made for them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.objective import Cost
from oper.cost.step_time import StepTime
from oper.cost.vectors_per_bag import PartAccesses, pooled_of, vector_bytes, vector_ratios
from oper.plan.plan import Plan
from oper.plan.plan_parts import plans_of_memories
from oper.plan.row_locator import RowLocator
from oper.planner.class_placement.pooled_copies import table_of_class
from oper.planner.predict_step import predict_step
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.problem import ClassProblem, Problem, make_problem
from oper.profiling.profile import Profile
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology


@dataclass(frozen=True)
class PricedPlan:
    """A plan's rows under counts, by class and counted column, [C, K + M], and their cost."""

    holder_sets: HolderSets  # [K]
    counted: Ints
    table_sums: list[Sums]  # [T] of [K] each
    cost: Cost
    by_holder_set: Ints  # by class, [C, K]


def problem_of(plan: Plan, profile: Profile, as_counted: bool = False) -> Problem:
    """Return the problem that a plan of one memory is a solution of, under the counts of its
    tables; `as_counted` as for `make_problem`."""
    topology = with_bags_of(plan.cost_topology, profile)
    pooled = isinstance(topology, PooledTopology)
    return make_problem(
        profile, topology, plan.workload, plan.asked, plan.limits, as_counted, by_table=pooled
    )


def with_bags_of(topology: Topology, profile: Profile) -> Topology:
    """Return the topology with the least vectors that bags of this profile can need too."""
    if not isinstance(topology, PooledTopology):
        return topology
    lengths, least = profile.bag_lengths, 0.0
    if lengths is not None:
        nowhere = np.zeros(len(profile.tables))
        which = pooled_of(topology, profile.tables)
        least = vector_ratios(lengths, profile.tables, topology.nodes, nowhere, which).least
    return replace(topology, least_ratio=min(least, topology.least_ratio))


def problems_of_memories(plan: Plan, profile: Profile, as_counted: bool = False) -> list[Problem]:
    """Return the problem of each of a plan's memories that has tables, in order; `as_counted`, to
    judge a plan by data that it was not made from."""
    tables = [memory.tables for memory in plan.memories if memory.tables]
    parts = zip(plans_of_memories(plan), tables, strict=True)
    return [problem_of(part, profile.select(of_part), as_counted) for part, of_part in parts]


def priced_under(parts: list[Plan], problems: list[Problem]) -> list[PricedPlan]:
    """Price the plans of single memories, each in its problem, of whatever counts."""
    return [
        price_tables(problem, RowLocator(part), ClassFinder(problem.profile, problem.classes))
        for part, problem in zip(parts, problems, strict=True)
    ]


def costs_under(parts: list[Plan], problems: list[Problem]) -> list[Cost]:
    """Return the costs of `priced_under`."""
    return [priced.cost for priced in priced_under(parts, problems)]


def time_under(plan: Plan, profile: Profile, as_counted: bool = False) -> "PlanTime":
    """Predict the times of a plan under the counts of its tables; `as_counted` as for
    `make_problem`."""
    problems = problems_of_memories(plan, profile, as_counted)
    return PlanTime.of(problems, priced_under(plans_of_memories(plan), problems))


def predict_priced(problem: Problem, priced: PricedPlan) -> StepTime:
    """Predict the step of a plan of one memory as it was priced in the problem."""
    sets, counts = priced.holder_sets, priced.by_holder_set
    problem = with_vectors_of(problem, sets, counts)
    return predict_step(problem, sets, counts, priced.cost.allreduce_method)


@dataclass(frozen=True)
class PlanTime:
    """Predicted step of a plan under counts and its transfer time, the objective, in seconds."""

    step_seconds: float
    transfer_seconds: float

    @staticmethod
    def of(problems: Sequence[Problem], priced: Sequence[PricedPlan]) -> "PlanTime":
        """Return the times of a plan of one memory or of two, as it was priced in their
        problems."""
        steps = (predict_priced(*each).seconds for each in zip(problems, priced, strict=True))
        return PlanTime(sum(steps), float(rank_seconds([each.cost for each in priced]).max()))


def rank_seconds(costs: list[Cost]) -> Floats:
    """Return T of each rank, [M], of one memory or of both."""
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
    by_holder_set = locator.by_holder_set(counted)
    cost = price_counts(problem, sets, by_holder_set)
    return PricedPlan(sets, counted, table_sums, cost, by_holder_set)


def with_vectors(problem: Problem, sets: HolderSets, accesses: Floats, sums: Sums) -> Problem:
    """Return the problem with the bytes of vectors that bags of pooled tables need if `accesses`
    [T, G] of each table are to rows of each holder set, with sums `sums` [G]."""
    whole = PartAccesses(problem.profile.tables, accesses)
    return with_vectors_of_parts(problem, sets, [whole], sums)


def with_vectors_of_parts(
    problem: Problem, sets: HolderSets, parts: Sequence[PartAccesses], sums: Sums
) -> Problem:
    """Return the problem with the vectors of rows of which each holder set may have some columns: a
    node sends as much of a vector as it has columns."""
    topology, tables = problem.topology, problem.profile.tables
    lengths = problem.profile.bag_lengths
    if not isinstance(topology, PooledTopology) or lengths is None:
        return problem
    a_rank = problem.workload.batch_size / problem.ranks / max(problem.profile.samples, 1)
    pooled = pooled_of(topology, tables)
    vectors = np.zeros(topology.nodes)
    for part in parts:
        shares = clipped_shares(problem, sets, part.accesses)
        vectors += dot(pooled, vector_bytes(lengths, part.tables, shares) * a_rank)
    read = dot(sums.pooled_read_bytes, _read_from(problem, sets))
    # Bags with rows that only further samples read are unknown: they have the least ratio.
    nowhere = np.zeros(lengths.tables)
    ratio = np.full(
        len(vectors), vector_ratios(lengths, tables, topology.nodes, nowhere, pooled).least
    )
    np.divide(vectors, read, out=ratio, where=(read > 0) & (vectors > 0))
    least = min(topology.least_ratio, float(ratio.min()))
    return replace(problem, topology=topology.with_ratio(ratio, least))


def shares_of_nodes(problem: ClassProblem, sets: HolderSets, accesses: Floats) -> Floats:
    """Return the share of each table's `accesses` [T, G] that a rank of another node makes to rows
    of each node, the mean over those ranks, [T, N]."""
    total = np.maximum(accesses.sum(axis=1), 1)[:, None]
    shares: Floats = dot(accesses, _read_from(problem, sets)) / total
    return shares


def clipped_shares(problem: ClassProblem, sets: HolderSets, accesses: Floats) -> Floats:
    """Return the shares of nodes, clipped to the range from 0 to 1 that rounding may exceed."""
    return np.clip(shares_of_nodes(problem, sets, accesses), 0.0, 1.0)


def _read_from(problem: ClassProblem, sets: HolderSets) -> Floats:
    """Return the share of the ranks of all other nodes that read each holder set from each node,
    [G, N]."""
    node_of, nodes = np.array(problem.topology.node_of), problem.topology.nodes
    source = node_of[sets.source]
    shares = np.zeros((len(sets), nodes))
    for node in range(nodes):
        others = node_of != node
        shares[:, node] = ((source == node) & others).sum(axis=1) / max(int(others.sum()), 1)
    return shares


def with_vectors_of(problem: Problem, sets: HolderSets, counts: Ints) -> Problem:
    """Return the problem with the vectors that pooled tables need if `counts` [C, K] rows of each
    class are in the holder sets, as `with_vectors`; for plans without pooled tables the problem
    itself."""
    if not isinstance(problem.topology, PooledTopology):
        return problem
    return with_vectors(
        problem, sets, expected_accesses(problem, counts), problem.classes.sums(counts)
    )


def expected_accesses(problem: Problem, counts: Ints) -> Floats:
    """Return the accesses of each table that are expected to be to rows in each column of `counts`
    [C, K], [T, K]: by them vectors are counted. Classes are of one table each."""
    classes = problem.classes
    accesses = np.zeros((len(problem.profile.tables), counts.shape[1]))
    np.add.at(accesses, table_of_class(classes), classes.expected[:, None] * counts)
    return accesses


def price_counts(problem: ClassProblem, sets: HolderSets, counts: Ints) -> Cost:
    """Return the cost of `counts` [C, K] rows in the columns, with the vectors of pooled tables
    there."""
    if isinstance(problem, Problem):
        problem = with_vectors_of(problem, sets, counts)
    return problem.price(sets, problem.classes.sums(counts))
