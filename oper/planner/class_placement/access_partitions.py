"""Partitions: runs of rows in order of access frequency, bounded in bytes and in accesses (§4.1).

In: `Classes` and a threshold. Out: `Partitions`. All rows of all tables are walked from the most
accessed on. An open partition closes when the next row would take it over `threshold` of all bytes
(it is memory-bounded) or over `threshold` of all accesses (access-bounded). A single row above the
limit is an access-bounded partition of its own. The walk is over classes of equal rows, so its time
does not depend on the number of rows.
"""

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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
        listed = int(self.listed.sum())
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
    def listed(self) -> NDArray[np.bool_]:
        """Whether a partition's rows are listed one by one, [P]: up to the last access-bounded
        one. The others are striped. With one width the two kinds do not interleave anyway."""
        last = np.flatnonzero(self.access_bounded)
        return np.arange(len(self)) <= (last[-1] if len(last) else -1)


@dataclass(frozen=True)
class _Runs:
    """Run e puts `rows[e]` rows of a class in partition `partition[e]`, and in each of the
    `repeat[e] - 1` partitions after it. Lists, as thousands of tuples keep the collector busy."""

    class_index: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    partition: list[int] = field(default_factory=list)
    repeat: list[int] = field(default_factory=list)

    def add(self, class_index: int, rows: int, partition: int, repeat: int) -> None:
        self.class_index.append(class_index)
        self.rows.append(rows)
        self.partition.append(partition)
        self.repeat.append(repeat)


@dataclass(frozen=True)
class _Closed:
    """Partitions that are full, each of them `repeat[n]` times in a row."""

    bytes: list[int] = field(default_factory=list)
    accesses: list[int] = field(default_factory=list)
    access_bounded: list[bool] = field(default_factory=list)
    repeat: list[int] = field(default_factory=list)

    def add(self, size_bytes: int, accesses: int, access_bounded: bool, repeat: int) -> None:
        self.bytes.append(size_bytes)
        self.accesses.append(accesses)
        self.access_bounded.append(access_bounded)
        self.repeat.append(repeat)


@lru_cache(maxsize=4)
def partitions(classes: Classes, threshold: float) -> Partitions:
    """Cut the rows of `classes` at `threshold`, a share of all bytes and of all accesses; the same
    object while few cuts are in use, as each step of a plan asks for those of its threshold."""
    limit_bytes = max(int(threshold * classes.total_bytes), 1)
    limit_accesses = max(int(threshold * classes.total_accesses), 1)
    # Equal partitions follow each other where a class has many rows: one entry stands for all.
    runs, closed = _Runs(), _Closed()
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
                closed.add(held_bytes, held_accesses, by_accesses < by_bytes, 1)
                begun, held_bytes, held_accesses = begun + 1, 0, 0
                continue
            if held_bytes or take == left:
                runs.add(index, take, begun, 1)
                held_bytes += take * m
                held_accesses += take * f
                left -= take
                continue
            # A row above a limit is a partition of its own; of other rows, as many as fit, again
            # and again. The last rows of the class share a partition with the next class.
            access_bounded = f > limit_accesses if take <= 0 else by_accesses < by_bytes
            take = max(take, 1)
            repeat = left // take if take * m > limit_bytes or f * take > limit_accesses else 0
            repeat = repeat or (left - 1) // take
            runs.add(index, take, begun, repeat)
            closed.add(take * m, take * f, access_bounded, repeat)
            begun += repeat
            left -= repeat * take
    if held_bytes:
        closed.add(held_bytes, held_accesses, False, 1)
    repeat_run, repeat_closed = _ints(runs.repeat), _ints(closed.repeat)
    number = np.arange(repeat_run.sum()) - np.repeat(np.cumsum(repeat_run) - repeat_run, repeat_run)
    return Partitions(
        threshold=threshold,
        run_partition=np.repeat(_ints(runs.partition), repeat_run) + number,
        run_class=np.repeat(_ints(runs.class_index), repeat_run),
        run_rows=np.repeat(_ints(runs.rows), repeat_run),
        bytes=np.repeat(_ints(closed.bytes), repeat_closed),
        accesses=np.repeat(_ints(closed.accesses), repeat_closed),
        access_bounded=np.repeat(np.array(closed.access_bounded, dtype=bool), repeat_closed),
    )


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
