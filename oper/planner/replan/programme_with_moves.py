"""Where ranks differ: the rows worth moving, by a linear programme that knows what moves cost.

In: `ClassProblem`, rows of each class by holder set, the price of moves. Out: the rows wanted. The
programme is that of `oper/planner/lp/restricted_master.py`, but that rows are somewhere already: of
the n[b, g] rows of bucket b that are in holder set g the share x[b, g, k] goes to set k,

    minimise T + Σ x[b, g, k] · n[b, g] · m[b] · price[g, k]   over x ≥ 0, Σ_k x[b, g, k] = 1

within the same limits, and with the aim "link" Z and then T in the place of T. It has columns for
the rows that stay and for those that go where they would be if moves cost nothing; others are added
while they pay at the programme's own prices.

The last percents of what moves gain take most of their bytes, on links where every move pays within
some hundred iterations. So where many rows would move, a second programme has the least moves that
leave LAST_GAIN of it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array, csr_array

from oper.base.arrays import Floats, Ints
from oper.cost.allreduce import METHODS, Method
from oper.cost.holder_sets import HolderSets
from oper.planner.class_placement.rounding import whole_by_shares
from oper.planner.lp.pricing import PricingItems, pricing_items
from oper.planner.lp.restricted_master import (
    FractionalPlacement,
    ScaledLimits,
    set_keys,
    solve_items,
)
from oper.planner.problem.problem import ClassProblem

LAST_GAIN = 0.03  # of what moves gain: the moves that it would take are not made
_FEW = 0.05  # of all bytes: where less is moved, all of it is
_ROUNDS = 40  # of new columns, at most
_TOLERANCE = 1e-5  # of the value, to the best bound on it


@dataclass(frozen=True)
class FreeMoves:
    """Where the rows of each class would be if moves cost nothing."""

    items: PricingItems
    placement: FractionalPlacement

    @staticmethod
    def of(problem: ClassProblem) -> "FreeMoves":
        """By the AllReduce method with which the slowest rank takes the least time."""
        methods: tuple[Method, ...] = METHODS if problem.workload.training else ("none",)
        aim, limits = problem.asked.balance, (problem.capacity_bytes, problem.budget_bytes)
        found = []
        for method in methods:
            items = pricing_items(problem.classes, problem.topology, problem.workload, method)
            solved = solve_items(items, problem.topology, *limits, aim)
            found.append(FreeMoves(items, solved))
        return min(found, key=lambda free: free.placement.seconds)


@dataclass(frozen=True)
class WantedRows:
    """Rows of each class by holder set, [C, K], and how many times its price a further move must
    gain."""

    counts: Ints
    times_price: float


def counts_by_programme(
    problem: ClassProblem, sets: HolderSets, counts: Ints, price: Floats, free: FreeMoves
) -> WantedRows:
    """The rows wanted in each of `sets`, which have those of `free` among them, from `counts`
    [C, K] and `price` [K, K], the seconds per byte and iteration of a row's move."""
    programme = _Programme(problem, sets, counts, price, free)
    pair_shares, times_price = programme.solve()
    row_class, before = np.nonzero(counts)
    traffic = problem.classes.traffic_bytes(problem.workload)[row_class]
    order = np.argsort(-traffic, kind="stable")  # what rounding takes is made up for by colder rows
    row_class, before, traffic = row_class[order], before[order], traffic[order]
    pair = programme.pair_of(free.placement.bucket[row_class], before)
    whole = whole_by_shares(counts[row_class, before], pair_shares[pair], pair, traffic)
    found = np.zeros_like(counts)
    np.add.at(found, row_class, whole)
    return WantedRows(found, times_price)


class _Programme:
    """The programme over pairs of a bucket and a holder set that has rows of it."""

    def __init__(
        self, problem: ClassProblem, sets: HolderSets, counts: Ints, price: Floats, free: FreeMoves
    ) -> None:
        placement = free.placement
        items = free.items.merged(placement.bucket)
        rows = np.zeros((len(items), len(sets)))
        np.add.at(rows, placement.bucket, counts)
        self._sets = len(sets)
        self.bucket, self.before = np.nonzero(rows)
        self.rows = rows[self.bucket, self.before]
        self.limits = ScaledLimits(
            items,
            problem.topology,
            problem.capacity_bytes,
            problem.budget_bytes,
            problem.asked.balance,
        )
        number = np.arange(len(sets))
        every = np.meshgrid(np.arange(len(items)), number, indexing="ij")
        uses = self.limits.uses(sets, *(axis.ravel() for axis in every))
        self.uses = uses.reshape(*rows.shape, -1)  # of each limit, by a row
        aimed = self.limits.pair if self.limits.links_first else self.limits.second
        self.memory = self.rows * items.memory_bytes[self.bucket]
        self.moving = items.memory_bytes[self.bucket, None] * price[self.before] / aimed
        self.allowed = np.ones(len(sets), dtype=bool) if items.replicas else sets.copies == 1
        known = {key: k for k, key in enumerate(set_keys(sets))}
        wanted = np.zeros(rows.shape, dtype=bool)
        wanted[:, [known[key] for key in set_keys(placement.holder_sets)]] = placement.fraction > 0
        columns = wanted[self.bucket] | (self.before[:, None] == number)
        columns |= ~self.allowed[self.before, None] & (sets.copies == 1)
        self.columns = columns & self.allowed  # of each pair

    def pair_of(self, bucket: Ints, before: Ints) -> Ints:
        """The number of each pair."""
        ordered = self.bucket * self._sets + self.before
        return np.searchsorted(ordered, bucket * self._sets + before)

    def solve(self) -> tuple[Floats, float]:
        """The shares of each pair's rows that go to each holder set, [pairs, K], and how many times
        its price a further move must gain."""
        stay = np.eye(self._sets)[self.before]
        best = self._all_that_pay()
        if best is None:
            return stay, 1.0
        moved = (best.shares * (self.moving > 0)).sum(axis=1) * self.memory
        if moved.sum() <= _FEW * self.memory.sum():
            return best.shares, 1.0
        now = self._aimed(stay)
        least = self._optimum(best.aimed + LAST_GAIN * max(now - best.aimed, 0.0))
        return (best.shares, 1.0) if least is None else (least.shares, least.times_price)

    def _all_that_pay(self) -> "_Optimum | None":
        """The optimum over all columns; None where the solver has none."""
        best, best_bound, best_dual = None, -np.inf, None
        for _ in range(_ROUNDS):
            found = self._optimum()
            if found is None:
                break
            best, best_dual = found, found.dual if best_dual is None else best_dual
            columns = self.columns.copy()
            for prices in (best.dual / 4 + best_dual * 3 / 4, best.dual):
                cheapest, bound = self._cheapest(prices)
                if bound > best_bound:
                    best_bound, best_dual = bound, prices
                columns[np.arange(len(columns)), cheapest] = True
            if best.value - best_bound <= _TOLERANCE * best.value:
                break
            if (columns == self.columns).all():
                break
            self.columns = columns
        return best

    def _cheapest(self, dual: Floats) -> tuple[Ints, float]:
        """Where the rows of each pair cost least at the prices of the limits, and the bound on the
        value that this gives."""
        cost = (self.uses @ dual)[self.bucket] + self.moving
        cost = np.where(self.allowed, cost, np.inf)
        return cost.argmin(axis=1), float(self.rows @ cost.min(axis=1) - dual @ self.limits.limit)

    def _aimed(self, shares: Floats) -> float:
        """What the programme makes small but for the moves, where the rows are by `shares`."""
        uses = np.einsum("n,nk,nkl->l", self.rows, shares, self.uses[self.bucket])
        return float(self.limits.weights @ -(self.limits.aims * uses[:, None]).min(axis=0))

    def _optimum(self, most: float | None = None) -> "_Optimum | None":
        """The optimum over the columns so far, or the one with the least moves of those that make
        the aim at most `most`; None where the solver has none."""
        limits = self.limits
        pair, after = np.nonzero(self.columns)
        uses = self.rows[pair, None] * self.uses[self.bucket[pair], after]
        moving = self.rows[pair] * self.moving[pair, after]
        aims = [np.concatenate([uses.T, limits.aims], axis=1)]
        bound, weights = limits.limit, np.array(limits.weights)
        if most is not None:
            aims.append(np.concatenate([np.zeros(len(pair)), weights])[None])
            bound, weights = np.append(bound, most), np.zeros(len(weights))
        result = linprog(
            np.concatenate([moving, weights]),
            A_ub=csc_array(np.concatenate(aims)),
            b_ub=bound,
            A_eq=csr_array(
                (np.ones(len(pair)), (pair, np.arange(len(pair)))),
                shape=(len(self.rows), len(pair) + len(weights)),
            ),
            b_eq=np.ones(len(self.rows)),
            method="highs",
        )
        if result.status != 0:
            return None
        shares = np.zeros(self.columns.shape)
        shares[pair, after] = np.maximum(result.x[: len(pair)], 0.0)
        dual = np.maximum(-result.ineqlin.marginals, 0.0)
        aimed = float(np.dot(limits.weights, result.x[len(pair) :]))
        saved = float(dual[-1]) if most is not None else 1.0  # moves, by a second of the aim
        times_price = 1 / saved if 0 < saved < 1 else 1.0
        return _Optimum(float(result.fun), aimed, shares, dual[: len(limits.limit)], times_price)


class _Optimum(NamedTuple):
    """A solution of the programme: its value with and without the moves, the shares of each pair,
    the prices of the limits, and how many times its price a further move must gain."""

    value: float
    aimed: float
    shares: Floats
    dual: Floats
    times_price: float
