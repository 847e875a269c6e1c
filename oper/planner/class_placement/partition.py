"""Partitions: runs of rows in order of access frequency, bounded in bytes and in accesses (§4.1).

In: `Classes` and a threshold. Out: `Partitions`. All rows of all tables are walked from the most
accessed on. An open partition closes when the next row would take it over `threshold` of all bytes
(it is memory-bounded) or over `threshold` of all accesses (access-bounded). A single row above the
limit is an access-bounded partition of its own. The walk is over classes of equal rows, so its time
does not depend on the number of rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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


class _Run(NamedTuple):
    """`rows` rows of a class in a partition, `repeat` times, each time in the next partition."""

    class_index: int
    rows: int
    partition: int
    repeat: int


class _Closed(NamedTuple):
    """A partition that is full, `repeat` times."""

    bytes: int
    accesses: int
    access_bounded: bool
    repeat: int


def partitions(classes: Classes, threshold: float) -> Partitions:
    """Cut the rows of `classes` at `threshold`, a share of all bytes and of all accesses."""
    limit_bytes = max(int(threshold * classes.total_bytes), 1)
    limit_accesses = max(int(threshold * classes.total_accesses), 1)
    # Equal partitions follow each other where a class has many rows: one entry stands for all.
    runs: list[_Run] = []
    closed: list[_Closed] = []
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
                closed.append(_Closed(held_bytes, held_accesses, by_accesses < by_bytes, 1))
                begun, held_bytes, held_accesses = begun + 1, 0, 0
                continue
            if held_bytes or take == left:
                runs.append(_Run(index, take, begun, 1))
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
            runs.append(_Run(index, take, begun, repeat))
            closed.append(_Closed(take * m, take * f, access_bounded, repeat))
            begun += repeat
            left -= repeat * take
    if held_bytes:
        closed.append(_Closed(held_bytes, held_accesses, False, 1))
    class_index, rows, partition, repeat_run = _columns(runs, len(_Run._fields))
    number = np.arange(repeat_run.sum()) - np.repeat(np.cumsum(repeat_run) - repeat_run, repeat_run)
    size_bytes, accesses, bounded, repeat_closed = _columns(closed, len(_Closed._fields))
    return Partitions(
        threshold=threshold,
        run_partition=np.repeat(partition, repeat_run) + number,
        run_class=np.repeat(class_index, repeat_run),
        run_rows=np.repeat(rows, repeat_run),
        bytes=np.repeat(size_bytes, repeat_closed),
        accesses=np.repeat(accesses, repeat_closed),
        access_bounded=np.repeat(bounded, repeat_closed).astype(bool),
    )


def _columns(entries: Sequence[tuple[int, ...]], fields: int) -> Ints:
    """The fields of all entries, [fields, entries]."""
    return np.array(entries, dtype=np.int64).reshape(-1, fields).T
