"""Class placement if links or capacities differ: the shares of a linear programme, rounded.

In: `ClassProblem`. Out: `ClassPlacement`. The programme knows shares of classes; here they become
whole rows, and the next classes make up for rows that rounding takes from a holder set. Rows in two
memories of the same ranks are placed by one programme (`place_together`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
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
from oper.planner.class_placement.integer_programme import ItemsToPlace, place_whole
from oper.planner.class_placement.partitions import Partitions, partitions
from oper.planner.class_placement.rounding import whole_by_shares
from oper.planner.lp import restricted_master
from oper.planner.lp.pricing import PricingItems, pricing_items
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem
from oper.topology.topology import Topology

# Classes with more rows than this are split well enough by rounding.
MOST_WHOLE_ROWS = 64
# Limits of the programme with whole rows: entries of its time limits, and nodes of branch and
# bound. The first node is mostly within 0.0001 % of the fractional solution. It took 0.1 to 3.4 s
# of CPU with 10,000 entries, 5 to 7 s with 40,000, and 25 s with 134,000 (24 unequal ranks,
# 2026-11-28).
MOST_ENTRIES = 150_000
NODES = 1
RELATIVE_GAP = 1e-3


def place_on_heterogeneous(
    problem: ClassProblem, listed_share: float, whole: bool = False
) -> ClassPlacement:
    """Return the class placement for ranks of any links and capacities, with `listed_share` of all
    rows listed; with `whole`, hot rows are kept whole by a mixed integer programme."""
    objective: restricted_master.Objective = "link" if problem.asked.balance == "link" else "time"
    methods: tuple[Method, ...] = METHODS if problem.workload.training else ("none",)
    limits = (problem.topology, problem.capacity_bytes, problem.budget_bytes)
    drafts = [Draft.of(problem, listed_share, method) for method in methods]
    solutions = [restricted_master.solve_items(draft.items, *limits, objective) for draft in drafts]
    n = min(range(len(methods)), key=lambda n: solutions[n].seconds)
    solved = [(drafts[n], solutions[n])]
    (shares,) = whole_hot_rows(solved) if whole and objective == "time" else as_solved(solved)
    return drafts[n].rounded(solutions[n], *shares)


def place_together(
    problems: Sequence[ClassProblem], listed_share: float
) -> tuple[ClassPlacement, ...]:
    """Return the class placements of problems whose rows lie in different memories of the same
    ranks, with which the slowest rank takes the least time in all of them: hot rows are kept
    whole."""
    methods = [
        METHODS if problem.workload.training and problem.budget_bytes > 0 else METHODS[:1]
        for problem in problems
    ]
    choices = []
    for chosen in product(*methods):
        drafts = [Draft.of(p, listed_share, m) for p, m in zip(problems, chosen, strict=True)]
        solved = restricted_master.solve_together([draft.memory for draft in drafts])
        choices.append(list(zip(drafts, solved, strict=True)))
    best = min(choices, key=lambda choice: choice[0][1].seconds)
    return tuple(
        draft.rounded(solved, *shares)
        for (draft, solved), shares in zip(best, whole_hot_rows(best), strict=True)
    )


@dataclass(frozen=True)
class Draft:
    """A problem's classes as a programme sees them.

    Striped rows are spread in one way, whatever their counts: the programme sees those of a width
    as one class, and the stripes follow its shares of that. `unit` [C] is each class's among the
    `items`, and the first `listed` classes are listed.
    """

    problem: ClassProblem
    parts: Partitions
    listed: int
    unit: Ints
    items: PricingItems

    @staticmethod
    def of(problem: ClassProblem, listed_share: float, method: Method) -> "Draft":
        """Return the draft for one AllReduce method."""
        classes = problem.classes
        parts = partitions(classes, problem.asked.threshold)
        listed = _listed_classes(classes, parts, listed_share)
        number = np.arange(len(classes))
        unit = np.where(number < listed, number, listed + classes.width)
        _, unit = np.unique(unit, return_inverse=True)
        items = pricing_items(classes, problem.topology, problem.workload, method).merged(unit)
        return Draft(problem, parts, listed, unit, items)

    @property
    def memory(self) -> restricted_master.MemoryItems:
        """The items with the problem's limits."""
        problem = self.problem
        limits = (problem.topology, problem.capacity_bytes, problem.budget_bytes)
        return restricted_master.MemoryItems(self.items, *limits)

    def rounded(
        self, solved: restricted_master.FractionalPlacement, found: HolderSets, fraction: Floats
    ) -> ClassPlacement:
        """Round the shares `fraction` [B, G] of the solution's buckets in the holder sets `found`
        to whole rows."""
        problem, classes, ranks = self.problem, self.problem.classes, self.problem.ranks
        # Single owners first, as everywhere; then the holder sets that the programme uses.
        several = np.flatnonzero((found.copies > 1) & (fraction.sum(axis=0) > 0))
        sets = single_owner_sets(ranks) + found.take(several)
        by_owner = np.zeros((fraction.shape[0], len(sets)))
        owner = found.owner
        for g in np.flatnonzero(owner >= 0):
            by_owner[:, owner[g]] += fraction[:, g]
        by_owner[:, ranks:] = fraction[:, several]
        by_owner /= by_owner.sum(axis=1, keepdims=True)
        shares = by_owner[solved.bucket[self.unit]]
        traffic = classes.traffic_bytes(problem.workload)
        counts = whole_by_shares(classes.rows, shares, solved.bucket[self.unit], traffic)
        striped = np.where(np.arange(len(classes)) < self.listed, 0, classes.rows)
        memory = _within_capacity(problem, dot(sets.holds.T, dot(counts.T, classes.m)))
        counts[self.listed :] = 0
        keep_budget(counts, sets, classes, problem.budget_bytes, ranks)
        return ClassPlacement("programme", sets, counts, striped, memory / memory.sum(), self.parts)


Solved = Sequence[tuple[Draft, restricted_master.FractionalPlacement]]
Shares = list[tuple[HolderSets, Floats]]  # of buckets in holder sets, [B, G]


def as_solved(found: Solved) -> Shares:
    """Return the shares of the fractional solutions."""
    return [(solved.holder_sets, solved.fraction) for _, solved in found]


def whole_hot_rows(found: Solved) -> Shares:
    """Return the shares with rows of the hottest classes whole, in all memories; the solved shares
    if no class has few rows, or the programme is too large or finds nothing.

    Other rows stay in the holder sets that the fractional solution has for them, or get one owner.
    """
    wanted = [_hot_rows_whole(draft, solved) for draft, solved in found]
    if not any(each.whole.any() for each in wanted):
        return as_solved(found)
    ranks = found[0][0].problem.ranks
    if ranks * sum(int(each.usable.sum()) for each in wanted) > MOST_ENTRIES:
        return as_solved(found)
    placed = place_whole(wanted, NODES, RELATIVE_GAP, found[0][1].seconds)
    if placed is None:
        return as_solved(found)
    return [
        (each.sets, rows / rows.sum(axis=1, keepdims=True))
        for each, rows in zip(wanted, placed.rows, strict=True)
    ]


def _hot_rows_whole(draft: Draft, solved: restricted_master.FractionalPlacement) -> ItemsToPlace:
    """Return the buckets of a solution, with rows of the hottest classes whole."""
    problem, buckets = draft.problem, draft.items.merged(solved.bucket)
    hottest = np.zeros(len(buckets), dtype=bool)
    hottest[np.argsort(-buckets.weight_bytes, kind="stable")[: restricted_master.HOT_CLASSES]] = (
        True
    )
    whole = hottest & (np.bincount(solved.bucket) == 1) & (buckets.rows <= MOST_WHOLE_ROWS)
    sets = solved.holder_sets
    if not problem.workload.training:
        sets = sets + _some_copies(problem.topology, sets)
    used = np.zeros((len(buckets), len(sets)), dtype=bool)
    used[:, : len(solved.holder_sets)] = solved.fraction > 0
    usable = used | whole[:, None] | (sets.copies == 1)
    return ItemsToPlace(draft.memory._replace(rows=buckets), whole, sets, usable)


def _some_copies(topology: Topology, known: HolderSets) -> HolderSets:
    """Return sets of 2 to M - 1 holders, spread over the nodes, that are not among the `known`
    ones: the rest of the budget may pay for a row's copies on a few ranks. In fractions it pays for
    a part of a row everywhere, so the fractional solution need not have such sets."""
    held = {holds.tobytes() for holds in known.holds}
    spread = [copies_over_nodes(topology, copies) for copies in range(2, topology.ranks)]
    new = [holds for holds in spread if holds.tobytes() not in held]
    holds = np.array(new, dtype=bool).reshape(-1, topology.ranks)
    return cheapest_holder_sets(holds, Charges.of(topology).read_seconds)


def _within_capacity(problem: ClassProblem, memory: Floats) -> Floats:
    """Return the memory [M] that stripes can keep. If rounding exceeded a capacity, or stripes
    (whole rows of each width in a pattern) would, fewer rows are striped there and more elsewhere.

    Stripes leave room for their own rounding if there is enough in all.
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
    """Return the number of classes, from the most accessed on, to list if ranks differ.

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
    over = float(dot(dot(counts.T, classes.m), extra)) - budget_bytes
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
