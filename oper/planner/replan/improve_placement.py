"""Rows of each class by holder set that are worth moving to, from those of an older plan.

In: `ClassProblem` of the new counts, the plan's rows by class and holder set, the cost of moves.
Out: `PricedCounts`. Two starts are tried, with the replicas as they are and with those that pay now
(`replica_changes.py`). From each, capacities are kept and imbalance is swapped away. Those that
gain more than their copies over links cost are returned, best first: the cost of copies between
slots of one rank is known only when rows have their slots. If ranks differ a third start comes from
a linear programme (`programme_with_moves.py`).

A row given up as a replica may stay with any of its holders at no cost: such rows go to ranks with
free memory, in turn, so that rows of much and of little traffic are spread evenly. Ranks above
their capacity give their coldest rows to others. The imbalance that is left is removed by swaps
(swaps.py) of single rows, each of which must gain more than its bytes cost over the horizon.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.allreduce import METHODS, Method
from oper.cost.holder_sets import HolderSets, everywhere_set, per_node_sets
from oper.cost.objective import Cost
from oper.cost.read_charges import Charges
from oper.planner.class_placement.heterogeneous import keep_budget
from oper.planner.price_plan import price_counts
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem
from oper.planner.replan.migration.flows import Flows, net_flows
from oper.planner.replan.migration.migration_cost import MigrationCost
from oper.planner.replan.programme_with_moves import (
    FreeMoves,
    MovableRows,
    counts_by_programme,
)
from oper.planner.replan.replica_changes import choose_replicas
from oper.planner.row_placement.aim import aimed_at, aimed_directions, aimed_seconds
from oper.planner.row_placement.capacity_repair import keep_capacity, memory_bytes
from oper.planner.row_placement.swaps import SwapSearch
from oper.topology.nearly_alike import as_alike
from oper.topology.pooled_links import PooledTopology


@dataclass(frozen=True)
class PricedCounts:
    """Rows of each class in each column, [C, K], and their cost."""

    counts: Ints
    cost: Cost
    swaps: int = 0


Counts = tuple[PricedCounts, ...]  # of each memory


class _Start(NamedTuple):
    """Rows by class and holder set to swap from, the price of swaps, and the weight of their gain
    compared with other starts."""

    counts: Ints
    price: Floats
    worth: float = 1.0


# The programme's moves are the fewest for their gain: other moves are to gain so much more.
FEWEST_MOVES = 1.1


def candidate_sets(problem: ClassProblem, free: FreeMoves | None, fresh: HolderSets) -> HolderSets:
    """Return the holder sets that rows may newly get: those that planning uses, and those of a plan
    from scratch."""
    topology = problem.topology
    if isinstance(topology, PooledTopology):
        return fresh
    if free is not None:
        return fresh + free.placement.holder_sets
    if not as_alike(topology).homogeneous or topology.ranks == 1:
        return fresh
    sets = fresh + everywhere_set(topology.ranks)
    if not problem.workload.training and topology.nodes > 1:
        sets = sets + per_node_sets(topology, Charges.of(topology).read_seconds)
    return sets


def better_counts(
    problem: ClassProblem,
    sets: HolderSets,
    now: PricedCounts,
    migration_cost: MigrationCost,
    horizon: float,
    free: FreeMoves | None,
) -> list[PricedCounts]:
    """Return counts that gain more in `horizon` iterations than the seconds of their copies over
    links, largest gain first. `free` is given if a programme places the rows."""
    price = migration_cost.seconds / problem.ranks / horizon
    starts = [
        _Start(now.counts, price),
        _Start(with_copies(problem, sets, now.counts, price), price),
    ]
    if free is not None:
        rows = MovableRows(problem, sets, now.counts, price, free)
        (wanted,) = counts_by_programme([rows])
        keep_budget(wanted.counts, sets, problem.classes, problem.budget_bytes, problem.ranks)
        starts.append(_Start(wanted.counts, price * wanted.times_price, FEWEST_MOVES))
    better: list[tuple[float, PricedCounts]] = []
    for start in starts:
        counts = start.counts.copy()
        if not keep_capacity(problem, sets, counts):
            continue
        cost = price_counts(problem, sets, counts)
        rounds = swap_rows(problem, sets, counts, cost, start.price)
        candidate = PricedCounts(counts, price_counts(problem, sets, counts), rounds)
        better.append((start.worth, candidate))
    return best_first(problem, now, better, migration_cost, horizon)


def best_first(
    problem: ClassProblem,
    now: PricedCounts,
    tried: Sequence[tuple[float, PricedCounts]],
    migration_cost: MigrationCost,
    horizon: float,
) -> list[PricedCounts]:
    """Return the `tried` counts that gain more in `horizon` iterations than the seconds of their
    copies over links, in descending order of their net gain times the factor that `tried` pairs
    them with."""

    def net_gain(candidate: PricedCounts) -> float:
        flows = net_flows(now.counts, candidate.counts, migration_cost)
        cost = moving_seconds(flows, problem.classes, migration_cost) / problem.ranks
        gain = aimed_seconds(problem, now.cost) - aimed_seconds(problem, candidate.cost)
        return gain * horizon - cost

    gains = [(net_gain(candidate) * worth, candidate) for worth, candidate in tried]
    gains.sort(key=lambda priced: -priced[0])
    return [candidate for gain, candidate in gains if gain > 0]


def with_copies(problem: ClassProblem, sets: HolderSets, counts: Ints, price: Floats) -> Ints:
    """Return the counts with the copies that pay, by the AllReduce method with the least mean
    time."""
    if len(sets) == problem.ranks:
        return counts
    methods: tuple[Method, ...] = METHODS if problem.workload.training else ("none",)
    choices = [choose_replicas(problem, sets, counts, price, method) for method in methods]
    changed, dropped = min(choices, key=lambda copies: copies.mean_seconds).apply(counts)
    give_owners(problem, sets, changed, dropped)
    return changed


def moving_seconds(flows: Flows, classes: Classes, migration_cost: MigrationCost) -> float:
    """Return the seconds of all copies over the links, of all ranks together."""
    moved_bytes = flows.rows * classes.m[flows.row_class]
    return float(dot(moved_bytes, migration_cost.seconds[flows.before, flows.after]))


def give_owners(problem: ClassProblem, sets: HolderSets, counts: Ints, dropped: Ints) -> None:
    """Add `dropped[c, k]` rows, of which the holders of column k had copies, to `counts` [C, K], in
    place, each with one of those holders as its owner."""
    classes = problem.classes
    traffic = classes.traffic_bytes(problem.workload)
    memory = memory_bytes(classes, sets, counts)
    target = (memory.sum() + float(dot(dropped.sum(axis=1), classes.m))) * problem.shares
    for k in np.flatnonzero(dropped.any(axis=0)):
        for w in classes.widest_first():
            dropped_classes = np.flatnonzero((classes.width == w) & (dropped[:, k] > 0))
            if not len(dropped_classes):
                continue
            dropped_classes = dropped_classes[np.argsort(-traffic[dropped_classes], kind="stable")]
            row_class = np.repeat(dropped_classes, dropped[dropped_classes, k])
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
    problem: ClassProblem, sets: HolderSets, counts: Ints, cost: Cost, price: Floats
) -> int:
    """Swap rows of `counts` [C, K], in place, while that pays; the number of rounds.

    `cost` is theirs; `price[g, k]` the seconds per byte and iteration of a row's move.
    """
    classes, workload = problem.classes, problem.workload
    # In training a replica's part of T is not proportional to its traffic.
    movable = sets.copies == 1 if workload.training else np.ones(len(sets), dtype=bool)
    part = np.ascontiguousarray(counts[:, movable])
    both_ways = (price + price.T)[np.ix_(movable, movable)]
    search = SwapSearch(
        part,
        aimed_directions(problem, sets.take(movable)),
        classes.width,
        aimed_at(problem, cost).copy(),
        np.array(classes.width_memory)[:, None, None] * both_ways,
    )
    search.run()
    counts[:, movable] = part
    return search.rounds_made
