"""Partitions: runs of rows in order of access frequency, bounded in bytes and in accesses (§4.1).

All rows of all tables are walked from the most accessed on. An open partition closes when the
next row would take it over `threshold` of all bytes (it is memory-bounded) or over `threshold`
of all accesses (access-bounded). One row above the limit is an access-bounded partition of its
own. The walk is over classes of equal rows, so its time does not depend on the number of rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
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
        """Least accesses of a row in each listed partition, for classes of `accesses` [C]."""
        listed = int(self.explicit.sum())
        last = np.searchsorted(self.run_partition, np.arange(listed), side="right") - 1
        return accesses[self.run_class[last]]

    def summary(self) -> dict[str, Any]:
        """How many of each kind there are, and what the access-bounded ones hold, as shares."""
        bounded = self.access_bounded
        return {
            "threshold": self.threshold,
            "access_bounded": int(bounded.sum()),
            "memory_bounded": int((~bounded).sum()),
            "access_bounded_bytes": float(self.bytes[bounded].sum() / max(self.bytes.sum(), 1)),
            "access_bounded_accesses": float(
                self.accesses[bounded].sum() / max(self.accesses.sum(), 1)
            ),
        }

    @cached_property
    def explicit(self) -> NDArray[np.bool_]:
        """[P]: all partitions up to the last access-bounded one; their rows are listed one by
        one. The others are striped. With one width the two kinds do not interleave anyway."""
        last = np.flatnonzero(self.access_bounded)
        return np.arange(len(self)) <= (last[-1] if len(last) else -1)


def partitions(classes: Classes, threshold: float) -> Partitions:
    """Cut the rows of `classes` at `threshold`, a share of all bytes and of all accesses."""
    limit_bytes = max(int(threshold * classes.total_bytes), 1)
    limit_accesses = max(int(threshold * classes.total_accesses), 1)
    # Equal partitions follow each other where a class has many rows: each entry stands for
    # `repeat` of them. Runs are (class, rows, repeat), partitions (bytes, accesses, kind, repeat).
    runs: list[tuple[int, int, int, int]] = []
    closed: list[tuple[int, int, bool, int]] = []
    begun = held_bytes = held_accesses = 0
    row_bytes = classes.m.astype(np.int64).tolist()
    row_accesses = classes.accesses.tolist()
    for index, left in enumerate(classes.rows.tolist()):
        m, f = row_bytes[index], row_accesses[index]
        while left:
            by_bytes = (limit_bytes - held_bytes) // m
            by_accesses = (limit_accesses - held_accesses) // f if f else left
            take = min(left, by_bytes, by_accesses)
            if take <= 0 and held_bytes:
                closed.append((held_bytes, held_accesses, by_accesses < by_bytes, 1))
                begun, held_bytes, held_accesses = begun + 1, 0, 0
                continue
            if held_bytes or take == left:
                runs.append((index, take, begun, 1))
                held_bytes += take * m
                held_accesses += take * f
                left -= take
                continue
            # A row above a limit on its own is a partition, else as many as fit, again and again;
            # the last rows of the class stay for the partition that goes on with the next class.
            kind = f > limit_accesses if take <= 0 else by_accesses < by_bytes
            take = max(take, 1)
            repeat = left // take if take * m > limit_bytes or f * take > limit_accesses else 0
            repeat = repeat or (left - 1) // take
            runs.append((index, take, begun, repeat))
            closed.append((take * m, take * f, kind, repeat))
            begun += repeat
            left -= repeat * take
    if held_bytes:
        closed.append((held_bytes, held_accesses, False, 1))
    run = np.array(runs, dtype=np.int64).reshape(-1, 4)
    repeats = run[:, 3]
    turn = np.arange(repeats.sum()) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    of_closed = np.array([c[3] for c in closed], dtype=np.int64)

    def each(column: int) -> Ints:
        return np.repeat(np.array([c[column] for c in closed], dtype=np.int64), of_closed)

    return Partitions(
        threshold=threshold,
        run_partition=np.repeat(run[:, 2], repeats) + turn,
        run_class=np.repeat(run[:, 0], repeats),
        run_rows=np.repeat(run[:, 1], repeats),
        bytes=each(0),
        accesses=each(1),
        access_bounded=each(2).astype(bool),
    )
