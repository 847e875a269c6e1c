"""Class placement on homogeneous ranks: a knapsack of replicas, then greedy placement (§4.2, §4.3).

In: `ClassProblem`. Out: `ClassPlacement`. Greedy placement keeps partitions whole. They are split
afterwards: only rows so hot that they decide a rank's load stay on the rank that it chose, all
others are split over the ranks class by class, which is more even.

On many nodes the hottest rows share nodes, and the others go where least work is. Rows are cheaper
to read near by, so a rank whose hot row takes it long gets faster if its node serves more of
everything (`bounds/node_loads_bound.py`). One such rank a node would need that of every node: so
the M hottest rows fill one node after the other, a row on each rank.
"""

import heapq

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.allreduce import METHODS, Method, allreduce_cost
from oper.cost.holder_sets import (
    HolderSets,
    cheapest_holder_sets,
    copies_over_nodes,
    everywhere_set,
    per_node_sets,
    single_owner_sets,
)
from oper.cost.read_charges import Charges, PairSeconds
from oper.cost.workload import Workload
from oper.planner.class_placement.class_placement import ClassPlacement, replica_bytes
from oper.planner.class_placement.greedy import place_greedily
from oper.planner.class_placement.replica_choice import (
    Levels,
    everywhere_seconds,
    inference_levels,
    link_levels,
    single_seconds,
    time_ratio,
    training_levels,
)
from oper.planner.class_placement.rounding import split_evenly
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem
from oper.topology.topology import Topology

# A row above this share of a rank's mean work stays where greedy placement put it.
HOT_SHARE = 1 / 64
# Above so many ranks hot rows are placed by nodes; fewer take swaps of single pairs as well.
MANY_RANKS = 32


def place_on_homogeneous(problem: ClassProblem) -> ClassPlacement:
    """The class placement for ranks with equal links and capacities."""
    classes, workload = problem.classes, problem.workload
    ranks, asked = problem.ranks, problem.asked
    sets, replicas = choose_replicas(problem)
    single = classes.rows - replicas.sum(axis=1)
    held = replica_bytes(
        classes, sets, np.concatenate([np.zeros((len(classes), ranks), int), replicas], 1), ranks
    )
    shares = problem.shares
    greedy = place_greedily(classes, single, held, shares, asked.threshold, asked.dob)
    placed = greedy.counts(ranks)
    listed = placed.sum(axis=1)
    traffic = classes.traffic_bytes(workload)
    hot = traffic * ranks > HOT_SHARE * float(traffic @ classes.rows)
    counts = np.where(hot[:, None], placed, 0)
    if problem.topology.nodes > 1 and ranks > MANY_RANKS:
        counts[hot] = place_by_node(listed[hot], traffic[hot], problem.topology)
    load = traffic @ counts
    counts[~hot] = split_evenly(listed[~hot], shares, load, traffic[~hot])
    return ClassPlacement(
        "greedy",
        sets,
        np.concatenate([counts, replicas], axis=1),
        single - listed,
        shares,
        greedy.partitions,
        greedy,
    )


def choose_replicas(problem: ClassProblem) -> tuple[HolderSets, Ints]:
    """The holder sets, single owners first, and the rows of the others, [C, G - M]."""
    levels = _levels(problem)
    sets, replicas = _replica_sets(problem.classes, problem.topology, problem.workload, levels)
    return _spend_rest(problem, sets, replicas)


def _levels(problem: ClassProblem) -> Levels:
    """How many rows of each class are replicated, and how far."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    budget = problem.budget_bytes
    if not workload.training:
        if problem.asked.balance == "link":
            return link_levels(classes, topology, workload, budget)
        return inference_levels(classes, topology, workload, time_ratio(topology), budget)
    single = single_seconds(classes, topology, workload)

    def mean_seconds(method: Method, levels: Levels) -> float:
        everywhere = everywhere_seconds(classes, topology, workload, method)
        share = allreduce_cost(topology, method)
        used = share.latency if levels.everywhere.any() else 0.0
        return used + float((everywhere - single) @ levels.everywhere)

    choices = [
        (method, training_levels(classes, topology, workload, method, budget)) for method in METHODS
    ]
    return min(choices, key=lambda choice: mean_seconds(*choice))[1]


def _replica_sets(
    classes: Classes, topology: Topology, workload: Workload, levels: Levels
) -> tuple[HolderSets, Ints]:
    """The holder sets, single owners first, and the rows of the others, [C, G - M]."""
    sets = single_owner_sets(topology.ranks)
    columns = []
    if levels.node.any():
        per_node = per_node_sets(topology, Charges.of(topology).read_seconds)
        sets = sets + per_node
        load = np.zeros(len(per_node))
        equal = np.full(len(per_node), 1 / len(per_node))
        columns.append(split_evenly(levels.node, equal, load, classes.traffic_bytes(workload)))
    sets = sets + everywhere_set(topology.ranks)
    columns.append(levels.everywhere[:, None])
    return sets, np.concatenate(columns, axis=1)


def _spend_rest(problem: ClassProblem, sets: HolderSets, replicas: Ints) -> tuple[HolderSets, Ints]:
    """Spend what is left of the budget, too little for a row on all ranks or nodes, on the row with
    one owner that is read most per byte: in inference it may have copies on a few ranks, as far as
    they save something."""
    classes, topology = problem.classes, problem.topology
    extra = (sets.copies[topology.ranks :] - 1) * classes.m[:, None]
    left = problem.budget_bytes - float((extra * replicas).sum())
    single = classes.rows - replicas.sum(axis=1)
    fits = (single > 0) & (classes.m <= left) & (classes.R > 0)
    if not fits.any() or problem.workload.training:
        return sets, replicas
    row = int(np.argmax(np.where(fits, classes.S * classes.R / classes.m, -1.0)))
    useful = topology.ranks if PairSeconds.of(topology).saved_inside_node > 0 else topology.nodes
    copies = min(int(left // classes.m[row]), useful - 1)
    if not copies:
        return sets, replicas
    holds = copies_over_nodes(topology, copies + 1)[None]
    column = np.zeros((len(classes), 1), dtype=np.int64)
    column[row] = 1
    some = cheapest_holder_sets(holds, Charges.of(topology).read_seconds)
    return sets + some, np.concatenate([replicas, column], axis=1)


def place_by_node(rows: Ints, traffic: Floats, topology: Topology) -> Ints:
    """Rows of each class on each rank, [C, M], of `rows` [C] with `traffic` [C] bytes each."""
    counts = np.zeros((len(rows), topology.ranks), dtype=np.int64)
    order = np.argsort(-traffic, kind="stable")
    hottest_first = np.repeat(order, rows[order]).tolist()
    ranks = np.argsort(topology.node_of, kind="stable").tolist()
    work = traffic.tolist()
    least: list[tuple[float, int]] = []
    for c, rank in zip(hottest_first, ranks, strict=False):
        counts[c, rank] += 1
        least.append((work[c], rank))
    heapq.heapify(least)
    for c in hottest_first[len(ranks) :]:
        load, rank = least[0]
        counts[c, rank] += 1
        heapq.heapreplace(least, (load + work[c], rank))
    return counts
