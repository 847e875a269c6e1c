"""Rows of each class to holder sets: greedily on homogeneous ranks, else by linear programming."""

from oper.planner.class_placement.class_placement import ClassPlacement
from oper.planner.class_placement.heterogeneous import place_on_heterogeneous
from oper.planner.class_placement.homogeneous import place_on_homogeneous
from oper.planner.problem.problem import Problem

# Share of all rows that are listed one by one where ranks differ: half a byte a row in the map.
LISTED_SHARE = 1 / 8


def place_classes(problem: Problem, listed_share: float = LISTED_SHARE) -> ClassPlacement:
    """The draft of the AllReduce method with the least mean time (training), or the only one.

    `listed_share` of all rows are listed where ranks differ; elsewhere partitions say how many.
    """
    if problem.topology.alike:
        return place_on_homogeneous(problem)
    return place_on_heterogeneous(problem, listed_share)
