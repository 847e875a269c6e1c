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
    Cost,
    Floats,
    Groups,
    Method,
    Workload,
    collective,
    evaluate,
    everywhere_group,
    node_groups,
    single_groups,
)
from oper.planner import programme
from oper.planner.classes import Classes, Ints
from oper.planner.placement import Greedy, deal_evenly, memory_left, place
from oper.planner.replication import (
    Levels,
    everywhere_seconds,
    inference_levels,
    link_levels,
    single_seconds,
    time_ratio,
    training_levels,
)
from oper.topology import Topology


# A row above this share of a rank's mean work is placed by greedy alone.
HOT_SHARE = 1 / 64


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
        return self.capacity_bytes / self.capacity_bytes.sum()


@dataclass(frozen=True)
class Draft:
    """Rows of each class in each group; the first M groups are the single owners."""

    step: str  # which step produced it
    groups: Groups
    counts: Ints  # [C, G] rows listed one by one
    striped: Ints  # [C] rows left to the stripes
    greedy: Greedy | None = None


def make_draft(problem: Problem) -> Draft:
    """The draft of the AllReduce method with the least mean time (training), or the only one."""
    make = _alike_draft if problem.topology.alike else _programme_draft
    return make(problem)


def expected_cost(problem: Problem, draft: Draft) -> Cost:
    """The cost of a draft with its striped rows spread by the memory left."""
    ranks = problem.topology.ranks
    left = memory_left(
        problem.classes,
        draft.counts[:, :ranks],
        draft.striped,
        replica_bytes(problem.classes, draft.groups, draft.counts, ranks),
        problem.shares,
    )
    spread = left / left.sum() if left.sum() else problem.shares
    striped = draft.striped[:, None] * spread[None, :]
    counts = draft.counts.astype(np.float64)
    counts[:, :ranks] += striped
    sums = problem.classes.sums(counts)
    return evaluate(
        problem.topology, problem.workload, draft.groups, sums, problem.capacity_bytes
    )


def replica_bytes(classes: Classes, groups: Groups, counts: Ints, ranks: int) -> Floats:
    """Memory on each rank, [M], of the groups after the single owners'."""
    copies: Floats = groups.holds[ranks:].T @ (counts[:, ranks:].T @ classes.m)
    return copies


def _alike_draft(problem: Problem) -> Draft:
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    ranks = topology.ranks
    levels = _levels(problem)
    groups, replicas = _replica_groups(classes, topology, workload, levels)
    single = classes.rows - levels.node - levels.everywhere
    held = replica_bytes(
        classes, groups, np.concatenate([np.zeros((len(classes), ranks), int), replicas], 1), ranks
    )
    shares = problem.shares
    greedy = place(classes, single, held, shares, problem.threshold, problem.dob)
    # Split the partitions: only rows so hot that they decide a rank's load stay where greedy put
    # them; all others are dealt anew, class by class.
    listed = greedy.counts.sum(axis=1)
    weight = classes.weight(workload)
    hot = weight * ranks > HOT_SHARE * float(weight @ classes.rows)
    counts = np.where(hot[:, None], greedy.counts, 0)
    load = weight @ counts
    counts[~hot] = deal_evenly(listed[~hot], shares, load, weight[~hot])
    return Draft(
        "greedy",
        groups,
        np.concatenate([counts, replicas], axis=1),
        greedy.striped,
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
        (method, training_levels(classes, topology, workload, method, budget))
        for method in METHODS
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


def _programme_draft(problem: Problem) -> Draft:
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    ranks = topology.ranks
    objective: programme.Objective = "link" if problem.balance == "link" else "time"
    methods: tuple[Method, ...] = METHODS if workload.training else ("none",)
    solutions = [
        programme.solve(
            classes,
            topology,
            workload,
            method,
            problem.capacity_bytes,
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
    shares = np.clip(fraction, 0, None)[solved.bucket]
    shares /= shares.sum(axis=1, keepdims=True)
    weight = classes.weight(workload)
    dealt = _deal_by_bucket(classes, shares, solved.bucket, weight)
    _keep_budget(dealt, groups, classes, problem.budget_bytes, ranks)
    single = dealt[:, :ranks].sum(axis=1)
    held = replica_bytes(classes, groups, dealt, ranks)
    greedy = place(classes, single, held, problem.shares, problem.threshold, problem.dob)
    striped = greedy.striped
    listed = single - striped
    # The listed part of a class keeps the proportions of its single rows.
    keep = np.zeros_like(dealt)
    keep[:, ranks:] = dealt[:, ranks:]
    for c in np.flatnonzero(listed):
        exact = dealt[c, :ranks] * (listed[c] / single[c])
        whole = np.floor(exact + 1e-9).astype(np.int64)
        short = listed[c] - whole.sum()
        whole[np.argsort(whole - exact, kind="stable")[:short]] += 1
        keep[c, :ranks] = whole
    return Draft("programme", groups, keep, striped, greedy)


def _deal_by_bucket(classes: Classes, shares: Floats, bucket: Ints, weight: Floats) -> Ints:
    """Whole rows by the programme's shares, the rounding of one class made good by the next."""
    counts = np.zeros((len(classes), shares.shape[1]), dtype=np.int64)
    owed: dict[int, Floats] = {}
    for c in range(len(classes)):
        exact = classes.rows[c] * shares[c] + owed.get(int(bucket[c]), 0.0)
        whole = np.clip(np.floor(exact + 1e-9), 0, None).astype(np.int64)
        short = int(classes.rows[c] - whole.sum())
        order = np.argsort(whole - exact, kind="stable")
        if short > 0:
            whole[order[np.arange(short) % len(order)]] += 1
        for g in order[::-1]:
            if short >= 0:
                break
            drop = min(int(whole[g]), -short)
            whole[g] -= drop
            short += drop
        counts[c] = whole
        owed[int(bucket[c])] = exact - whole
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


