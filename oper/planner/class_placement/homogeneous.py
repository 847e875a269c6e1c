"""Class placement on homogeneous ranks: a knapsack of replicas, then greedy placement (§4.2, §4.3).

In: `ClassProblem`, of C classes on M ranks. Out: `ClassPlacement`. Greedy placement keeps
partitions whole. They are split afterwards: only rows so hot that they decide a rank's load stay on
the rank that it chose, all others are split over the ranks class by class, which is more even.

On many nodes the hottest rows share nodes, and the others go to the rank with the least work.
Nearby rows are cheaper to read, so a rank whose hot row takes it long gets faster if its node
serves more of everything (`bounds/node_loads_bound.py`). One such rank a node would need that of
every node: so the M hottest rows fill one node after the other, a row on each rank. With relays a
row is read, in all other nodes, by the rank at its owner's position: there the ranks of a position
share their reads between nodes, and hot rows are spread over positions.
"""

import heapq

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.planner.class_placement.class_placement import MANY_RANKS, ClassPlacement, replica_bytes
from oper.planner.class_placement.greedy import place_greedily
from oper.planner.class_placement.homogeneous_replicas import choose_replicas
from oper.planner.class_placement.rounding import split_evenly
from oper.planner.problem.problem import ClassProblem
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

# A row above this share of a rank's mean work stays where greedy placement put it.
HOT_SHARE = 1 / 64


def place_on_homogeneous(problem: ClassProblem) -> ClassPlacement:
    """Return the class placement for ranks with equal links and capacities."""
    classes, workload = problem.classes, problem.workload
    ranks, asked = problem.ranks, problem.asked
    sets, replicas, load = choose_replicas(problem)
    single = classes.rows - replicas.sum(axis=1)
    held = replica_bytes(classes, sets, replicas)
    shares = problem.shares
    greedy = place_greedily(classes, single, held, shares, asked.threshold, asked.dob)
    placed = greedy.counts(ranks)
    listed = placed.sum(axis=1)
    traffic = classes.traffic_bytes(workload)
    hot = traffic * ranks > HOT_SHARE * float(dot(traffic, classes.rows))
    counts = np.zeros((len(classes), len(sets)), dtype=np.int64)
    owned = counts[:, :ranks]
    owned[hot] = placed[hot]
    if isinstance(problem.topology, RelayedTopology):
        node_bytes = classes.row_sums.node_bytes[:, 0]
        owned[hot] = place_by_position(listed[hot], node_bytes[hot], problem.topology)
    elif problem.topology.nodes > 1 and ranks > MANY_RANKS:
        owned[hot] = place_by_node(listed[hot], traffic[hot], problem.topology, load)
    load = dot(traffic, owned) + load
    owned[~hot] = split_evenly(listed[~hot], shares, load, traffic[~hot])
    counts[:, ranks:] = replicas
    return ClassPlacement(
        step="greedy",
        holder_sets=sets,
        counts=counts,
        striped=single - listed,
        shares=shares,
        partitions=greedy.partitions,
        greedy=greedy,
    )


def place_by_position(rows: Ints, traffic: Floats, topology: Topology) -> Ints:
    """Return the rows of each class on each rank, [C, M], of `rows` [C] with `traffic` [C] bytes
    each: hottest first, at the position in the nodes whose ranks have least, and there on the rank
    with least."""
    nodes = topology.nodes
    by_position = np.argsort(topology.node_of, kind="stable").reshape(nodes, -1).T
    counts = np.zeros((len(rows), topology.ranks), dtype=np.int64)
    positions = [(0.0, q) for q in range(len(by_position))]
    least = [[(0.0, rank) for rank in ranks] for ranks in by_position.tolist()]
    order = np.argsort(-traffic, kind="stable")
    for c in np.repeat(order, rows[order]).tolist():
        total, q = positions[0]
        load, rank = least[q][0]
        counts[c, rank] += 1
        heapq.heapreplace(positions, (total + traffic[c], q))
        heapq.heapreplace(least[q], (load + traffic[c], rank))
    return counts


def place_by_node(rows: Ints, traffic: Floats, topology: Topology, load: Floats) -> Ints:
    """Return the rows of each class on each rank, [C, M], of `rows` [C] with `traffic` [C] bytes
    each; ranks have `load` [M] bytes already, of hotter rows."""
    counts = np.zeros((len(rows), topology.ranks), dtype=np.int64)
    order = np.argsort(-traffic, kind="stable")
    hottest_first = np.repeat(order, rows[order]).tolist()
    ranks = np.argsort(topology.node_of, kind="stable")
    free = ranks[load[ranks] == 0].tolist()
    work = traffic.tolist()
    least = [(float(load[rank]), rank) for rank in np.flatnonzero(load).tolist()]
    for c, rank in zip(hottest_first, free, strict=False):
        counts[c, rank] += 1
        least.append((work[c], rank))
    heapq.heapify(least)
    for c in hottest_first[len(free) :]:
        lightest, rank = least[0]
        counts[c, rank] += 1
        heapq.heapreplace(least, (lightest + work[c], rank))
    return counts
