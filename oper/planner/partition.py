"""Partitions: runs of rows in order of access frequency, bounded in bytes and in accesses (§4.1).

All rows of all tables are walked from the most accessed on. An open partition closes when the
next row would take it over `threshold` of all bytes (it is memory-bounded) or over `threshold`
of all accesses (access-bounded). One row above the limit is an access-bounded partition of its
own. The walk is over classes of equal rows, so its time does not depend on the number of rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.planner.classes import Classes, Ints


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

    def matrix_rows(self, which: NDArray[np.bool_], classes: int) -> Ints:
        """Rows of each class, [C], in the partitions marked by `which` [P]."""
        runs = which[self.run_partition]
        rows = np.zeros(classes, dtype=np.int64)
        np.add.at(rows, self.run_class[runs], self.run_rows[runs])
        return rows

    @property
    def explicit(self) -> NDArray[np.bool_]:
        """[P]: all partitions up to the last access-bounded one; their rows are listed one by
        one. The others are striped. With one width the two kinds do not interleave anyway."""
        last = np.flatnonzero(self.access_bounded)
        return np.arange(len(self)) <= (last[-1] if len(last) else -1)


def partitions(classes: Classes, threshold: float) -> Partitions:
    """Cut the rows of `classes` at `threshold`, a share of all bytes and of all accesses."""
    limit_bytes = max(int(threshold * classes.total_bytes), 1)
    limit_accesses = max(int(threshold * classes.total_accesses), 1)
    runs: list[tuple[int, int, int]] = []
    closed: list[tuple[int, int, bool]] = []
    held_bytes = held_accesses = 0
    row_bytes = classes.m.astype(np.int64).tolist()
    row_accesses = classes.accesses.tolist()
    for index, left in enumerate(classes.rows.tolist()):
        m, f = row_bytes[index], row_accesses[index]
        while left:
            by_bytes = (limit_bytes - held_bytes) // m
            by_accesses = (limit_accesses - held_accesses) // f if f else left
            take = min(left, by_bytes, by_accesses)
            if take <= 0:
                if held_bytes:
                    closed.append((held_bytes, held_accesses, by_accesses < by_bytes))
                    held_bytes = held_accesses = 0
                    continue
                # The row alone is above a limit.
                runs.append((len(closed), index, 1))
                closed.append((m, f, f > limit_accesses))
                left -= 1
                continue
            runs.append((len(closed), index, take))
            held_bytes += take * m
            held_accesses += take * f
            left -= take
    if held_bytes:
        closed.append((held_bytes, held_accesses, False))
    run = np.array(runs, dtype=np.int64).reshape(-1, 3)
    return Partitions(
        threshold=threshold,
        run_partition=run[:, 0],
        run_class=run[:, 1],
        run_rows=run[:, 2],
        bytes=np.array([c[0] for c in closed], dtype=np.int64),
        accesses=np.array([c[1] for c in closed], dtype=np.int64),
        access_bounded=np.array([c[2] for c in closed], dtype=bool),
    )
