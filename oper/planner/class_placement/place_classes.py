"""Rows of each class to holder sets: on homogeneous ranks greedily, else by a linear programme.

In: `ClassProblem`. Out: `ClassPlacement`.
"""

import numpy as np

from oper.base.arrays import Ints
from oper.cost.holder_sets import HolderSets
from oper.planner.class_placement.class_placement import MANY_RANKS, ClassPlacement
from oper.planner.class_placement.heterogeneous import place_on_heterogeneous
from oper.planner.class_placement.homogeneous import place_on_homogeneous
from oper.planner.class_placement.homogeneous_replicas import choose_replicas
from oper.planner.lp.pricing import ENUMERABLE_RANKS
from oper.planner.problem.problem import ClassProblem
from oper.topology.nearly_alike import as_alike
from oper.topology.pooled_links import PooledTopology

# Share of all rows that are listed one by one if ranks differ: half a byte a row in the map.
LISTED_SHARE = 1 / 8


def by_programme(problem: ClassProblem) -> bool:
    """Return whether a linear programme places the classes: if ranks differ, unless they are many
    and nearly equal; and, for few ranks, if copied rows are dearer to read near by than far away,
    because the knapsack of homogeneous ranks knows only one copy per node and copies everywhere.
    The programme prices copies for one way to fetch, so that either all tables are pooled or none.
    """
    topology = problem.topology
    if not topology.homogeneous:
        return topology.ranks <= MANY_RANKS or as_alike(topology) is topology
    few = topology.ranks <= ENUMERABLE_RANKS
    mixed = isinstance(topology, PooledTopology) and topology.tables is not None
    return few and not mixed and not problem.workload.training and not topology.near_first


def place_classes(
    problem: ClassProblem, listed_share: float = LISTED_SHARE, whole: bool = False
) -> ClassPlacement:
    """Return the class placement with the least mean time over the AllReduce methods (one in
    inference).

    If a programme places them, `listed_share` of all rows are listed, and with `whole` hot rows are
    kept whole by a mixed integer programme; otherwise the partitions decide.
    """
    if by_programme(problem):
        return place_on_heterogeneous(problem, listed_share, whole)
    return place_on_homogeneous(problem)


def place_replicas(problem: ClassProblem) -> tuple[HolderSets, Ints]:
    """Return the holder sets, and the rows of each class in sets of several ranks, [C, G]; rows
    with one owner are left out because they take no part in an AllReduce."""
    if by_programme(problem):
        placement = place_on_heterogeneous(problem, LISTED_SHARE)
        several = np.flatnonzero(placement.holder_sets.copies > 1)
        return placement.holder_sets.take(several), placement.counts[:, several]
    sets, replicas, _ = choose_replicas(problem)
    return sets.take(np.arange(problem.ranks, len(sets))), replicas
