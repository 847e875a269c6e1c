"""Rows of pooled plans that are worth moving to, from those of an older plan.

In: `Problem` of the new counts, priced by the vectors of the plan's own bags; its rows by class and
holder set, those of a plan from scratch, the cost of moves. Out: `PricedCounts`, best first, as of
improve_placement.py.

The saving of a copy depends on the other rows of its bags, so rows cannot be decided one by one,
unlike those of tables that are not pooled. Two starts are tried: the rows as they are, and the
copies and nodes of the plan from scratch, each node's rows staying on their ranks as far as there
are as many. From each, rows are swapped between the ranks of nodes while that pays, which changes
no bag's vectors; and between all ranks, if tables may be spread over all nodes. Gains are those of
the vectors that follow.
"""

import numpy as np

from oper.base.arrays import Ints
from oper.cost.holder_sets import HolderSets
from oper.planner.class_placement.rounding import split_evenly
from oper.planner.price_plan import price_counts
from oper.planner.problem.problem import Problem
from oper.planner.replan.improve_placement import (
    PricedCounts,
    best_first,
    swap_rows,
)
from oper.planner.replan.migration.migration_cost import MigrationCost
from oper.planner.row_placement.capacity_repair import keep_capacity
from oper.planner.row_placement.rows_at_homes import swap_in_nodes
from oper.topology.nearly_alike import as_alike


def better_pooled_counts(
    problem: Problem,
    sets: HolderSets,
    now: PricedCounts,
    fresh: Ints,
    migration_cost: MigrationCost,
    horizon: float,
) -> list[PricedCounts]:
    """Return counts that gain more in `horizon` iterations than the seconds of their copies over
    links, largest gain first; `fresh` [C, K] are the counts of a plan from scratch."""
    price = migration_cost.seconds / problem.ranks / horizon
    of_swaps = np.array(problem.classes.width_memory)[:, None, None] * (price + price.T)
    # Elsewhere all rows with one owner are on their tables' nodes, and swaps would spread them.
    may_be_spread = not (as_alike(problem.topology).homogeneous and problem.workload.training)
    tried = []
    for start in (now.counts, _near(problem, now.counts, fresh)):
        for in_nodes in (True, False) if may_be_spread else (True,):
            counts = start.copy()
            if not keep_capacity(problem, sets, counts):
                continue
            cost = price_counts(problem, sets, counts)
            if in_nodes:
                rounds = swap_in_nodes(problem, sets, counts, cost.rank_seconds.copy(), of_swaps)
            else:
                rounds = swap_rows(problem, sets, counts, cost, price)
            tried.append((1.0, PricedCounts(counts, price_counts(problem, sets, counts), rounds)))
    return best_first(problem, now, tried, migration_cost, horizon)


def _near(problem: Problem, now: Ints, wanted: Ints) -> Ints:
    """Return the counts [C, K] with as many rows of each class on each node, and as many copies, as
    `wanted`, on its ranks as far as `now` has them there."""
    near, traffic = wanted.copy(), problem.classes.traffic_bytes(problem.workload)
    node_of = np.array(problem.topology.node_of)
    for node in range(problem.topology.nodes):
        node_ranks = np.flatnonzero(node_of == node)
        load = np.zeros(len(node_ranks))
        old, rows = now[:, node_ranks], wanted[:, node_ranks].sum(axis=1)
        there = old.sum(axis=1)
        equal = np.full(old.shape, 1.0)
        stay = split_evenly(
            np.minimum(rows, there), np.where(there[:, None] > 0, old, equal), load, traffic
        )
        stay = np.minimum(stay, old)  # shares that were rounded
        near[:, node_ranks] = stay + split_evenly(rows - stay.sum(axis=1), equal, load, traffic)
    return near
