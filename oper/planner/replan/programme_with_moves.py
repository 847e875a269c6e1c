"""Rows worth moving if ranks differ, by a linear programme that includes the cost of moves.

In: `ClassProblem`, rows of each class by holder set, the price of moves. Out: the rows wanted. The
programme is that of `oper/planner/lp/restricted_master.py`, but rows already have places: of the
n[b, g] rows of bucket b that are in holder set g the share x[b, g, k] goes to set k,

    minimise T + Σ x[b, g, k] · n[b, g] · m[b] · price[g, k]   over x ≥ 0, Σ_k x[b, g, k] = 1

within the same limits, and with the aim "link" Z and then T in the place of T. It has columns for
rows that stay and for rows that go to their place in a plan with free moves; others are added while
they pay at the programme's own prices.

The last percents of the gain take most of the moved bytes, on links on which every move pays within
some hundred iterations. So if many rows would move, a second programme minimises the moves that
keep LAST_GAIN of the gain.

Rows in two memories of the same ranks have one programme: pairs, columns and limits are those of
both, and T of a rank is the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import csc_array, csr_array

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.cost.allreduce import METHODS, Method
from oper.cost.holder_sets import HolderSets
from oper.planner.class_placement.rounding import whole_by_shares
from oper.planner.lp.pricing import PricingItems, pricing_items
from oper.planner.lp.restricted_master import (
    FractionalPlacement,
    MemoryItems,
    ScaledLimits,
    set_keys,
    solve_items,
    solve_together,
)
from oper.planner.problem.problem import ClassProblem

LAST_GAIN = 0.03  # share of the gain that is given up to save its moves
_FEW = 0.05  # of all bytes: if less is moved, all moves are made
_ROUNDS = 40  # of new columns, at most
_TOLERANCE = 1e-5  # of the value, to the best bound on it


@dataclass(frozen=True)
class FreeMoves:
    """Best placement of the rows of each class if moves cost nothing."""

    items: PricingItems
    placement: FractionalPlacement

    @staticmethod
    def of(problem: ClassProblem) -> "FreeMoves":
        """Return the best placement by the AllReduce method with which the slowest rank takes the
        least time."""
        methods: tuple[Method, ...] = METHODS if problem.workload.training else ("none",)
        aim, limits = problem.asked.balance, (problem.capacity_bytes, problem.budget_bytes)
        placements = []
        for method in methods:
            items = pricing_items(problem.classes, problem.topology, problem.workload, method)
            solved = solve_items(items, problem.topology, *limits, aim)
            placements.append(FreeMoves(items, solved))
        return min(placements, key=lambda free: free.placement.seconds)

    @staticmethod
    def together(problems: Sequence[ClassProblem]) -> "list[FreeMoves]":
        """Return the best placement in each of several memories, with which the slowest rank takes
        the least time in all of them, in training."""
        choices = []
        for methods in product(*(METHODS if p.budget_bytes > 0 else METHODS[:1] for p in problems)):
            items = [
                pricing_items(p.classes, p.topology, p.workload, method)
                for p, method in zip(problems, methods, strict=True)
            ]
            solved = solve_together(
                [
                    MemoryItems(of, p.topology, p.capacity_bytes, p.budget_bytes)
                    for p, of in zip(problems, items, strict=True)
                ]
            )
            choices.append([FreeMoves(*each) for each in zip(items, solved, strict=True)])
        return min(choices, key=lambda free: free[0].placement.seconds)


class MovableRows(NamedTuple):
    """The rows of one memory: `counts` [C, K] by class and holder set, the `price` [K, K] of a
    row's move, in seconds per byte and iteration, and the best placement if moves cost nothing, in
    holder sets that are among `sets`."""

    problem: ClassProblem
    sets: HolderSets
    counts: Ints
    price: Floats
    free: FreeMoves


@dataclass(frozen=True)
class WantedRows:
    """Rows of each class by holder set, [C, K], and the multiple of its price that a further move
    must gain."""

    counts: Ints
    times_price: float


def counts_by_programme(memories: Sequence[MovableRows]) -> list[WantedRows]:
    """Return the rows wanted in each holder set of each memory."""
    programme = _Programme(memories)
    shares, times_price = programme.solve()
    return [
        WantedRows(pairs.whole_rows(of), times_price)
        for pairs, of in zip(programme.pairs, shares, strict=True)
    ]


class _Pairs:
    """Pairs of a bucket of one memory and a holder set that has rows of it.

    `at` are its limits' numbers among those of all memories.
    """

    def __init__(self, of: MovableRows, limits: ScaledLimits, at: Ints, limits_in_all: int) -> None:
        _, sets, counts, price, free = of
        self.of, self.limits, self.at, self.limits_in_all = of, limits, at, limits_in_all
        placement, items = free.placement, limits.rows
        rows = np.zeros((len(items), len(sets)))
        np.add.at(rows, placement.bucket, counts)
        self.bucket, self.before = np.nonzero(rows)
        self.rows = rows[self.bucket, self.before]
        number = np.arange(len(sets))
        every = np.meshgrid(np.arange(len(items)), number, indexing="ij")
        uses = limits.uses(sets, *(axis.ravel() for axis in every))
        self.uses = uses.reshape(*rows.shape, -1)  # of each limit, by a row
        aimed = limits.pair if limits.links_first else limits.second
        self.memory = self.rows * items.memory_bytes[self.bucket]
        self.moving = items.memory_bytes[self.bucket, None] * price[self.before] / aimed
        self.allowed = np.ones(len(sets), dtype=bool) if items.replicas else sets.copies == 1
        known = {key: k for k, key in enumerate(set_keys(sets))}
        wanted = np.zeros(rows.shape, dtype=bool)
        wanted[:, [known[key] for key in set_keys(placement.holder_sets)]] = placement.fraction > 0
        columns = wanted[self.bucket] | (self.before[:, None] == number)
        columns |= ~self.allowed[self.before, None] & (sets.copies == 1)
        self.columns = columns & self.allowed  # of each pair
        self.stay = np.eye(len(sets))[self.before]

    def whole_rows(self, shares: Floats) -> Ints:
        """Return the rows [C, K] by the shares of each pair's."""
        problem, sets, counts, _, free = self.of
        row_class, before = np.nonzero(counts)
        traffic = problem.classes.traffic_bytes(problem.workload)[row_class]
        order = np.argsort(-traffic, kind="stable")  # colder rows make up for rounding
        row_class, before, traffic = row_class[order], before[order], traffic[order]
        ordered = self.bucket * len(sets) + self.before
        pair = np.searchsorted(ordered, free.placement.bucket[row_class] * len(sets) + before)
        whole = whole_by_shares(counts[row_class, before], shares[pair], pair, traffic)
        rows = np.zeros_like(counts)
        np.add.at(rows, row_class, whole)
        return rows

    def cheapest(self, dual: Floats) -> tuple[Ints, float]:
        """Return the holder set of least cost for the rows of each pair at the prices of the
        limits, and the total cost there."""
        cost = dot(self.uses, dual[self.at])[self.bucket] + self.moving
        cost = np.where(self.allowed, cost, np.inf)
        return cost.argmin(axis=1), float(dot(self.rows, cost.min(axis=1)))

    def uses_by(self, shares: Floats) -> Floats:
        """Return the use of all limits by rows placed by `shares`."""
        uses = self.uses[self.bucket]
        return self.in_all(
            dot((self.rows[:, None] * shares).ravel(), uses.reshape(shares.size, -1))
        )

    def uses_of_columns(self) -> Floats:
        """Return the use of all limits by each column, [columns, limits]."""
        pair, after = np.nonzero(self.columns)
        return self.in_all(self.rows[pair, None] * self.uses[self.bucket[pair], after])

    def in_all(self, uses: Floats) -> Floats:
        """Return uses of this memory's limits as uses of all, in the last axis."""
        every = np.zeros((*uses.shape[:-1], self.limits_in_all))
        every[..., self.at] = uses
        return every


class _Programme:
    """The programme over the pairs of all memories."""

    def __init__(self, memories: Sequence[MovableRows]) -> None:
        items = [
            MemoryItems(
                of.free.items.merged(of.free.placement.bucket),
                of.problem.topology,
                of.problem.capacity_bytes,
                of.problem.budget_bytes,
            )
            for of in memories
        ]
        aim = memories[0].problem.asked.balance
        # Links are the aim in one memory only: the limits of both are seconds of ranks.
        second = sum(ScaledLimits(each, "time").second for each in items)
        limits = [ScaledLimits(each, aim, second) for each in items]
        self.first = limits[0]
        ranks = memories[0].problem.ranks
        own_limits = [len(each.limit) - ranks for each in limits]
        self.limit = np.concatenate([self.first.limit, *(of.limit[ranks:] for of in limits[1:])])
        self.aims = np.concatenate(
            [self.first.aims, np.zeros((sum(own_limits[1:]), len(self.first.weights)))]
        )
        self.pairs = []
        for n, (of, memory_limits) in enumerate(zip(memories, limits, strict=True)):
            at = np.r_[np.arange(ranks), ranks + sum(own_limits[:n]) + np.arange(own_limits[n])]
            self.pairs.append(_Pairs(of, memory_limits, at, len(self.limit)))

    def solve(self) -> tuple[list[Floats], float]:
        """Return the shares of each pair's rows that go to each holder set, [pairs, K] of each
        memory, and the multiple of its price that a further move must gain."""
        stay = [pairs.stay for pairs in self.pairs]
        best = self._all_that_pay()
        if best is None:
            return stay, 1.0
        moved, memory = 0.0, 0.0
        for pairs, shares in zip(self.pairs, best.shares, strict=True):
            moved += float(((shares * (pairs.moving > 0)).sum(axis=1) * pairs.memory).sum())
            memory += float(pairs.memory.sum())
        if moved <= _FEW * memory:
            return best.shares, 1.0
        now = self._aimed(stay)
        least = self._optimum(best.aimed + LAST_GAIN * max(now - best.aimed, 0.0))
        return (best.shares, 1.0) if least is None else (least.shares, least.times_price)

    def _all_that_pay(self) -> "_Optimum | None":
        """Return the optimum over all columns; None if the solver has none."""
        best, best_bound, best_dual = None, -np.inf, None
        for _ in range(_ROUNDS):
            optimum = self._optimum()
            if optimum is None:
                break
            best, best_dual = optimum, optimum.dual if best_dual is None else best_dual
            new = [pairs.columns.copy() for pairs in self.pairs]
            for prices in (best.dual / 4 + best_dual * 3 / 4, best.dual):
                cheapest = [pairs.cheapest(prices) for pairs in self.pairs]
                bound = sum(cost for _, cost in cheapest) - float(dot(prices, self.limit))
                if bound > best_bound:
                    best_bound, best_dual = bound, prices
                for columns, (at, _) in zip(new, cheapest, strict=True):
                    columns[np.arange(len(columns)), at] = True
            if best.value - best_bound <= _TOLERANCE * best.value:
                break
            if all((c == p.columns).all() for c, p in zip(new, self.pairs, strict=True)):
                break
            for columns, pairs in zip(new, self.pairs, strict=True):
                pairs.columns = columns
        return best

    def _aimed(self, shares: list[Floats]) -> float:
        """Return the programme's objective without the moves, for rows placed by `shares`."""
        uses = sum(pairs.uses_by(of) for pairs, of in zip(self.pairs, shares, strict=True))
        return float(dot(self.first.weights, -(self.aims * np.asarray(uses)[:, None]).min(axis=0)))

    def _optimum(self, most: float | None = None) -> "_Optimum | None":
        """Return the optimum over the columns so far, or the solution with the least moves among
        those whose aim is at most `most`; None if the solver has none."""
        columns = [np.nonzero(pairs.columns) for pairs in self.pairs]
        uses = np.concatenate([pairs.uses_of_columns() for pairs in self.pairs])
        first_pair = np.cumsum([0, *(len(pairs.rows) for pairs in self.pairs)])
        pair = np.concatenate([n + p for n, (p, _) in zip(first_pair, columns, strict=False)])
        moving = np.concatenate(
            [
                pairs.rows[p] * pairs.moving[p, after]
                for pairs, (p, after) in zip(self.pairs, columns, strict=True)
            ]
        )
        aims = [np.concatenate([uses.T, self.aims], axis=1)]
        bound, weights = self.limit, np.array(self.first.weights)
        if most is not None:
            aims.append(np.concatenate([np.zeros(len(pair)), weights])[None])
            bound, weights = np.append(bound, most), np.zeros(len(weights))
        result = linprog(
            np.concatenate([moving, weights]),
            A_ub=csc_array(np.concatenate(aims)),
            b_ub=bound,
            A_eq=csr_array(
                (np.ones(len(pair)), (pair, np.arange(len(pair)))),
                shape=(int(first_pair[-1]), len(pair) + len(weights)),
            ),
            b_eq=np.ones(int(first_pair[-1])),
            method="highs",
        )
        if result.status != 0:
            return None
        memory_shares, begin = [], 0
        for pairs, (p, after) in zip(self.pairs, columns, strict=True):
            shares = np.zeros(pairs.columns.shape)
            shares[p, after] = np.maximum(result.x[begin : begin + len(p)], 0.0)
            memory_shares.append(shares)
            begin += len(p)
        dual = np.maximum(-result.ineqlin.marginals, 0.0)
        aimed = float(dot(self.first.weights, result.x[len(pair) :]))
        saved = float(dual[-1]) if most is not None else 1.0  # moves, by a second of the aim
        times_price = 1 / saved if 0 < saved < 1 else 1.0
        return _Optimum(
            float(result.fun), aimed, memory_shares, dual[: len(self.limit)], times_price
        )


class _Optimum(NamedTuple):
    """A solution of the programme: its value with and without the moves, the shares of each pair,
    [pairs, K] of each memory, the prices of the limits, and the multiple of its price that a
    further move must gain."""

    value: float
    aimed: float
    shares: list[Floats]
    dual: Floats
    times_price: float
