"""Partitions: runs of rows in order of access frequency, bounded in bytes and in accesses (§4.1).

In: `Classes` and a threshold. Out: `Partitions`. All rows of all tables are walked from the most
accessed on. An open partition closes when the next row would take it over `threshold` of all bytes
(it is memory-bounded) or over `threshold` of all accesses (access-bounded). A single row above the
limit is an access-bounded partition of its own. The walk is over classes of equal rows, so its time
does not depend on the number of rows.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints, as_int64
from oper.plan.memories import PartitionSummary
from oper.planner.problem.classes import Classes


@dataclass(frozen=True)
class Partitions:
    """P partitions as runs: run e puts `run_rows[e]` rows of class `run_class[e]` into
    `run_partition[e]`. Runs and partitions are in order of accesses, descending."""

    threshold: float
    run_partition: Ints
    run_class: Ints
    run_rows: Ints
    bytes: Ints
    accesses: Ints
    access_bounded: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.bytes)

    def floor(self, accesses: Ints) -> Ints:
        """Return the least accesses of a row in each listed partition, for classes of `accesses`
        [C]."""
        listed = int(self.listed.sum())
        last = np.searchsorted(self.run_partition, np.arange(listed), side="right") - 1
        return accesses[self.run_class[last]]

    def summary(self) -> PartitionSummary:
        """Return the number of partitions of each kind, and the bytes and accesses of the
        access-bounded ones as shares."""
        bounded = self.access_bounded
        return PartitionSummary(
            threshold=self.threshold,
            access_bounded=int(bounded.sum()),
            memory_bounded=int((~bounded).sum()),
            access_bounded_bytes=float(self.bytes[bounded].sum() / max(self.bytes.sum(), 1)),
            access_bounded_accesses=float(
                self.accesses[bounded].sum() / max(self.accesses.sum(), 1)
            ),
        )

    @cached_property
    def listed(self) -> NDArray[np.bool_]:
        """Mask of the partitions whose rows are listed one by one, [P]: all up to the last
        access-bounded one. The others are striped. With one width the two kinds do not interleave
        anyway."""
        last = np.flatnonzero(self.access_bounded)
        return np.arange(len(self)) <= (last[-1] if len(last) else -1)


@lru_cache(maxsize=4)
def partitions(classes: Classes, threshold: float) -> Partitions:
    """Cut the rows of `classes` at `threshold`, a share of all bytes and of all accesses; the same
    object while few cuts are in use, because each step of a plan asks for those of its
    threshold."""
    limit_bytes = max(int(threshold * classes.total_bytes), 1)
    limit_accesses = max(int(threshold * classes.total_accesses), 1)
    # Equal partitions follow each other if a class has many rows: one run stands for all.
    runs, closed = native.ops().cut_partitions(
        as_int64(classes.rows),
        as_int64(classes.m),
        as_int64(classes.accesses),
        limit_bytes,
        limit_accesses,
    )
    run_class, run_rows, partition, repeat = runs.numpy()
    number = np.arange(repeat.sum()) - np.repeat(np.cumsum(repeat) - repeat, repeat)
    size_bytes, accesses, access_bounded, times = closed.numpy()
    return Partitions(
        threshold=threshold,
        run_partition=np.repeat(partition, repeat) + number,
        run_class=np.repeat(run_class, repeat),
        run_rows=np.repeat(run_rows, repeat),
        bytes=np.repeat(size_bytes, times),
        accesses=np.repeat(accesses, times),
        access_bounded=np.repeat(access_bounded.astype(bool), times),
    )
