"""Balance under new counts by few moves: owners for rows that were replicas, capacities, swaps.

In: `ClassProblem`, rows of each class by holder set, changed in place. Out: those rows. A row given
up as a replica may stay with any of its holders at no cost: such rows go where memory is left, in
turn, so that rows of much and of little traffic are spread evenly. Ranks above their capacity give
their coldest rows to others. The imbalance of T that is left is removed by swaps (swaps.py) of
single rows, each of which must gain more than its bytes cost over the horizon.
"""

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets
from oper.planner.problem.problem import ClassProblem
from oper.planner.row_placement.capacity_repair import memory_bytes
from oper.planner.row_placement.swaps import SwapSearch


def give_owners(problem: ClassProblem, sets: HolderSets, counts: Ints, dropped: Ints) -> None:
    """Add `dropped[c, k]` rows, of which the holders of column k had copies, to `counts` [C, K], in
    place, each with one of those holders as its owner."""
    classes = problem.classes
    traffic = classes.traffic_bytes(problem.workload)
    memory = memory_bytes(classes, sets, counts)
    target = (memory.sum() + float(dropped.sum(axis=1) @ classes.m)) * problem.shares
    for k in np.flatnonzero(dropped.any(axis=0)):
        for w in classes.widest_first():
            mine = np.flatnonzero((classes.width == w) & (dropped[:, k] > 0))
            if not len(mine):
                continue
            mine = mine[np.argsort(-traffic[mine], kind="stable")]
            row_class = np.repeat(mine, dropped[mine, k])
            room = np.where(sets.holds[k], np.clip(target - memory, 0, None), 0.0)
            room = room if room.any() else sets.holds[k].astype(float)
            ends = np.rint(np.cumsum(room / room.sum()) * len(row_class)).astype(np.int64)
            quota = np.diff(ends, prepend=0)
            # Rank r's n-th row of `quota[r]` comes at (n + 1/2) / quota[r] of the way.
            owner = np.repeat(np.arange(len(quota)), quota)
            turn = np.concatenate([(np.arange(n) + 0.5) / n for n in quota if n])
            np.add.at(counts, (row_class, owner[np.lexsort((owner, turn))]), 1)
            memory += quota * float(classes.widths[w].memory_bytes)


def swap_rows(
    problem: ClassProblem, sets: HolderSets, counts: Ints, seconds: Floats, price: Floats
) -> int:
    """Swap rows of `counts` [C, K], in place, while that pays; the number of rounds.

    `seconds` [M] is T; `price[g, k]` the seconds per byte and iteration of a row's move.
    """
    classes, workload = problem.classes, problem.workload
    # In training a replica's part of T is not proportional to its traffic.
    movable = sets.copies == 1 if workload.training else np.ones(len(sets), dtype=bool)
    part = np.ascontiguousarray(counts[:, movable])
    both_ways = (price + price.T)[np.ix_(movable, movable)]
    search = SwapSearch(
        part,
        classes.traffic(problem.topology, workload).directions(sets.take(movable)),
        classes.width,
        seconds.copy(),
        np.array(classes.width_memory)[:, None, None] * both_ways,
    )
    search.run()
    counts[:, movable] = part
    return search.rounds_made
