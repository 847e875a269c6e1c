"""Objective of swaps: the largest T of a rank, or the slowest link if links are to be even.

In: `ClassProblem`, holder sets, a `Cost`. Out: the seconds that are evened out, and the addition of
a row of each class to them.
"""

from collections.abc import Sequence

import numpy as np

from oper.base.arrays import Floats
from oper.cost.holder_sets import HolderSets
from oper.cost.objective import Cost
from oper.cost.traffic import Direction, link_parts
from oper.planner.problem.problem import ClassProblem


def aimed_at(problem: ClassProblem, cost: Cost) -> Floats:
    """Return T of the ranks, [M], or C of the ordered pairs of ranks, [M·M]."""
    return cost.link_seconds.ravel() if problem.asked.balance == "link" else cost.rank_seconds


def aimed_seconds(problem: ClassProblem, cost: Cost) -> float:
    """Return the objective of a placement: the largest of `aimed_at`."""
    return float(aimed_at(problem, cost).max())


def aimed_of_all(costs: Sequence[Cost], balance: str) -> float:
    """Return the objective of rows in several memories, whose costs add up."""
    name = "link_seconds" if balance == "link" else "rank_seconds"
    return float(np.sum([getattr(each, name) for each in costs], axis=0).max())


def aimed_directions(problem: ClassProblem, sets: HolderSets) -> tuple[Direction, ...]:
    """Return the addition of a row of each class in each of `sets` to the seconds that are evened
    out."""
    classes, topology = problem.classes, problem.topology
    if problem.asked.balance == "link":
        sums = classes.row_sums
        reads = link_parts(topology, sums.read_bytes, sums.node_bytes, sums.pooled_read_bytes)
        return tuple(Direction(bytes, of.set_link_seconds(sets)) for bytes, of in reads)
    return classes.traffic(topology, problem.workload).directions(sets)
