"""HET's protocols as they are written down, one row and worker at a time, with LRU.

Nothing here is shared with the kernels. Beside the clocks, which decide what moves, the tier and
each copy have the very updates that they contain, so that what a read lacks is a set.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from oper.scheduler.cache_settings import Synchronisation


class Update(NamedTuple):
    """One worker's update of a row in one iteration, and what it counts on the clocks."""

    iteration: int
    worker: int
    weight: int


@dataclass
class Copy:
    """A cached row."""

    last_use: int
    start: int = 0
    now: int = 0
    pending: set[Update] = field(default_factory=set)
    contents: set[Update] = field(default_factory=set)
    fetched: bool = False


class StalenessModel:
    """M caches of `capacity` rows."""

    def __init__(self, workers: int, capacity: int, sync: Synchronisation) -> None:
        self.workers, self.capacity, self.s = range(workers), capacity, sync.staleness
        self.exact, self.by_frequency = sync.kind != "het-printed", sync.kind == "het"
        self.clock: dict[int, int] = defaultdict(int)
        self.tier: dict[int, set[Update]] = defaultdict(set)
        self.updates: dict[int, set[Update]] = defaultdict(set)  # by everyone
        self.cached: list[dict[int, Copy]] = [{} for _ in self.workers]
        self.iterations = self.uses = 0
        self.most_weight = 0  # of the updates that one read lacked

    def iteration(self, samples: list[list[int]], assignment: list[int]) -> list[list[int]]:
        """Miss pulls, update pushes, evict pushes, hits, wrong reads and the lag of each worker."""
        mine = [
            [sample for sample, w in zip(samples, assignment, strict=True) if w == j]
            for j in self.workers
        ]
        trained = [{row for sample in of_worker for row in sample} for of_worker in mine]
        rows = list(dict.fromkeys(row for part in mine for sample in part for row in sample))
        moved = [[0] * 6 for _ in self.workers]
        reads = [(j, row) for j in self.workers for row in rows if row in trained[j]]
        for j, row in reads:
            self.read(row, j, trained[j], moved[j])
        for j, row in reads:
            copy = self.cached[j][row]
            if copy.fetched:
                copy.contents, copy.fetched = set(self.tier[row]), False
            lacking = self.updates[row] - copy.contents
            moved[j][4] += bool(lacking)
            moved[j][5] = max(moved[j][5], len(lacking))
            self.most_weight = max(self.most_weight, sum(update.weight for update in lacking))
        for j, row in reads:
            readers = sum(row in sample for sample in samples)
            weight = max(1, math.floor(1000 * Fraction(readers, len(samples))))
            self.write(
                row, j, Update(self.iterations, j, weight if self.by_frequency else 1), moved
            )
        self.iterations += 1
        return moved

    def read(self, row: int, j: int, pinned: set[int], moved: list[int]) -> None:
        mine = self.cached[j]
        copy = mine.get(row)
        self.uses += 1
        if copy and copy.now <= copy.start + self.s and self.clock[row] <= copy.now + self.s:
            moved[3] += 1
            copy.last_use = self.uses
            return
        if copy:
            moved[1] += self.push(row, j)
        elif len(mine) == self.capacity:
            victim = min((r for r in mine if r not in pinned), key=lambda r: mine[r].last_use)
            moved[2] += self.push(victim, j)
            del mine[victim]
        moved[0] += 1
        clock = self.clock[row]
        mine[row] = Copy(self.uses, clock, clock, fetched=True)

    def write(self, row: int, j: int, update: Update, moved: list[list[int]]) -> None:
        copy = self.cached[j][row]
        copy.now += update.weight
        copy.pending.add(update)
        copy.contents.add(update)
        self.updates[row].add(update)
        if self.exact and sum(waiting.weight for waiting in copy.pending) > self.s:
            moved[j][1] += self.push(row, j)
            copy.start = copy.now

    def push(self, row: int, j: int) -> bool:
        """Whether there was something to push."""
        copy = self.cached[j][row]
        if not copy.pending:
            return False
        if self.exact:
            self.clock[row] += sum(update.weight for update in copy.pending)
        else:
            self.clock[row] = max(self.clock[row], copy.now)
        self.tier[row] |= copy.pending
        copy.pending = set()
        return True
