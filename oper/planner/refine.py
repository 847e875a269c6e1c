"""Refining: exchanges of equal-byte runs that lower the largest T (beyond §4.2).

A row with one owner, or with given holders at inference, adds to every rank's T in proportion to
its weight w: column[g] seconds per byte for group g. Exchanging k rows of class a in group g with
k of class b, equal in width, in group h moves x = k·(w_a - w_b) bytes of traffic,
T += x·(column[h] - column[g]), and leaves every group's rows, and so all memory, as they were.
Each round takes the pair of groups whose best x lowers max T most and realises x by one run.
"""

from dataclasses import dataclass

import numpy as np

from oper.cost import Floats, Groups
from oper.planner.classes import Ints
from oper.topology import Topology

ROUNDS = 400
# Exchanges that lower T by less than this share are left: they are below the certificate's digits.
LEAST_GAIN = 1e-9
_PAIRS_TRIED = 8
_RUN_LENGTHS = [1] + [4**k for k in range(1, 16)]


def columns(groups: Groups, topology: Topology) -> Floats:
    """Seconds that each rank's T gains per byte of weight in each group, [G, M]."""
    ranks = np.arange(topology.ranks)
    cost = topology.link_cost
    link = np.where(groups.path == ranks, 0.0, cost[ranks, groups.path])
    served = np.stack([(groups.path == r).sum(axis=1) for r in ranks], axis=1)
    return link + served * np.diag(cost)


@dataclass
class Exchange:
    """Rounds of exchanges on `counts` [C, G], changed in place."""

    counts: Ints
    weight: Floats  # [C]
    width: Ints  # [C]
    columns: Floats  # [G, M]
    seconds: Floats  # [M], T of the ranks; changed in place
    rounds_made: int = 0

    def __post_init__(self) -> None:
        self._order = [
            order[np.argsort(self.weight[order], kind="stable")]
            for w in np.unique(self.width)
            for order in [np.flatnonzero(self.width == w)]
        ]

    def run(self, rounds: int = ROUNDS) -> None:
        """Exchange until no pair lowers max T, or `rounds` are made."""
        for _ in range(rounds):
            if not self._round():
                return
            self.rounds_made += 1

    def _round(self) -> bool:
        for g, h, amount in self._pairs():
            run = self._best_run(g, h, amount)
            if run is None:
                continue
            a, b, k = run
            moved = k * (self.weight[a] - self.weight[b])
            after = self.seconds + moved * (self.columns[h] - self.columns[g])
            if after.max() >= self.seconds.max() * (1 - LEAST_GAIN):
                continue
            self.counts[a, g] -= k
            self.counts[a, h] += k
            self.counts[b, h] -= k
            self.counts[b, g] += k
            self.seconds[:] = after
            return True
        return False

    def _pairs(self) -> list[tuple[int, int, float]]:
        """Pairs of groups, best first, with the weight whose exchange lowers max T most."""
        top = int(self.seconds.argmax())
        change = self.columns[None, :, :] - self.columns[:, None, :]  # [g, h, M]
        falls = change[:, :, top]
        with np.errstate(divide="ignore", invalid="ignore"):
            meet = (self.seconds[top] - self.seconds) / (change - falls[:, :, None])
        meet = np.where(change > falls[:, :, None], meet, np.inf)
        meet[:, :, top] = np.inf
        amount = meet.min(axis=2)
        lowered = np.where(falls < 0, self.seconds[top] + amount * falls, np.inf)
        lowered[~np.isfinite(amount)] = np.inf
        best = np.argsort(lowered, axis=None, kind="stable")[:_PAIRS_TRIED]
        groups = len(self.columns)
        return [
            (int(p // groups), int(p % groups), float(amount.flat[p]))
            for p in best
            if lowered.flat[p] < self.seconds[top] * (1 - LEAST_GAIN)
        ]

    def _best_run(self, g: int, h: int, amount: float) -> tuple[int, int, int] | None:
        """Classes a in g and b in h and a run length whose exchange moves nearest to `amount`."""
        best, found = amount * (1 - 1e-6), None
        for k in _RUN_LENGTHS:
            for order in self._order:
                give = order[self.counts[order, g] >= k]
                take = order[self.counts[order, h] >= k]
                if not len(give) or not len(take):
                    continue
                weights = self.weight[take]
                wanted = self.weight[give] - amount / k
                right = np.clip(np.searchsorted(weights, wanted), 0, len(take) - 1)
                for index in (right, np.maximum(right - 1, 0)):
                    moved = k * (self.weight[give] - weights[index])
                    error = np.abs(moved - amount)
                    at = int(error.argmin())
                    if error[at] < best:
                        best, found = float(error[at]), (int(give[at]), int(take[index[at]]), k)
            # Longer runs only while single rows are too light to move the amount.
            if found is not None and best <= 0.02 * amount:
                break
        return found
