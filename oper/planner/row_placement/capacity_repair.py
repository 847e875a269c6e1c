"""Capacities kept: the coldest rows of ranks above their capacity go to those with most room.

In: `ClassProblem`, rows of each class by holder set, changed in place. Out: whether all capacities
are kept then. Rounding whole rows from shares exceeds a capacity by a few rows, which hardly
changes the cost of a placement: so placements are repaired before they are discarded.
"""

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.holder_sets import HolderSets
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem


def memory_bytes(classes: Classes, sets: HolderSets, counts: Ints) -> Floats:
    """Return the memory of each rank, [M], with `counts` [C, K] rows in the columns."""
    held: Floats = dot(sets.holds.T, classes.memory_of(counts))
    return held


def keep_capacity(
    problem: ClassProblem, sets: HolderSets, counts: Ints, fixed_bytes: Floats | float = 0.0
) -> bool:
    """Repair `counts` [C, K], in place; `fixed_bytes` [M] are of rows that stay. Return True if all
    capacities are kept.

    A rank gives rows that it owns alone. If it has none left, it gives up copies, and another of
    their holders owns the row. The first M columns are the single owners.
    """
    classes, capacity = problem.classes, problem.capacity_bytes
    traffic = classes.traffic_bytes(problem.workload)
    memory = memory_bytes(classes, sets, counts) + fixed_bytes
    for w in classes.widest_first():
        m = float(classes.widths[w].memory_bytes)
        coldest = np.flatnonzero(classes.width == w)
        coldest = coldest[np.argsort(traffic[coldest], kind="stable")]
        for giver in np.flatnonzero(memory > capacity):
            for taker in np.argsort(memory - capacity, kind="stable"):
                over = int(np.ceil((memory[giver] - capacity[giver]) / m))
                rows = min(over, int((capacity[taker] - memory[taker]) // m))
                if rows <= 0:
                    break
                held = counts[coldest, giver]
                give = np.clip(rows - (np.cumsum(held) - held), 0, held)
                counts[coldest, giver] -= give
                counts[coldest, taker] += give
                memory[giver] -= float(give.sum()) * m
                memory[taker] += float(give.sum()) * m
    for giver in np.flatnonzero(memory > capacity):
        _give_up_copies(problem, sets, counts, memory, int(giver))
    return bool((memory <= capacity).all())


def _give_up_copies(
    problem: ClassProblem, sets: HolderSets, counts: Ints, memory: Floats, giver: int
) -> None:
    """Give up the coldest copies of a rank until it keeps its capacity; `memory` [M] follows."""
    classes, capacity = problem.classes, problem.capacity_bytes
    columns = np.flatnonzero(sets.holds[:, giver] & (sets.copies > 1))
    for c in np.argsort(classes.traffic_bytes(problem.workload), kind="stable"):
        for g in columns[counts[c, columns] > 0]:
            over = memory[giver] - capacity[giver]
            if over <= 0:
                return
            rows = min(int(counts[c, g]), int(np.ceil(over / classes.m[c])))
            others = np.flatnonzero(sets.holds[g] & (np.arange(problem.ranks) != giver))
            owner = int(others[(capacity - memory)[others].argmax()])
            counts[c, g] -= rows
            counts[c, owner] += rows
            freed = sets.holds[g].copy()
            freed[owner] = False
            memory[freed] -= rows * float(classes.m[c])
