"""Drafts: how many rows of each class go to each group of ranks, before rows are named.

On ranks that look alike the levels of replication follow from a knapsack (`replication.py`) and
single rows from greedy placement with backtracking (`placement.py`), split by classes. Where
ranks differ in links or capacities, the linear programme (`programme.py`) says which share of
each class belongs to which holders, and classes are dealt by those shares.
"""

from dataclasses import dataclass

import numpy as np

from oper.cost import (
    METHODS,
    Floats,
    Groups,
    Method,
    Workload,
    collective,
    everywhere_group,
    holder_groups,
    node_groups,
    single_groups,
)
from oper.planner import programme
from oper.planner.classes import Classes, Ints
from oper.planner.partition import Partitions, partitions
from oper.planner.patterns import demand
from oper.planner.placement import Greedy, deal_evenly, place, whole_rows
from oper.planner.replication import (
    Levels,
    everywhere_seconds,
    inference_levels,
    link_levels,
    single_seconds,
    time_ratio,
    training_levels,
)
from oper.planner.stripes import LONGEST_PERIOD
from oper.topology import Topology

# A row above this share of a rank's mean work is placed by greedy alone.
HOT_SHARE = 1 / 64
# Share of all rows that are listed one by one where ranks differ: half a byte a row in the map.
LISTED_SHARE = 1 / 8


@dataclass(frozen=True)
class Problem:
    """All that a plan is made for."""

    classes: Classes
    topology: Topology
    workload: Workload
    capacity_bytes: Floats  # [M]
    budget_bytes: float  # of extra copies
    threshold: float
    dob: float
    balance: str  # "time" or "link"

    @property
    def shares(self) -> Floats:
        """The part of all memory that each rank should hold, [M]."""
        return np.asarray(self.capacity_bytes / self.capacity_bytes.sum())


@dataclass(frozen=True)
class Draft:
    """Rows of each class in each group; the first M groups are the single owners."""

    step: str  # which step produced it
    groups: Groups
    counts: Ints  # [C, G] rows listed one by one
    striped: Ints  # [C] rows left to the stripes
    shares: Floats  # [M] the part of all memory that each rank should hold
    partitions: Partitions
    greedy: Greedy | None = None


def make_draft(problem: Problem, listed_share: float = LISTED_SHARE) -> Draft:
    """The draft of the AllReduce method with the least mean time (training), or the only one.

    `listed_share` of all rows are listed where ranks differ; elsewhere partitions say how many.
    """
    if problem.topology.alike:
        return _alike_draft(problem)
    return _programme_draft(problem, listed_share)


def replica_bytes(classes: Classes, groups: Groups, counts: Ints, ranks: int) -> Floats:
    """Memory on each rank, [M], of the groups after the single owners'."""
    copies: Floats = groups.holds[ranks:].T @ (counts[:, ranks:].T @ classes.m)
    return copies


def _alike_draft(problem: Problem) -> Draft:
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    ranks = topology.ranks
    levels = _levels(problem)
    groups, replicas = _replica_groups(classes, topology, workload, levels)
    groups, replicas = _spend_rest(problem, groups, replicas)
    single = classes.rows - replicas.sum(axis=1)
    held = replica_bytes(
        classes, groups, np.concatenate([np.zeros((len(classes), ranks), int), replicas], 1), ranks
    )
    shares = problem.shares
    greedy = place(classes, single, held, shares, problem.threshold, problem.dob)
    # Split the partitions: only rows so hot that they decide a rank's load stay where greedy put
    # them; all others are dealt anew, class by class.
    placed = greedy.counts(ranks)
    listed = placed.sum(axis=1)
    weight = classes.weight(workload)
    hot = weight * ranks > HOT_SHARE * float(weight @ classes.rows)
    counts = np.where(hot[:, None], placed, 0)
    load = weight @ counts
    counts[~hot] = deal_evenly(listed[~hot], shares, load, weight[~hot])
    return Draft(
        "greedy",
        groups,
        np.concatenate([counts, replicas], axis=1),
        single - listed,
        shares,
        greedy.partitions,
        greedy,
    )


def _levels(problem: Problem) -> Levels:
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    budget = problem.budget_bytes
    if not workload.training:
        if problem.balance == "link":
            return link_levels(classes, topology, workload, budget)
        return inference_levels(classes, topology, workload, time_ratio(topology), budget)
    single = single_seconds(classes, topology, workload)

    def mean_seconds(method: Method, levels: Levels) -> float:
        everywhere = everywhere_seconds(classes, topology, workload, method)
        share = collective(topology, method)
        used = share.latency if levels.everywhere.any() else 0.0
        return used + float((everywhere - single) @ levels.everywhere)

    choices = [
        (method, training_levels(classes, topology, workload, method, budget)) for method in METHODS
    ]
    return min(choices, key=lambda choice: mean_seconds(*choice))[1]


def _replica_groups(
    classes: Classes, topology: Topology, workload: Workload, levels: Levels
) -> tuple[Groups, Ints]:
    """Single groups and, after them, those of replicated rows with the rows of each, [C, G - M]."""
    groups = single_groups(topology.ranks)
    columns = []
    if levels.node.any():
        per_node = node_groups(topology)
        groups = groups + per_node
        load = np.zeros(len(per_node))
        equal = np.full(len(per_node), 1 / len(per_node))
        columns.append(deal_evenly(levels.node, equal, load, classes.weight(workload)))
    groups = groups + everywhere_group(topology.ranks)
    columns.append(levels.everywhere[:, None])
    return groups, np.concatenate(columns, axis=1)


def _spend_rest(problem: Problem, groups: Groups, replicas: Ints) -> tuple[Groups, Ints]:
    """Give the copies that the budget has left, too few for a row on all ranks or nodes, to the
    densest row with one owner that lacks some: in inference it may have copies on a few ranks."""
    classes, topology = problem.classes, problem.topology
    extra = (groups.copies[topology.ranks :] - 1) * classes.m[:, None]
    left = problem.budget_bytes - float((extra * replicas).sum())
    single = classes.rows - replicas.sum(axis=1)
    fits = (single > 0) & (classes.m <= left) & (classes.R > 0)
    if not fits.any() or problem.workload.training:
        return groups, replicas
    row = int(np.argmax(np.where(fits, classes.S * classes.R / classes.m, -1.0)))
    copies = min(int(left // classes.m[row]), topology.ranks - 1)
    # One rank of each node after the other, then the next of each: the far copies spare most.
    node_of = np.asarray(topology.node_of)
    turn = np.array([int((node_of[:r] == node_of[r]).sum()) for r in range(topology.ranks)])
    holds = np.zeros((1, topology.ranks), dtype=bool)
    holds[0, np.lexsort((node_of, turn))[: copies + 1]] = True
    column = np.zeros((len(classes), 1), dtype=np.int64)
    column[row] = 1
    return groups + holder_groups(holds, topology), np.concatenate([replicas, column], axis=1)


def _programme_draft(problem: Problem, listed_share: float) -> Draft:
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    ranks = topology.ranks
    objective: programme.Objective = "link" if problem.balance == "link" else "time"
    methods: tuple[Method, ...] = METHODS if workload.training else ("none",)
    # What rounding takes, a row of each width and of the stripes' period, is kept back where that
    # leaves room for the tables.
    rounding = sum(classes.width_memory) + classes.total_bytes / LONGEST_PERIOD
    capacity = np.clip(problem.capacity_bytes - rounding, 0, None)
    if capacity.sum() < classes.total_bytes:
        capacity = problem.capacity_bytes

    # Striped rows are spread alike, whatever their counts: the programme sees those of a width as
    # one class, and its shares of it are what the stripes follow.
    parts = partitions(classes, problem.threshold)
    listed = _listed_classes(classes, parts, listed_share)
    number = np.arange(len(classes))
    unit = np.where(number < listed, number, listed + classes.width)
    _, unit = np.unique(unit, return_inverse=True)
    solutions = [
        programme.solve_demand(
            demand(classes, topology, workload, method).merged(unit),
            topology,
            capacity,
            problem.budget_bytes,
            objective,
        )
        for method in methods
    ]
    solved = min(solutions, key=lambda solution: solution.seconds)
    # Single owners first, as everywhere; then the holder sets that the programme uses.
    several = np.flatnonzero((solved.groups.copies > 1) & (solved.fraction.sum(axis=0) > 0))
    groups = single_groups(ranks) + solved.groups.take(several)
    fraction = np.zeros((solved.fraction.shape[0], len(groups)))
    owner = solved.groups.owner
    for g in np.flatnonzero(owner >= 0):
        fraction[:, owner[g]] += solved.fraction[:, g]
    fraction[:, ranks:] = solved.fraction[:, several]
    fraction /= fraction.sum(axis=1, keepdims=True)
    shares = fraction[solved.bucket[unit]]
    counts = _deal_by_shares(classes.rows, shares, solved.bucket[unit], classes.weight(workload))
    striped = np.where(number < listed, 0, classes.rows)
    memory = groups.holds.T @ (counts.T @ classes.m)
    # Rounding may have passed a capacity by some rows: fewer are striped there, more elsewhere.
    room = np.clip(capacity - memory, 0, None)
    if room.sum() > 0:
        over = np.clip(memory - capacity, 0, None)
        memory += over.sum() * room / room.sum() - over
    counts[listed:] = 0
    _keep_budget(counts, groups, classes, problem.budget_bytes, ranks)
    return Draft("programme", groups, counts, striped, memory / memory.sum(), parts)


def _listed_classes(classes: Classes, parts: Partitions, listed_share: float) -> int:
    """How many classes, from the most accessed on, are listed where ranks differ.

    Such ranks want the warmer of the cold rows in some places and the colder in others, which
    stripes cannot do: more rows are listed than access-bounded partitions have.
    """
    bounded = parts.run_class[parts.explicit[parts.run_partition]]
    by_partition = int(bounded.max()) + 1 if len(bounded) else 0
    room = listed_share * int(classes.rows.sum())
    return max(by_partition, int(np.searchsorted(np.cumsum(classes.rows), room, side="right")))


def _deal_by_shares(rows: Ints, shares: Floats, bucket: Ints, weight: Floats) -> Ints:
    """Whole rows [C, G] by `shares` [C, G], the first M of them single owners.

    What rounding withholds from a group is made good by the next classes: of hot classes, which
    have fewer rows than there are groups, in weight, as they decide a rank's load; of the others
    in rows of the same bucket, as they decide its memory.
    """
    counts = np.zeros(shares.shape, dtype=np.int64)
    owed_weight = np.zeros(shares.shape[1])
    owed_rows: dict[int, Floats] = {}
    for c, n in enumerate(rows.tolist()):
        exact = n * shares[c]
        if n <= shares.shape[1] and weight[c] > 0:
            wanted = np.where(shares[c] > 0, exact + owed_weight / weight[c], 0.0)
            counts[c] = whole_rows(np.clip(wanted, 0, n), n)
            owed_weight += (exact - counts[c]) * weight[c]
        else:
            wanted = exact + owed_rows.get(int(bucket[c]), 0.0)
            counts[c] = whole_rows(np.clip(wanted, 0, None), n)
            owed_rows[int(bucket[c])] = wanted - counts[c]
    return counts


def _keep_budget(
    counts: Ints, groups: Groups, classes: Classes, budget_bytes: float, ranks: int
) -> None:
    """Give up the coldest replicas, in place, while the copies are above the budget."""
    extra = groups.copies - 1
    over = float((counts.T @ classes.m) @ extra) - budget_bytes
    for c in range(len(classes) - 1, -1, -1):
        for g in range(ranks, counts.shape[1]):
            if over <= 0:
                return
            if counts[c, g]:
                price = extra[g] * classes.m[c]
                rows = min(int(counts[c, g]), int(np.ceil(over / price)))
                counts[c, g] -= rows
                counts[c, int(groups.holds[g].argmax())] += rows
                over -= rows * price
