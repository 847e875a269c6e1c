"""Greedy placement of partitions with backtracking on the threshold (§4.2).

In: `Classes`, the rows of each with one owner, the ranks' shares. Out: `Greedy`. Access-bounded
partitions go, most accesses first, to the rank with the least lookup work for its share;
memory-bounded ones are striped in proportion to the memory that each rank has left. If the balance
asked for is not reached, the threshold is halved and both steps are done again, until it is, or
halving stops helping.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oper.base import native
from oper.base.arrays import Floats, Ints, as_tensor
from oper.base.portable_math import dot
from oper.cost.objective import degree_of_balance
from oper.plan.memories import ThresholdReason
from oper.planner.class_placement.partitions import Partitions, partitions
from oper.planner.problem.classes import Classes

# Halving from 0.1 % ten times is 0.0001 %: partitions of single hot rows, nothing left to gain.
MOST_HALVINGS = 10
# A halving that gains less than this in the worse balance is not followed by another.
LEAST_GAIN = 1e-4


@dataclass(frozen=True)
class Greedy:
    """The result of greedy placement and backtracking, before swaps. Run e lists `run_rows[e]`
    rows of class `run_class[e]`, with one owner, on rank `run_rank[e]`."""

    partitions: Partitions
    single: Ints  # [C] rows with one owner
    run_class: Ints
    run_rows: Ints
    run_rank: Ints
    dob_lookups: float
    dob_memory: float
    reason: ThresholdReason = ThresholdReason.MOST_HALVINGS

    def counts(self, ranks: int) -> Ints:
        """Return the listed rows of each class on each rank, [C, M]; the others are left to the
        stripes."""
        counts = np.zeros((len(self.single), ranks), dtype=np.int64)
        np.add.at(counts, (self.run_class, self.run_rank), self.run_rows)
        return counts


def place_greedily(
    classes: Classes,
    single: Ints,
    replica_bytes: Floats,
    shares: Floats,
    threshold: float,
    target: float,
) -> Greedy:
    """Place `single[c]` rows of each class by partitions; halve the threshold as long as it pays.

    `replica_bytes` [M] is memory already taken, `shares` [M] each rank's share of the work and of
    the memory, `target` the degree of balance to reach, min/max, of lookups and of memory.
    """
    best: Greedy | None = None
    for halving in range(MOST_HALVINGS + 1):
        now = _place_once(classes, single, replica_bytes, shares, threshold / 2**halving)
        worse = min(now.dob_lookups, now.dob_memory)
        if worse >= target:
            return replace(now, reason=ThresholdReason.BALANCED)
        if best is not None:
            gain = worse - min(best.dob_lookups, best.dob_memory)
            if gain < LEAST_GAIN:
                better = now if gain > 0 else best
                return replace(better, reason=ThresholdReason.NO_GAIN)
        best = now
    assert best is not None
    return best


def _place_once(
    classes: Classes, single: Ints, replica_bytes: Floats, shares: Floats, threshold: float
) -> Greedy:
    parts = partitions(classes, threshold)
    ranks = len(shares)
    listed = int(parts.listed.sum())  # the first ones
    runs = slice(0, int(np.searchsorted(parts.run_partition, listed)))
    run_class, run_rows = parts.run_class[runs], parts.run_rows[runs]
    # Replicated rows are placed already: they are the first rows of their class.
    before = _exclusive_cumsum_by(run_class, run_rows)
    replicated = (classes.rows - single)[run_class]
    run_rows = np.clip(before + run_rows - replicated, 0, None) - np.clip(
        before - replicated, 0, None
    )
    read = classes.S * classes.R
    run_work = run_rows * read[run_class]
    partition = parts.run_partition[runs]
    work = np.bincount(partition, weights=run_work, minlength=listed).astype(np.float64)
    usable = shares > 0
    inverse = np.where(usable, 1 / np.where(usable, shares, 1), 0)
    rank_of: Any = native.ops().least_loaded(as_tensor(work), as_tensor(inverse))
    run_rank = rank_of.numpy()[partition]

    lookups = np.bincount(run_rank, weights=run_work, minlength=ranks)
    listed_bytes = np.bincount(run_rank, weights=run_rows * classes.m[run_class], minlength=ranks)
    striped_bytes = float(dot(single, classes.m)) - listed_bytes.sum()
    left = _left(replica_bytes + listed_bytes, striped_bytes, shares)
    spread = left / left.sum() if left.sum() else shares
    lookups = lookups + spread * (float(dot(single, read)) - lookups.sum())
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
    """Return the bytes that each rank has left for striped rows, [M], if all memory in use follows
    `shares` [M]: `counts` [C, M] listed and `striped` [C] striped rows with one owner, and
    replicas."""
    return _left(replica_bytes + classes.memory_of(counts), float(dot(striped, classes.m)), shares)


def _left(held_bytes: Floats, striped_bytes: float, shares: Floats) -> Floats:
    total = held_bytes.sum() + striped_bytes
    return np.asarray(np.clip(total * shares / shares.sum() - held_bytes, 0, None))


def _exclusive_cumsum_by(key: Ints, values: Ints) -> Ints:
    """Return Σ of earlier values with the same key; keys ascend."""
    if not len(key):
        return values
    total = np.cumsum(values) - values
    first = np.r_[True, key[1:] != key[:-1]]
    start = total[first][np.cumsum(first) - 1]
    return np.asarray(total - start)
