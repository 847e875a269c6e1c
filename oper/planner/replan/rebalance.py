"""Balance under new counts by few moves: owners for rows that were replicas, capacities, exchanges.

A row given up as a replica may stay with any of its holders, for nothing: such rows go where
memory is left, dealt in turn, so that the heavy and the light are spread alike. Ranks above their
capacity hand their coldest rows on. What imbalance of T is left is taken away by exchanges
(swaps.py) of single rows, each of which must gain more than its bytes cost over the horizon.
"""

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.charges import Charges
from oper.cost.holder_sets import HolderSets
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import Problem
from oper.planner.row_placement.swaps import SwapSearch


def memory_bytes(classes: Classes, groups: HolderSets, counts: Ints) -> Floats:
    """Memory of each rank, [M], with `counts` [C, K] rows in the columns."""
    held: Floats = groups.holds.T @ (counts.T @ classes.m)
    return held


def give_owners(problem: Problem, groups: HolderSets, counts: Ints, dropped: Ints) -> None:
    """Add `dropped[c, k]` rows, which the holders of column k had copies of, to single owners
    among those, in `counts`, in place."""
    classes = problem.classes
    weight = classes.weight(problem.workload)
    memory = memory_bytes(classes, groups, counts)
    target = (memory.sum() + float(dropped.sum(axis=1) @ classes.m)) * problem.shares
    widest_first = np.argsort([-m for _, m in classes.widths], kind="stable")
    for k in np.flatnonzero(dropped.any(axis=0)):
        for w in widest_first:
            mine = np.flatnonzero((classes.width == w) & (dropped[:, k] > 0))
            if not len(mine):
                continue
            mine = mine[np.argsort(-weight[mine], kind="stable")]
            row_class = np.repeat(mine, dropped[mine, k])
            room = np.where(groups.holds[k], np.clip(target - memory, 0, None), 0.0)
            room = room if room.any() else groups.holds[k].astype(float)
            ends = np.rint(np.cumsum(room / room.sum()) * len(row_class)).astype(np.int64)
            quota = np.diff(ends, prepend=0)
            # Rank r's n-th row of `quota[r]` comes at (n + 1/2) / quota[r] of the way.
            owner = np.repeat(np.arange(len(quota)), quota)
            turn = np.concatenate([(np.arange(n) + 0.5) / n for n in quota if n])
            np.add.at(counts, (row_class, owner[np.lexsort((owner, turn))]), 1)
            memory += quota * float(classes.widths[w][1])


def keep_capacity(problem: Problem, groups: HolderSets, counts: Ints) -> bool:
    """Hand the coldest rows of ranks above their capacity to those with most room, in place;
    whether all capacities are kept then."""
    classes, capacity = problem.classes, problem.capacity_bytes
    weight = classes.weight(problem.workload)
    memory = memory_bytes(classes, groups, counts)
    for w in np.argsort([-m for _, m in classes.widths], kind="stable"):
        m = float(classes.widths[w][1])
        coldest = np.flatnonzero(classes.width == w)
        coldest = coldest[np.argsort(weight[coldest], kind="stable")]
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
    return bool((memory <= capacity).all())


def exchange(
    problem: Problem, groups: HolderSets, counts: Ints, seconds: Floats, price: Floats
) -> int:
    """Exchange rows of `counts` [C, K], in place, while that pays; the rounds that were made.

    `seconds` [M] is T; `price[g, k]` the seconds per byte and iteration of a row's move.
    """
    classes, workload = problem.classes, problem.workload
    # In training a replica's part of T is not proportional to its weight.
    able = groups.copies == 1 if workload.training else np.ones(len(groups), dtype=bool)
    part = np.ascontiguousarray(counts[:, able])
    both_ways = (price + price.T)[np.ix_(able, able)]
    exchanges = SwapSearch(
        part,
        classes.weight(workload),
        classes.width,
        Charges.of(problem.topology).set_seconds(groups.take(able)),
        seconds.copy(),
        np.array([m for _, m in classes.widths])[:, None, None] * both_ways,
    )
    exchanges.run()
    counts[:, able] = part
    return exchanges.rounds_made
