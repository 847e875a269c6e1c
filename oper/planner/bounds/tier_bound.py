"""The certificate of a plan with a tier, from those of its two parts.

In: the problems and certificates of the tables on devices and of those in the tier. Out: the
`Certificate` of both. Each rank r takes T_r = a_r + b_r, a for the rows on devices and b for those
in the tier. Each part can be placed whatever the other does, so that for every plan

    max_r T_r ≥ max_r a_r ≥ A     and     max_r T_r ≥ max_r b_r ≥ B,

with A and B the parts' own bounds. Their sum is no bound: the rank with the largest a need not be
that with the largest b. But for any weights λ ≥ 0 of the ranks with Σλ = 1

    max_r T_r ≥ Σ_r λ_r (a_r + b_r) = Σ_r λ_r a_r + Σ_r λ_r b_r ≥ A(λ) + B(λ)

for any bounds A(λ), B(λ) on the weighted means. The Lagrangian at the prices λ on the ranks' times
is one of them, whatever its other prices are (lagrangian_bound.py). Tried are equal weights, which
are best where ranks are alike, and elsewhere those that are best for either part, and their mean.
The largest of all is taken.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats
from oper.planner.bounds.certificate import Certificate
from oper.planner.bounds.lagrangian_bound import (
    Bound,
    good_prices,
    homogeneous_prices,
    lagrangian,
    usable_methods,
)
from oper.planner.lp.pricing import DualPrices, PricingItems, pricing_items
from oper.planner.problem.problem import ClassProblem


class Certified(NamedTuple):
    """The problem of one part, and how good its own placement is."""

    problem: ClassProblem
    certificate: Certificate


def certify_with_tier(
    devices: Certified | None, tier: Certified, objective_seconds: float
) -> Certificate:
    """The certificate of a plan of both parts, whose slowest rank takes `objective_seconds`."""
    parts = [part for part in (devices, tier) if part is not None]
    best = max((part.certificate for part in parts), key=lambda found: found.bound.seconds)
    means = max(
        sum(weighted_bound(part.problem, weights) for part in parts)
        for weights in _weights([part.problem for part in parts])
    )
    if means > best.bound.seconds:
        return Certificate(objective_seconds, Bound(means, None))
    bound = Bound(best.bound.seconds, None, best.bound.note)
    return Certificate(objective_seconds, bound, best.hot_row)


def weighted_bound(problem: ClassProblem, weights: Floats) -> float:
    """No plan within the limits has a smaller mean of the ranks' times, in seconds, by weights that
    add up to 1, [M]."""
    least = []
    for rows, prices in _priced(problem, float(np.ptp(weights)) > 0):
        found = DualPrices(weights, prices.capacity, prices.budget)
        limits = (problem.capacity_bytes, problem.budget_bytes)
        least.append(lagrangian(rows, problem.topology, found, *limits) + rows.latency)
    return min(least)


def _priced(problem: ClassProblem, own: bool) -> Iterator[tuple[PricingItems, DualPrices]]:
    """The items of each AllReduce method that a plan may use, with prices for Σλ = 1: of ranks that
    are alike, or their `own`. Prices that are not the best ones give a weaker bound, and a bound
    still."""
    topology, capacity, budget = problem.topology, problem.capacity_bytes, problem.budget_bytes
    for method in usable_methods(problem.workload, problem.ranks, budget):
        rows = pricing_items(problem.classes, topology, problem.workload, method)
        find = good_prices if own else homogeneous_prices
        prices = find(rows, topology, capacity, budget)
        scale = float(prices.rank.sum())
        if scale <= 0:
            prices, scale = homogeneous_prices(rows, topology, capacity, budget), 1.0
        yield rows, DualPrices(prices.rank / scale, prices.capacity / scale, prices.budget / scale)


def _weights(problems: list[ClassProblem]) -> list[Floats]:
    """Weights of the ranks to try, [M] each."""
    ranks = problems[0].ranks
    even = np.full(ranks, 1 / ranks)
    if all(each.topology.is_homogeneous(each.capacity_bytes) for each in problems):
        return [even]
    # Of each part, those of the method that its bound is of.
    best = []
    for problem in problems:
        limits = (problem.capacity_bytes, problem.budget_bytes)
        _, _, weights = min(
            (lagrangian(rows, problem.topology, prices, *limits) + rows.latency, n, prices.rank)
            for n, (rows, prices) in enumerate(_priced(problem, True))
        )
        best.append(weights)
    return [even, *best, np.asarray(np.mean(best, axis=0))]
