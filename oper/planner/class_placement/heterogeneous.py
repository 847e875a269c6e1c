"""Class placement where links or capacities differ: the shares of a linear programme, rounded.

In: `ClassProblem`. Out: `ClassPlacement`. The programme knows shares of classes; here they become
whole rows, so that what rounding takes from a holder set is made up for by the next classes.
"""

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.allreduce import METHODS, Method
from oper.cost.holder_sets import (
    HolderSets,
    cheapest_holder_sets,
    copies_over_nodes,
    single_owner_sets,
)
from oper.cost.read_charges import Charges
from oper.plan.layout import LONGEST_PERIOD
from oper.planner.class_placement.class_placement import ClassPlacement
from oper.planner.class_placement.integer_programme import place_whole
from oper.planner.class_placement.partitions import Partitions, partitions
from oper.planner.class_placement.rounding import whole_by_shares
from oper.planner.lp import restricted_master
from oper.planner.lp.pricing import PricingItems, pricing_items
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem
from oper.topology.topology import Topology

# Classes with more rows than this are split well enough by rounding.
MOST_WHOLE_ROWS = 64
# Of the programme with whole rows: what takes about a second, and the nodes of branch and bound.
# Its first node is mostly within 0.0001 % of the fractional solution.
MOST_COLUMNS = 10_000
NODES = 1
RELATIVE_GAP = 1e-3


def place_on_heterogeneous(
    problem: ClassProblem, listed_share: float, whole: bool = False
) -> ClassPlacement:
    """The class placement for ranks of any links and capacities, with `listed_share` of all rows
    listed; with `whole`, hot rows are kept whole by a mixed integer programme."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    ranks = problem.ranks
    objective: restricted_master.Objective = "link" if problem.asked.balance == "link" else "time"
    methods: tuple[Method, ...] = METHODS if workload.training else ("none",)
    limits = (problem.topology, problem.capacity_bytes, problem.budget_bytes)

    # Striped rows are spread in one way, whatever their counts: the programme sees those of a width
    # as one class, and the stripes follow its shares of that.
    parts = partitions(classes, problem.asked.threshold)
    listed = _listed_classes(classes, parts, listed_share)
    number = np.arange(len(classes))
    unit = np.where(number < listed, number, listed + classes.width)
    _, unit = np.unique(unit, return_inverse=True)
    items = [pricing_items(classes, topology, workload, method).merged(unit) for method in methods]
    solutions = [restricted_master.solve_items(rows, *limits, objective) for rows in items]
    n = min(range(len(methods)), key=lambda n: solutions[n].seconds)
    solved = solutions[n]
    found, fraction = solved.holder_sets, solved.fraction
    if whole and objective == "time":
        found, fraction = _whole_hot_rows(problem, items[n].merged(solved.bucket), solved)
    # Single owners first, as everywhere; then the holder sets that the programme uses.
    several = np.flatnonzero((found.copies > 1) & (fraction.sum(axis=0) > 0))
    sets = single_owner_sets(ranks) + found.take(several)
    by_owner = np.zeros((fraction.shape[0], len(sets)))
    owner = found.owner
    for g in np.flatnonzero(owner >= 0):
        by_owner[:, owner[g]] += fraction[:, g]
    by_owner[:, ranks:] = fraction[:, several]
    by_owner /= by_owner.sum(axis=1, keepdims=True)
    shares = by_owner[solved.bucket[unit]]
    traffic = classes.traffic_bytes(workload)
    counts = whole_by_shares(classes.rows, shares, solved.bucket[unit], traffic)
    striped = np.where(number < listed, 0, classes.rows)
    memory = _within_capacity(problem, sets.holds.T @ (counts.T @ classes.m))
    counts[listed:] = 0
    keep_budget(counts, sets, classes, problem.budget_bytes, ranks)
    return ClassPlacement("programme", sets, counts, striped, memory / memory.sum(), parts)


def _whole_hot_rows(
    problem: ClassProblem, buckets: PricingItems, solved: restricted_master.FractionalPlacement
) -> tuple[HolderSets, Floats]:
    """The holder sets and shares [B, G] with rows of the hottest classes whole; as they are where
    there are none of few rows, that is too large a programme, or finds nothing.

    Other rows stay in the holder sets that the fractional solution has for them, or get one owner.
    """
    as_solved = solved.holder_sets, solved.fraction
    hottest = np.zeros(len(buckets), dtype=bool)
    hottest[np.argsort(-buckets.weight_bytes, kind="stable")[: restricted_master.HOT_CLASSES]] = (
        True
    )
    whole = hottest & (np.bincount(solved.bucket) == 1) & (buckets.rows <= MOST_WHOLE_ROWS)
    if not whole.any():
        return as_solved
    sets = solved.holder_sets
    if not problem.workload.training:
        sets = sets + _some_copies(problem.topology, sets)
    used = np.zeros((len(buckets), len(sets)), dtype=bool)
    used[:, : len(solved.holder_sets)] = solved.fraction > 0
    usable = used | whole[:, None] | (sets.copies == 1)
    if usable.sum() > MOST_COLUMNS:
        return as_solved
    found = place_whole(
        buckets,
        whole,
        sets,
        usable,
        problem.topology,
        problem.capacity_bytes,
        problem.budget_bytes,
        NODES,
        RELATIVE_GAP,
        solved.seconds,
    )
    if found is None:
        return as_solved
    return sets, found.rows / found.rows.sum(axis=1, keepdims=True)


def _some_copies(topology: Topology, known: HolderSets) -> HolderSets:
    """Sets of 2 to M - 1 holders, spread over the nodes, that are not among the `known` ones: what
    is left of the budget may pay for a row's copies on a few ranks. In fractions it pays for a part
    of a row everywhere, so that the fractional solution need not have such sets."""
    held = {holds.tobytes() for holds in known.holds}
    spread = [copies_over_nodes(topology, copies) for copies in range(2, topology.ranks)]
    new = [holds for holds in spread if holds.tobytes() not in held]
    holds = np.array(new, dtype=bool).reshape(-1, topology.ranks)
    return cheapest_holder_sets(holds, Charges.of(topology).read_seconds)


def _within_capacity(problem: ClassProblem, memory: Floats) -> Floats:
    """Memory [M] that stripes can keep: where rounding exceeded a capacity, or stripes, which are
    whole rows of each width in a pattern, would, fewer rows are striped there and more elsewhere.

    Stripes leave room for their own rounding where there is enough in all.
    """
    classes = problem.classes
    rounding = sum(classes.width_memory) + classes.total_bytes / LONGEST_PERIOD
    limit = np.clip(problem.capacity_bytes - rounding, 0, None)
    if limit.sum() < memory.sum():
        limit = problem.capacity_bytes
    room, over = np.clip(limit - memory, 0, None), np.clip(memory - limit, 0, None)
    if room.sum() > 0:
        memory = memory + over.sum() * room / room.sum() - over
    return memory


def _listed_classes(classes: Classes, parts: Partitions, listed_share: float) -> int:
    """How many classes, from the most accessed on, are listed where ranks differ.

    Such ranks need the warmer of the cold rows on some ranks and the colder on others, which
    stripes cannot do: more rows are listed than access-bounded partitions have.
    """
    bounded = parts.run_class[parts.listed[parts.run_partition]]
    by_partition = int(bounded.max()) + 1 if len(bounded) else 0
    room = listed_share * int(classes.rows.sum())
    return max(by_partition, int(np.searchsorted(np.cumsum(classes.rows), room, side="right")))


def keep_budget(
    counts: Ints, sets: HolderSets, classes: Classes, budget_bytes: float, ranks: int
) -> None:
    """Give up the coldest replicas, in place, until the copies are within the budget."""
    extra = sets.copies - 1
    over = float((counts.T @ classes.m) @ extra) - budget_bytes
    for c in range(len(classes) - 1, -1, -1):
        for g in range(ranks, counts.shape[1]):
            if over <= 0:
                return
            if counts[c, g]:
                price = extra[g] * classes.m[c]
                rows = min(int(counts[c, g]), int(np.ceil(over / price)))
                counts[c, g] -= rows
                counts[c, int(sets.holds[g].argmax())] += rows
                over -= rows * price
