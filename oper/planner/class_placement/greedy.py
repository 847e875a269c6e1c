"""Greedy placement of partitions with backtracking on the threshold (§4.2), and its splitting.

Access-bounded partitions go, most accesses first, to the rank with the least lookup work for its
share; memory-bounded ones are striped in proportion to the memory each rank has left. Where the
balance asked for is not met, the threshold is halved and both steps are made again, until it is
met or halving stops helping. Then partitions are split by rows: every class with rows enough is
dealt to all ranks by their shares, the rest where least work is.
"""

import heapq
from dataclasses import dataclass, replace

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.objective import degree_of_balance
from oper.planner.class_placement.partition import Partitions, partitions
from oper.planner.problem.classes import Classes

# Halving from 0.1 % ten times is 0.0001 %: partitions of single hot rows, nothing left to gain.
MOST_HALVINGS = 10
# A halving that gains less than this in the worse balance is not followed by another.
LEAST_GAIN = 1e-4


@dataclass(frozen=True)
class Greedy:
    """What greedy and backtracking arrived at, before refining. Run e lists `run_rows[e]` rows of
    class `run_class[e]`, with one owner, on `run_rank[e]`."""

    partitions: Partitions
    single: Ints  # [C] rows with one owner
    run_class: Ints
    run_rows: Ints
    run_rank: Ints
    dob_lookups: float
    dob_memory: float
    reason: str = ""

    def counts(self, ranks: int) -> Ints:
        """Listed rows of each class on each rank, [C, M]; the others are left to the stripes."""
        cell = self.run_class * ranks + self.run_rank
        size = len(self.single) * ranks
        found = np.bincount(cell, weights=self.run_rows, minlength=size)
        return found.astype(np.int64).reshape(-1, ranks)


def place_greedily(
    classes: Classes,
    single: Ints,
    replica_bytes: Floats,
    shares: Floats,
    threshold: float,
    target: float,
) -> Greedy:
    """Place `single[c]` rows of each class by partitions; halve the threshold as long as it pays.

    `replica_bytes` [M] is memory already taken, `shares` [M] the part of the work and of the
    memory each rank should have.
    """
    best: Greedy | None = None
    for halving in range(MOST_HALVINGS + 1):
        now = _place_once(classes, single, replica_bytes, shares, threshold / 2**halving)
        worse = min(now.dob_lookups, now.dob_memory)
        if worse >= target:
            return replace(now, reason=f"both balances reached {target:.4%} before refining")
        if best is not None:
            gain = worse - min(best.dob_lookups, best.dob_memory)
            if gain < LEAST_GAIN:
                better = now if gain > 0 else best
                return replace(better, reason="halving the threshold no longer helped")
        best = now
    assert best is not None
    return replace(best, reason=f"the threshold was halved {MOST_HALVINGS} times")


def _place_once(
    classes: Classes, single: Ints, replica_bytes: Floats, shares: Floats, threshold: float
) -> Greedy:
    parts = partitions(classes, threshold)
    ranks = len(shares)
    listed = int(parts.explicit.sum())  # the first ones
    runs = slice(0, int(np.searchsorted(parts.run_partition, listed)))
    run_class, run_rows = parts.run_class[runs], parts.run_rows[runs]
    # Replicated rows have left the problem: they are the first rows of their class.
    before = _exclusive_cumsum_by(run_class, run_rows)
    replicated = (classes.rows - single)[run_class]
    run_rows = np.clip(before + run_rows - replicated, 0, None) - np.clip(
        before - replicated, 0, None
    )
    read = classes.S * classes.R
    run_work = run_rows * read[run_class]
    partition = parts.run_partition[runs]
    work = np.bincount(partition, weights=run_work, minlength=listed)
    rank_of = np.zeros(listed, dtype=np.int64)
    usable = shares > 0
    heap = [(0.0, r) for r in range(ranks) if usable[r]]
    inverse = np.where(usable, 1 / np.where(usable, shares, 1), 0).tolist()
    for p, amount in enumerate(work.tolist()):
        load, rank = heap[0]
        rank_of[p] = rank
        heapq.heapreplace(heap, (load + amount * inverse[rank], rank))
    run_rank = rank_of[partition]

    lookups = np.bincount(run_rank, weights=run_work, minlength=ranks)
    listed_bytes = np.bincount(run_rank, weights=run_rows * classes.m[run_class], minlength=ranks)
    striped_bytes = float(single @ classes.m) - listed_bytes.sum()
    left = _left(replica_bytes + listed_bytes, striped_bytes, shares)
    spread = left / left.sum() if left.sum() else shares
    lookups = lookups + spread * (float(single @ read) - lookups.sum())
    memory = replica_bytes + listed_bytes + spread * striped_bytes
    return Greedy(
        parts,
        single,
        run_class,
        run_rows,
        run_rank,
        degree_of_balance(lookups / np.where(usable, shares, np.inf)) if usable.all() else 0.0,
        degree_of_balance(memory / np.where(usable, shares, 1)),
    )


def memory_left(
    classes: Classes, counts: Ints, striped: Ints, replica_bytes: Floats, shares: Floats
) -> Floats:
    """Bytes each rank has left for striped rows if all memory in use follows `shares`, [M]."""
    return _left(replica_bytes + counts.T @ classes.m, float(striped @ classes.m), shares)


def _left(held_bytes: Floats, striped_bytes: float, shares: Floats) -> Floats:
    total = held_bytes.sum() + striped_bytes
    return np.asarray(np.clip(total * shares / shares.sum() - held_bytes, 0, None))


def split_evenly(rows: Ints, shares: Floats, load: Floats, weight: Floats) -> Ints:
    """Split `rows[c]` of each class over G groups by `shares` ([G] or [C, G]), [C, G].

    Whole parts by share. What is left over goes, class by class, to the groups that got least of
    it so far, among them to those with the least `load` for their share: rows near in weight, and
    so in R, D and U alike, spread evenly in number. `load` [G], in `weight` [C], is updated.
    """
    shares = np.broadcast_to(shares, (len(rows), np.shape(shares)[-1]))
    shares = shares / shares.sum(axis=1, keepdims=True)
    exact = rows[:, None] * shares
    counts = np.floor(exact + 1e-9).astype(np.int64)
    load += (counts * weight[:, None]).sum(axis=0)
    left = rows - counts.sum(axis=1)
    # A group's turn comes round by its share of the leftovers, which `given` counts. Lists, as this
    # goes class by class over few groups.
    given, loads = [0.0] * shares.shape[1], load.tolist()
    some = np.flatnonzero(left)
    for c, n, share in zip(some.tolist(), left[some].tolist(), shares[some].tolist(), strict=True):
        usable = [g for g, part in enumerate(share) if part > 0]
        turns = {g: int(given[g] / share[g] / len(share) + 1e-9) for g in usable}
        usable.sort(key=lambda g: (turns[g], loads[g] / share[g]))
        for g in usable[:n]:
            counts[c, g] += 1
            loads[g] += float(weight[c])
            given[g] += 1
    load[:] = loads
    return counts


def whole_rows(exact: Floats, total: int) -> Ints:
    """Whole numbers that sum to `total`, near `exact`: the largest remainders are rounded up."""
    scaled = exact * (total / exact.sum()) if exact.sum() > 0 else exact + total / len(exact)
    whole = np.floor(scaled + 1e-9).astype(np.int64)
    order = np.argsort(whole - scaled, kind="stable")
    short = total - int(whole.sum())
    whole[order[: max(short, 0)]] += 1
    for g in order[::-1][: max(-short, 0)]:
        whole[g] -= 1
    return whole


def _exclusive_cumsum_by(key: Ints, values: Ints) -> Ints:
    """Σ of earlier values with the same key; keys ascend."""
    if not len(key):
        return values
    total = np.cumsum(values) - values
    first = np.r_[True, key[1:] != key[:-1]]
    start = total[first][np.cumsum(first) - 1]
    return np.asarray(total - start)
