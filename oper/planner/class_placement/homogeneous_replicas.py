"""Rows to replicate on homogeneous ranks (§4.3), decided by the objective.

In: `ClassProblem`. Out: holder sets, and the number of rows of each class in each. Averaged over
homogeneous ranks, a row's part of T depends only on its number of copies:

* inference, n ranks a node, M ranks, weight w = S·R: one copy for each further node gains
  w·(n·L_inter - (n-1)·L_intra)/M, each further copy inside the nodes w·L_intra/M;
  with relays (oper/topology/relays.py) reads between nodes have a weight of their own, and gains
  are those of `relayed_copies` (oper/planner/lp/pricing.py);
* training: a copy on every rank replaces (R + D)·S over the links and at the owner by the
  AllReduce and the step: `gain` below, positive only if replication pays (the printed rule
  compares all ranks' fetches with one rank's AllReduce, and is off by a factor of M).

The rest is a knapsack: hottest rows per byte first, within the extra memory, and only while copies
pay. Rows that do not fit are skipped, so that smaller rows fill the rest.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.allreduce import METHODS, Method, allreduce_cost
from oper.cost.holder_sets import (
    HolderSets,
    cheapest_holder_sets,
    copies_over_nodes,
    everywhere_set,
    per_node_sets,
    single_owner_sets,
    trained_node_sets,
)
from oper.cost.read_charges import Charges, PairSeconds
from oper.cost.workload import Workload
from oper.planner.class_placement.few_copies import copies_needed, few_copies
from oper.planner.class_placement.rounding import split_evenly
from oper.planner.lp.pricing import DualPrices, relayed_copies
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

# Reads in an iteration of a row that is not expected to be read: it is copied after all others.
_HARDLY_READ = 1e-30
_BISECTIONS = 60
_PASSES = 4


@dataclass(frozen=True)
class Levels:
    """Rows of each class, [C], with a copy on one rank of every node, and on every rank."""

    node: Ints
    everywhere: Ints


class Replicas(NamedTuple):
    """G holder sets, the M single owners first; the number of `rows` of each of the C classes in
    each of the others, [C, G - M]; and the weight of rows with a few copies that every rank
    serves."""

    sets: HolderSets
    rows: Ints
    load: Floats  # [M]


def choose_replicas(problem: ClassProblem) -> Replicas:
    """Return the replicas of all classes."""
    needed = np.ones(len(problem.classes), dtype=np.int64)
    if problem.asked.balance == "time":
        needed = copies_needed(problem)
    levels = _levels(problem, needed)
    sets, replicas = replica_sets(problem.classes, problem.topology, problem.workload, levels)
    rows = np.where(needed > 1, problem.classes.rows - levels.node - levels.everywhere, 0)
    few = few_copies(problem, rows, needed)
    columns = np.zeros((len(rows), len(few.sets)), dtype=np.int64)
    columns[few.class_of, np.arange(len(few.sets))] = 1
    replicated = _spend_rest(problem, sets + few.sets, np.concatenate([replicas, columns], axis=1))
    return Replicas(*replicated, few.load)


def _levels(problem: ClassProblem, needed: Ints) -> Levels:
    """Return the number of rows of each class to replicate once a node and everywhere; all other
    rows have the copies that they need, [C]."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    budget = problem.budget_bytes
    if not workload.training:
        if problem.asked.balance == "link":
            return link_levels(classes, topology, workload, budget)
        saved = saved_by_copies(_all_read(classes), topology)
        return inference_levels(classes, saved, topology, budget, needed)
    single = single_seconds(classes, topology, workload)

    def mean_seconds(method: Method, levels: Levels) -> float:
        everywhere = everywhere_seconds(classes, topology, workload, method)
        share = allreduce_cost(topology, method)
        used = share.latency if levels.everywhere.any() else 0.0
        return used + float(dot(everywhere - single, levels.everywhere))

    choices = [
        (method, training_levels(classes, topology, workload, method, budget)) for method in METHODS
    ]
    return min(choices, key=lambda choice: mean_seconds(*choice))[1]


def replica_sets(
    classes: Classes, topology: Topology, workload: Workload, levels: Levels
) -> tuple[HolderSets, Ints]:
    """Return the sets, single owners first, that `levels` need, and the rows that have them."""
    sets = single_owner_sets(topology.ranks)
    columns = []
    if levels.node.any():
        per_node = trained_node_sets(topology)
        if not workload.training:
            per_node = per_node_sets(topology, Charges.of(topology).read_seconds)
        sets = sets + per_node
        load = np.zeros(len(per_node))
        equal = np.full(len(per_node), 1 / len(per_node))
        columns.append(split_evenly(levels.node, equal, load, classes.traffic_bytes(workload)))
    sets = sets + everywhere_set(topology.ranks)
    columns.append(levels.everywhere[:, None])
    return sets, np.concatenate(columns, axis=1)


def _spend_rest(problem: ClassProblem, sets: HolderSets, replicas: Ints) -> tuple[HolderSets, Ints]:
    """Spend the rest of the budget, too little for a row on all ranks or nodes, on the row with one
    owner that is read most per byte: in inference it may have copies on a few ranks, as far as they
    save time."""
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


def single_seconds(classes: Classes, topology: Topology, workload: Workload) -> Floats:
    """Return a row's part of the mean T with one owner, [C]: the seconds that its owner and its
    readers pay for it, the mean over owners (traffic.py)."""
    return classes.traffic(topology, workload).mean_owner_seconds


def everywhere_seconds(
    classes: Classes, topology: Topology, workload: Workload, method: Method
) -> Floats:
    """Return a row's part of the mean T with a copy on every rank, [C], without the latency."""
    sums, per_byte = classes.row_sums, Charges.of(topology).mean_memory_seconds
    seconds = per_byte * sums.memory_read_bytes
    if workload.training:
        seconds = seconds + per_byte * sums.union_bytes
        seconds = seconds + allreduce_cost(topology, method).row_seconds(sums)
    return seconds


def training_levels(
    classes: Classes, topology: Topology, workload: Workload, method: Method, budget_bytes: float
) -> Levels:
    """Replicate rows everywhere, by gain per byte, while the gain is positive and the budget
    lasts."""
    none = np.zeros(len(classes), dtype=np.int64)
    if method == "none" or topology.ranks == 1:
        return Levels(none, none)
    gain = single_seconds(classes, topology, workload)
    gain = gain - everywhere_seconds(classes, topology, workload, method)
    price = (topology.ranks - 1) * classes.m
    order = np.argsort(-gain / price, kind="stable")
    taken = none.copy()
    order = order[gain[order] > 0]
    taken[order] = _fill(price[order], classes.rows[order], budget_bytes)
    return Levels(none, taken)


@dataclass(frozen=True)
class SavedByCopies:
    """Savings per byte of copies, [C], in any unit: of copies in the other nodes, and then of
    copies on all ranks."""

    nodes: Floats
    ranks: Floats


def _all_read(classes: Classes) -> Classes:
    """Return the classes as if each row were read now and then: later data may read any row."""
    return replace(
        classes,
        R=np.maximum(classes.R, _HARDLY_READ),
        D_of_node=np.maximum(classes.D_of_node, _HARDLY_READ),
    )


def saved_by_copies(classes: Classes, topology: Topology) -> SavedByCopies:
    """Return the part of T that copies save in inference."""
    if isinstance(topology, PooledTopology) and not np.all(classes.pooled):
        pooled, others = (_of_mean(classes, each) for each in (topology, topology.unpooled))
        return SavedByCopies(
            np.where(classes.pooled, pooled.nodes, others.nodes),
            np.where(classes.pooled, pooled.ranks, others.ranks),
        )
    return (
        _of_mean(classes, topology)
        if isinstance(topology, RelayedTopology)
        else by_weight(classes, time_ratio(topology))
    )


def _of_mean(classes: Classes, topology: Topology) -> SavedByCopies:
    """Return the mean rank's seconds that copies save, for rows that are all fetched in one way."""
    if not isinstance(topology, RelayedTopology):
        per_node = topology.ranks // topology.nodes
        further_node = PairSeconds.of(topology).saved_by_further_node(per_node) / topology.ranks
        saved = by_weight(classes, time_ratio(topology))
        return SavedByCopies(saved.nodes * further_node, saved.ranks * further_node)
    even = DualPrices(np.full(topology.ranks, 1 / topology.ranks), np.zeros(topology.ranks), 0.0)
    _, of_rank, of_node = relayed_copies(topology, even)
    sums = classes.row_sums
    once, a_node, everywhere = (
        sums.read_bytes * of_rank[n] + sums.node_bytes[:, 0] * of_node[n] for n in range(3)
    )
    nodes = (once - a_node) / (topology.nodes - 1) / classes.m
    ranks = (a_node - everywhere) / (topology.ranks - topology.nodes) / classes.m
    # If the later ones save more per byte, both are made together or not at all.
    both = (once - everywhere) / (topology.ranks - 1) / classes.m
    later = ranks > nodes
    return SavedByCopies(np.where(later, both, nodes), np.where(later, both, ranks))


def by_weight(classes: Classes, ratio: float) -> SavedByCopies:
    """Return the savings of copies if they are in proportion to a row's weight: copies on all ranks
    save `ratio` (0 to 1) of the savings of copies in the other nodes."""
    density = classes.S * classes.R / classes.m
    return SavedByCopies(density, density * ratio)


def inference_levels(
    classes: Classes,
    saved: SavedByCopies,
    topology: Topology,
    budget_bytes: float,
    needed: Ints | int = 1,
) -> Levels:
    """Fill the budget with copies in order of their savings per byte: a class comes once for its
    copies in the other nodes, and once for copies on all ranks. Rows of class c have `needed[c]`
    copies at least, on different nodes."""
    ranks, nodes = topology.ranks, topology.nodes
    needed = np.broadcast_to(needed, len(classes))
    budget_bytes -= float(dot((needed - 1) * classes.rows, classes.m))
    copies_node, copies_all = nodes - needed, ranks - nodes
    index = np.concatenate([np.arange(len(classes))] * 2)
    step = np.repeat([0, 1], len(classes))
    key = np.concatenate([saved.nodes, saved.ranks])
    price = np.where(step == 0, copies_node[index], copies_all) * classes.m[index]
    # A stable sort keeps a class's first step before its second at equal keys.
    order = np.argsort(-key, kind="stable")
    order = order[(key[order] > 0) & (price[order] > 0)]
    filled = np.zeros(2 * len(classes), dtype=np.int64)
    filled[order] = _fill(price[order], classes.rows[index[order]], budget_bytes)
    node, everywhere = filled[: len(classes)], filled[len(classes) :]
    if nodes == 1:
        return Levels(np.zeros_like(node), everywhere)
    if copies_all == 0:
        return Levels(np.zeros_like(node), node)
    everywhere = np.minimum(everywhere, node)
    return Levels(node - everywhere, everywhere)


def time_ratio(topology: Topology) -> float:
    """Return the gain per copy inside the nodes over the gain per copy for a further node (time,
    inference); 1 if the former is no smaller, for example if links inside nodes are the slower
    ones."""
    pairs = PairSeconds.of(topology)
    further_node = pairs.saved_by_further_node(topology.ranks // topology.nodes)
    if further_node <= pairs.saved_inside_node:
        return 1.0
    return pairs.saved_inside_node / further_node


def link_levels(
    classes: Classes, topology: Topology, workload: Workload, budget_bytes: float
) -> Levels:
    """Return the levels at which the pairs inside a node cost as much as the pairs across (§6, Fig.
    8b).

    With one owner, all readers pull the same bytes, so pairs differ as their links do; copies once
    a node take bytes from the pairs across and give them to the pairs inside, copies on all ranks
    take them from both. If no ratio evens them out, the pairs across stay dearer, and copies once a
    node alone make them as cheap as the budget can. With relays the pairs across are those that
    relays read by, and the pairs inside pass the rows of all nodes.
    """
    intra, inter, _ = PairSeconds.of(topology)
    ranks, per_node = topology.ranks, topology.ranks // topology.nodes
    if topology.nodes == 1 or per_node == 1:
        return inference_levels(classes, by_weight(classes, 1.0), topology, budget_bytes)
    weight = across = classes.traffic_bytes(workload)
    nodes_inside = 1  # whose rows a pair inside passes
    if isinstance(topology, RelayedTopology):
        across, nodes_inside = classes.row_sums.node_bytes[:, 0], topology.nodes

    def across_over_inside(levels: Levels) -> float:
        once = classes.rows - levels.node - levels.everywhere
        single, node = float(dot(weight, once)), float(dot(weight, levels.node))
        inside = nodes_inside * single / ranks + node / per_node
        return inter * float(dot(across, once)) / ranks - intra * inside

    def at(ratio: float) -> Levels:
        return inference_levels(classes, by_weight(classes, ratio), topology, budget_bytes)

    low, high = 0.0, 1.0
    if across_over_inside(at(low)) >= 0:
        return at(low)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if across_over_inside(at(middle)) > 0 else (middle, high)
    # The hottest rows are large steps: from the side with dearer pairs inside, even out the rest
    # with rows light enough. What copies on all ranks cost more is paid for by the coldest rows.
    levels = at(low)
    inside_more = -across_over_inside(levels)
    heaviest = np.argsort(-weight, kind="stable")
    relief = intra * weight / per_node
    per_cold_byte = inter / ranks - nodes_inside * intra / ranks + intra / per_node
    shift = 0.0
    for _ in range(_PASSES):
        promoted, demoted = np.zeros((2, len(classes)), dtype=np.int64)
        usable = heaviest[relief[heaviest] > 0]
        promoted[usable] = _fill(relief[usable], levels.node[usable], inside_more - shift)
        price = float(dot(promoted, classes.m)) * (ranks - topology.nodes)
        freed = (topology.nodes - 1) * classes.m[heaviest[::-1]]
        left = (levels.node - promoted)[heaviest[::-1]]
        before = np.cumsum(left * freed) - left * freed
        demoted[heaviest[::-1]] = np.clip(np.ceil((price - before) / freed), 0, left)
        shift = per_cold_byte * float(dot(weight, demoted))
        shift += inter / ranks * float(dot(across - weight, demoted))
    # If too few rows are left to pay for that, the lightest promoted rows are not promoted.
    more = np.full(len(classes), float(ranks - topology.nodes)) * classes.m
    once = (topology.nodes - 1) * classes.m
    spent = dot(more, promoted) - dot(once, demoted) + dot(once, levels.node)
    over = float(spent + dot(more + once, levels.everywhere)) - budget_bytes
    for c in heaviest[::-1][promoted[heaviest[::-1]] > 0].tolist():
        if over <= 0:
            break
        rows = min(int(promoted[c]), int(np.ceil(over / more[c])))
        promoted[c] -= rows
        over -= rows * float(more[c])
    return Levels(levels.node - promoted - demoted, levels.everywhere + promoted)


def _fill(price: Floats, rows: Ints, budget_bytes: float) -> Ints:
    """Return the number of rows of each entry that fit, in order, each at `price` bytes a row."""
    taken = np.zeros(len(rows), dtype=np.int64)
    spent = np.cumsum(price * rows)
    whole = int(np.searchsorted(spent, budget_bytes, side="right"))
    taken[:whole] = rows[:whole]
    left = budget_bytes - (float(spent[whole - 1]) if whole else 0.0)
    if whole == len(rows):
        return taken
    cheapest = float(price.min())
    for entry in range(whole, len(rows)):
        if left < cheapest:
            break
        taken[entry] = min(int(left // price[entry]), int(rows[entry]))
        left -= taken[entry] * float(price[entry])
    return taken
