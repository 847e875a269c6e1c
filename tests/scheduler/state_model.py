"""The state model of Herald's Appendix A as it is written down, one row and worker at a time.

Nothing here is shared with the kernels: states are fractions s(row, worker) in dictionaries, with
one for the tier. 1 is the latest; a row that c workers trained at once is 1/c in each of them.
"""

from collections import defaultdict
from fractions import Fraction
from typing import Any

ONE, NONE = Fraction(1), Fraction(0)


class StateModel:
    """M caches of `capacity` rows, with on-demand pushes or, if not, full ones."""

    def __init__(self, workers: int, capacity: int, on_demand: bool, eviction: str) -> None:
        self.workers, self.capacity = range(workers), capacity
        self.on_demand, self.eviction = on_demand, eviction
        self.state: dict[Any, Fraction] = defaultdict(lambda: NONE)  # (row, worker)
        self.tier: dict[int, Fraction] = defaultdict(lambda: ONE)
        # Of each cache, row -> its last use, its uses and its mark.
        self.cached: list[dict[int, list[int]]] = [{} for _ in self.workers]
        self.uses = [0] * workers
        self.target = [1] * workers

    def iteration(self, samples: list[list[int]], assignment: list[int]) -> list[list[int]]:
        """Miss pulls, update pushes, evict pushes and hits of each worker."""
        of_worker = [
            [row for sample, w in zip(samples, assignment, strict=True) if w == j for row in sample]
            for j in self.workers
        ]
        # Workers come one after the other, each with its samples in order.
        rows = list(dict.fromkeys(row for of_one in of_worker for row in of_one))
        trained = [set(of_one) for of_one in of_worker]
        moved = [[0, 0, 0, 0] for _ in self.workers]
        if self.on_demand:
            for row in rows:
                for j in self.workers:
                    s = self.state[row, j]
                    others = any(row in trained[k] for k in self.workers if k != j)
                    if NONE < s < ONE or (s == ONE and self.tier[row] < ONE and others):
                        moved[j][1] += self.push(row, j)
        for j in self.workers:
            for row in rows:
                if row in trained[j]:
                    self.read(row, j, trained[j], moved[j])
        for row in rows:
            trainers = [j for j in self.workers if row in trained[j]]
            for j in self.workers:
                self.state[row, j] = Fraction(1, len(trainers)) if j in trainers else NONE
            self.tier[row] = NONE
        if not self.on_demand:
            for j in self.workers:
                moved[j][1] += sum(self.push(row, j) for row in sorted(trained[j]))
        for j in self.workers:
            marks = [mark for _, _, mark in self.cached[j].values()]
            if len(marks) == self.capacity and set(marks) == {self.target[j]}:
                self.target[j] += 1
        return moved

    def push(self, row: int, j: int) -> int:
        """The tier gets the worker's part; a partial copy is worth nothing then."""
        s = self.state[row, j]
        self.tier[row] = min(ONE, self.tier[row] + s)
        if s < ONE:
            self.state[row, j] = NONE
        return 1

    def read(self, row: int, j: int, pinned: set[int], moved: list[int]) -> None:
        mine = self.cached[j]
        if self.state[row, j] == ONE:
            moved[3] += 1
        else:
            moved[0] += 1
            if row not in mine and len(mine) == self.capacity:
                self.evict(j, pinned, moved)
            assert self.tier[row] == ONE, "a pull of a row that the tier has not got"
            self.state[row, j] = ONE
        self.uses[j] += 1
        mine[row] = [self.uses[j], mine.get(row, [0, 0, 0])[1] + 1, self.target[j]]

    def evict(self, j: int, pinned: set[int], moved: list[int]) -> None:
        mine = self.cached[j]

        def priority(row: int) -> Any:
            last, uses, mark = mine[row]
            if self.eviction == "lru":
                return last
            if self.eviction == "lfu":
                return uses, last
            return self.state[row, j] == ONE, mark, uses, last  # emark

        victim = min((row for row in mine if row not in pinned), key=priority)
        s = self.state[victim, j]
        if NONE < s < ONE or (s == ONE and self.tier[victim] < ONE):
            moved[2] += self.push(victim, j)
        self.state[victim, j] = NONE
        del mine[victim]
