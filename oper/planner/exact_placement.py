"""Small problems: the mixed integer programme over all classes and all holder sets decides.

In: `ClassProblem`, or those of two memories together, the objective reached so far. Out: `Exact`, a
class placement of each with a bound. Drafts round shares of classes, which is near the optimum if
there are many rows. With a few dozen of them on ranks whose links differ a hundredfold, a single
row decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.allreduce import Method
from oper.cost.holder_sets import (
    HolderSets,
    cheapest_holder_sets,
    everywhere_set,
    single_owner_sets,
)
from oper.cost.read_charges import Charges
from oper.planner.bounds.lagrangian_bound import usable_methods
from oper.planner.class_placement.class_placement import ClassPlacement
from oper.planner.class_placement.integer_programme import ItemsToPlace, WholeRows, place_whole
from oper.planner.class_placement.partitions import partitions
from oper.planner.lp.pricing import pricing_items
from oper.planner.lp.restricted_master import MemoryItems
from oper.planner.problem.problem import ClassProblem
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

# Classes times holder sets, and nodes of branch and bound. On 72 rows and six topologies of 3 to 8
# ranks of benchmarks/planning/random_topologies.py 188 to 423 columns took 0.03 to 2.9 s of CPU. Up
# to 2,000 columns, one of them took 1.0 s in place of 0.6, for a gap of 4.9e-4 in place of 2.3e-3;
# with 2,000 nodes another took 7.3 s in place of 1.0, for 3.3e-4 in place of 1.1e-3.
MOST_COLUMNS = 500
MOST_RANKS = 5  # on 6 a single row can be read from its holders in 1,057 ways
NODES = 200
RELATIVE_GAP = 1e-5
STEP = "integer programme"
ROUNDING = 1e-9  # of sums of seconds
SAFETY = 1e-6  # of the solver's bound: above the sum of its tolerances


@dataclass(frozen=True)
class Exact:
    """The best placements that the solver found, one for each memory, if any, and a bound on every
    placement's objective, 0 if not all holder sets were tried."""

    placements: tuple[ClassPlacement, ...] | None
    bound_seconds: float


def place_exactly(
    problems: Sequence[ClassProblem], limit_seconds: float, scale_seconds: float
) -> Exact | None:
    """Return the best placement of the rows in all memories whose slowest rank takes
    `limit_seconds` at most, about `scale_seconds`; None if the problem is too large."""
    holder_sets = [_holder_sets(problem) for problem in problems]
    all_of_them = all(complete for _, complete in holder_sets)
    columns = [
        len(p.classes) * len(sets) for p, (sets, _) in zip(problems, holder_sets, strict=True)
    ]
    if sum(columns) > MOST_COLUMNS:
        return None
    best: WholeRows | None = None
    bound = limit_seconds
    methods = [usable_methods(p.workload, p.ranks, p.budget_bytes) for p in problems]
    for chosen in product(*methods):
        wanted = [
            _items(problem, sets, method, limit_seconds)
            for problem, (sets, _), method in zip(problems, holder_sets, chosen, strict=True)
        ]
        if not all(each.usable.any(axis=1).all() for each in wanted):
            continue
        placed = place_whole(wanted, NODES, RELATIVE_GAP, scale_seconds)
        if placed is None:
            bound = 0.0
            continue
        bound = min(bound, placed.bound_seconds)
        if best is None or placed.seconds < best.seconds:
            best = placed
    bound = bound * (1 - SAFETY) if all_of_them else 0.0
    if not np.isfinite(bound):
        bound = 0.0  # no placement was found, and none is known
    if best is None:
        return Exact(None, bound)
    placements = tuple(
        _class_placement(problem, sets, rows)
        for problem, (sets, _), rows in zip(problems, holder_sets, best.rows, strict=True)
    )
    return Exact(placements, bound)


def _items(
    problem: ClassProblem, sets: HolderSets, method: Method, limit_seconds: float
) -> ItemsToPlace:
    """Return all classes of a problem in whole rows. A holder set in which one row alone takes
    longer than `limit_seconds` is left out for that row."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    items = pricing_items(classes, topology, workload, method)
    limits = (topology, problem.capacity_bytes, problem.budget_bytes)
    memory = MemoryItems(items, *limits)
    usable = np.ones((len(classes), len(sets)), dtype=bool)
    every = ItemsToPlace(memory, np.ones(len(classes), dtype=bool), sets, usable)
    alone = every.seconds().max(axis=1).reshape(usable.shape)
    alone = alone + items.latency * (sets.copies > 1)
    usable = alone <= limit_seconds * (1 + ROUNDING)
    if workload.training and not items.replicas:
        usable[:, (sets.copies == problem.ranks) & (problem.ranks > 1)] = False
    return replace(every, usable=usable)


def _class_placement(problem: ClassProblem, sets: HolderSets, rows: Floats) -> ClassPlacement:
    """Return the solver's rows [C, G], all of them listed."""
    classes = problem.classes
    counts = np.rint(rows).astype(np.int64)
    memory: Floats = dot(sets.holds.T, dot(counts.T, classes.m))
    return ClassPlacement(
        step=STEP,
        holder_sets=sets,
        counts=counts,
        striped=np.zeros(len(classes), dtype=np.int64),
        shares=memory / memory.sum(),
        partitions=partitions(classes, problem.asked.threshold),
    )


def _holder_sets(problem: ClassProblem) -> tuple[HolderSets, bool]:
    """Return the holder sets that rows may be in, single owners first, and True if they are all
    sets.

    In inference: all ways of reading from any holders, if they are few enough, else of reading from
    the cheapest ones.
    """
    ranks, classes, charges = problem.ranks, problem.classes, Charges.of(problem.topology)
    single = single_owner_sets(ranks)
    if ranks == 1 or problem.budget_bytes < float(classes.m.min()):
        return single, True
    if problem.workload.training:
        return single + everywhere_set(ranks), True
    every = single
    if ranks <= MOST_RANKS:
        every = _every_way(charges.cheaper_than_own, _node_of(problem.topology))
    if ranks <= MOST_RANKS and len(every) * len(classes) <= MOST_COLUMNS:
        return single + every.take(every.copies > 1), True
    if len(classes) << ranks > MOST_COLUMNS:
        return single + everywhere_set(ranks), False
    number = np.arange(1, 1 << ranks)
    holds = (number[:, None] >> np.arange(ranks) & 1).astype(bool)
    several = holds[holds.sum(axis=1) > 1]
    return single + cheapest_holder_sets(several, charges.read_seconds), False


def _node_of(topology: Topology) -> Ints | None:
    """Return the node of each rank, [M], if relays read for nodes; else None."""
    return np.array(topology.node_of) if isinstance(topology, RelayedTopology) else None


def _every_way(cheaper_than_own: NDArray[np.bool_], node_of: Ints | None) -> HolderSets:
    """Return all ways of reading a row from holders, without the ways that save nobody anything: a
    copy that no rank reads, and a holder that reads another's copy unless that is
    `cheaper_than_own` [reader, source]. With relays, for which `node_of` [M] is given, only the
    ways in which the ranks of a node read inside it, or else all from one rank."""
    ranks = np.arange(len(cheaper_than_own))
    source = np.array(list(product(ranks, repeat=len(ranks))), dtype=np.uint16)
    holds = (source[:, :, None] == ranks).any(axis=1)
    sensible = ~holds | (source == ranks) | cheaper_than_own[ranks, source]
    kept = sensible.all(axis=1)
    if node_of is not None:
        for node in range(int(node_of.max()) + 1):
            of_node = source[:, node_of == node]
            inside = (node_of[of_node] == node).all(axis=1)
            from_one = (of_node == of_node[:, :1]).all(axis=1)
            kept &= inside | (from_one & ~holds[:, node_of == node].any(axis=1))
    return HolderSets(source[kept], holds[kept])
