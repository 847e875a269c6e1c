"""Rows of each class to holder sets: greedily on homogeneous ranks, else by a linear programme.

In: `ClassProblem`. Out: `ClassPlacement`.
"""

from oper.planner.class_placement.class_placement import ClassPlacement
from oper.planner.class_placement.heterogeneous import place_on_heterogeneous
from oper.planner.class_placement.homogeneous import place_on_homogeneous
from oper.planner.problem.problem import ClassProblem

# Share of all rows that are listed one by one where ranks differ: half a byte a row in the map.
LISTED_SHARE = 1 / 8


def place_classes(
    problem: ClassProblem, listed_share: float = LISTED_SHARE, whole: bool = False
) -> ClassPlacement:
    """The class placement with the least mean time over the AllReduce methods (one in inference).

    Where ranks differ, `listed_share` of all rows are listed, and with `whole` hot rows are kept
    whole by a mixed integer programme; elsewhere the partitions decide.
    """
    if problem.topology.homogeneous:
        return place_on_homogeneous(problem)
    return place_on_heterogeneous(problem, listed_share, whole)
