"""Rows to have copies under new counts, if existing copies cost nothing.

In: `ClassProblem`, rows of each class by holder set. Out: `ReplicaChanges`.

The mean over ranks of T is a sum over rows (homogeneous_replicas.py): a row of class c in column k
adds v[c, k]. Changing the column costs the bytes of the new copies, spread over `horizon`
iterations: that is `price[g, k]` seconds per byte and iteration, 0 if there is no new holder. With
ν ≥ 0 the price of a byte of extra copies, every row can be decided alone and takes the least of

    v[c, k] + m · price[g, k] + ν · m · (copies[k] - 1)

and ν is the least price at which the copies fit the budget. Thus a replica stays until another row
gains so much more per byte that it pays for bringing that one: the knapsack of
homogeneous_replicas.py with hysteresis. Rows given up as replicas cost no bytes and may stay with
any of their holders.
"""

from dataclasses import dataclass

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.allreduce import Method, allreduce_cost
from oper.cost.holder_sets import HolderSets
from oper.cost.read_charges import Charges
from oper.planner.problem.problem import ClassProblem

_BISECTIONS = 80


@dataclass(frozen=True)
class ReplicaChanges:
    """Rows [F] that change columns: of class `row_class`, from column `before` to `after`, which
    is -1 for rows that are to have one owner, any of their holders."""

    row_class: Ints
    before: Ints
    after: Ints
    rows: Ints
    mean_seconds: float  # all rows' part of the mean T afterwards, moves included

    def apply(self, counts: Ints) -> tuple[Ints, Ints]:
        """Return the counts [C, K] after the changes, without the rows given up as replicas, and
        those by class and former column [C, K]."""
        counts, dropped = counts.copy(), np.zeros_like(counts)
        np.subtract.at(counts, (self.row_class, self.before), self.rows)
        single = self.after < 0
        np.add.at(dropped, (self.row_class[single], self.before[single]), self.rows[single])
        kept = ~single
        np.add.at(counts, (self.row_class[kept], self.after[kept]), self.rows[kept])
        return counts, dropped


def mean_seconds(problem: ClassProblem, sets: HolderSets, method: Method) -> Floats:
    """Return v[c, k]: a row's part of the mean T over ranks, [C, K], without the latency of
    `method`."""
    classes, topology, workload = problem.classes, problem.topology, problem.workload
    charges = Charges.of(topology)
    seconds = classes.traffic(topology, workload).mean_set_seconds(sets)
    several = sets.copies > 1
    if workload.training and several.any():
        sums = classes.row_sums
        column = charges.set_seconds(sets).sum(axis=1) / topology.ranks
        kept_equal = allreduce_cost(topology, method).row_seconds(sums)
        kept_equal = kept_equal + charges.mean_memory_seconds * sums.union_bytes
        copied = np.outer(sums.read_bytes, column[several]) + kept_equal[:, None]
        seconds[:, several] = copied if method != "none" else np.inf
    return seconds


def choose_replicas(
    problem: ClassProblem, sets: HolderSets, counts: Ints, price: Floats, method: Method
) -> ReplicaChanges:
    """Return the changes of copies that pay, for `counts` [C, K] and `price` [K, K] seconds per
    byte and iteration, within the budget of extra memory."""
    ranks, m = problem.topology.ranks, problem.classes.m
    several = np.arange(ranks, len(sets))
    v = mean_seconds(problem, sets, method)
    row_class, before = np.nonzero(counts)
    rows = counts[row_class, before]
    m = m[row_class]
    # Option 0 is one owner, the one there is or the best of the holders; then each set of several.
    holder = np.stack([v[:, np.flatnonzero(holds)].min(axis=1) for holds in sets.holds], axis=1)
    stay = holder[row_class, before][:, None]
    copied = v[row_class][:, several] + m[:, None] * price[before][:, several]
    value = np.concatenate([stay, copied], axis=1)
    extra = np.concatenate([[0], sets.copies[several] - 1])[None] * m[:, None]
    # Rows with one owner that no price of memory would give copies to are out of it.
    open_ = (before >= ranks) | (copied < stay).any(axis=1)
    settled = float(dot(stay[~open_, 0], rows[~open_]))
    row_class, before, rows = row_class[open_], before[open_], rows[open_]
    value, extra = value[open_], extra[open_]

    def at(nu: float) -> Ints:
        return np.asarray((value + nu * extra).argmin(axis=1))

    def spent(option: Ints) -> float:
        return float(dot(np.take_along_axis(extra, option[:, None], axis=1)[:, 0], rows))

    row = np.arange(len(rows))
    chosen = at(0.0)
    taken = np.zeros(len(rows), dtype=np.int64)  # of the second choice, if any
    second = chosen
    if spent(chosen) > problem.budget_bytes:
        with np.errstate(divide="ignore", invalid="ignore"):
            density = np.where(extra > 0, (value[:, :1] - value) / extra, 0.0)
        low, high = 0.0, 2 * float(density.max(initial=0.0))
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if spent(at(middle)) > problem.budget_bytes else (low, middle)
            )
        chosen, second = at(high), at(low)
        left = problem.budget_bytes - spent(chosen)
        more = extra[row, second] - extra[row, chosen]
        # Rows at the margin gain equally per byte: an equal share of each, so that no rank alone
        # gets their copies, then as many more as there is memory for.
        margin = np.flatnonzero(more > 0)
        share = left / float(dot(more[margin], rows[margin])) if len(margin) else 0.0
        taken[margin] = np.floor(min(share, 1.0) * rows[margin]).astype(np.int64)
        left -= float(dot(more[margin], taken[margin]))
        for e in margin:
            further = max(min(int(left // more[e]), int(rows[e] - taken[e])), 0)
            taken[e] += further
            left -= float(further) * more[e]
    target = np.concatenate([[-1], several])
    changes = [(row, target[chosen], rows - taken), (row, target[second], taken)]
    index = np.concatenate([e for e, _, _ in changes])
    after = np.concatenate([k for _, k, _ in changes])
    number = np.concatenate([n for _, _, n in changes])
    seconds = settled + float(
        dot(value[row, chosen], rows - taken) + dot(value[row, second], taken)
    )
    if ((after >= 0) & (number > 0)).any():
        seconds += allreduce_cost(problem.topology, method).latency
    stays = np.where(after < 0, before[index] < ranks, before[index] == after)
    index, after, number = (a[~stays & (number > 0)] for a in (index, after, number))
    return ReplicaChanges(row_class[index], before[index], after, number, seconds)
