"""Class placement where links or capacities differ: the shares of a linear programme, rounded.

In: `ClassProblem`. Out: `ClassPlacement`. The programme knows shares of classes; here they become
whole rows, so that what rounding takes from a holder set is made up for by the next classes.
"""

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.allreduce import METHODS, Method
from oper.cost.holder_sets import HolderSets, single_owner_sets
from oper.plan.layout import LONGEST_PERIOD
from oper.planner.class_placement.access_partitions import Partitions, partitions
from oper.planner.class_placement.class_placement import ClassPlacement
from oper.planner.class_placement.rounding import whole_rows
from oper.planner.lp import restricted_master
from oper.planner.lp.pricing import pricing_items
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem


def place_on_heterogeneous(problem: ClassProblem, listed_share: float) -> ClassPlacement:
    """The class placement for ranks of any links and capacities, with `listed_share` of all rows
    listed."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    ranks = problem.ranks
    objective: restricted_master.Objective = (
        "link" if problem.settings.balance == "link" else "time"
    )
    methods: tuple[Method, ...] = METHODS if workload.training else ("none",)
    # Rounding may take a row of each width and of the stripes' pattern: that is kept free where
    # the tables still fit then.
    rounding = sum(classes.width_memory) + classes.total_bytes / LONGEST_PERIOD
    capacity = np.clip(problem.capacity_bytes - rounding, 0, None)
    if capacity.sum() < classes.total_bytes:
        capacity = problem.capacity_bytes

    # Striped rows are spread in one way, whatever their counts: the programme sees those of a width
    # as one class, and the stripes follow its shares of that.
    parts = partitions(classes, problem.settings.threshold)
    listed = _listed_classes(classes, parts, listed_share)
    number = np.arange(len(classes))
    unit = np.where(number < listed, number, listed + classes.width)
    _, unit = np.unique(unit, return_inverse=True)
    solutions = [
        restricted_master.solve_items(
            pricing_items(classes, topology, workload, method).merged(unit),
            topology,
            capacity,
            problem.budget_bytes,
            objective,
        )
        for method in methods
    ]
    solved = min(solutions, key=lambda solution: solution.seconds)
    # Single owners first, as everywhere; then the holder sets that the programme uses.
    several = np.flatnonzero((solved.holder_sets.copies > 1) & (solved.fraction.sum(axis=0) > 0))
    sets = single_owner_sets(ranks) + solved.holder_sets.take(several)
    fraction = np.zeros((solved.fraction.shape[0], len(sets)))
    owner = solved.holder_sets.owner
    for g in np.flatnonzero(owner >= 0):
        fraction[:, owner[g]] += solved.fraction[:, g]
    fraction[:, ranks:] = solved.fraction[:, several]
    fraction /= fraction.sum(axis=1, keepdims=True)
    shares = fraction[solved.bucket[unit]]
    traffic = classes.traffic_bytes(workload)
    counts = _whole_by_shares(classes.rows, shares, solved.bucket[unit], traffic)
    striped = np.where(number < listed, 0, classes.rows)
    memory = sets.holds.T @ (counts.T @ classes.m)
    # Rounding may have exceeded a capacity by some rows: fewer are striped there, more elsewhere.
    room = np.clip(capacity - memory, 0, None)
    if room.sum() > 0:
        over = np.clip(memory - capacity, 0, None)
        memory += over.sum() * room / room.sum() - over
    counts[listed:] = 0
    _keep_budget(counts, sets, classes, problem.budget_bytes, ranks)
    return ClassPlacement("programme", sets, counts, striped, memory / memory.sum(), parts)


def _listed_classes(classes: Classes, parts: Partitions, listed_share: float) -> int:
    """How many classes, from the most accessed on, are listed where ranks differ.

    Such ranks need the warmer of the cold rows on some ranks and the colder on others, which
    stripes cannot do: more rows are listed than access-bounded partitions have.
    """
    bounded = parts.run_class[parts.listed[parts.run_partition]]
    by_partition = int(bounded.max()) + 1 if len(bounded) else 0
    room = listed_share * int(classes.rows.sum())
    return max(by_partition, int(np.searchsorted(np.cumsum(classes.rows), room, side="right")))


def _whole_by_shares(rows: Ints, shares: Floats, bucket: Ints, traffic: Floats) -> Ints:
    """Whole rows [C, G] by `shares` [C, G], the first M of them single owners.

    What rounding takes from a holder set is made up for by the next classes: of hot classes, which
    have fewer rows than there are holder sets, in `traffic` [C], as they decide a rank's load; of
    the others in rows of the same bucket, as they decide its memory.
    """
    counts = np.zeros(shares.shape, dtype=np.int64)
    sets = shares.shape[1]
    owed_traffic = np.zeros(sets)
    owed_rows: dict[int, Floats] = {}
    # There may be a hundred thousand classes of a few rows: what needs no order is done at once.
    exact, used = rows[:, None] * shares, shares > 0
    by_traffic = (rows <= sets) & (traffic > 0)
    of_class = zip(rows.tolist(), traffic.tolist(), bucket.tolist(), by_traffic, strict=True)
    for c, (n, weight, b, hot) in enumerate(of_class):
        if hot:
            wanted = np.where(used[c], exact[c] + owed_traffic / weight, 0.0)
            counts[c] = whole_rows(np.minimum(np.maximum(wanted, 0), n), n)
            owed_traffic += (exact[c] - counts[c]) * weight
        else:
            wanted = exact[c] + owed_rows.get(b, 0.0)
            counts[c] = whole_rows(np.maximum(wanted, 0), n)
            owed_rows[b] = wanted - counts[c]
    return counts


def _keep_budget(
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
