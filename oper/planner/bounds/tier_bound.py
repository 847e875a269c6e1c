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

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats
from oper.plan.certificate import Certificate
from oper.planner.bounds.lagrangian_bound import (
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


def certify_together(
    devices: Certified | None, tier: Certified, objective_seconds: float
) -> Certificate:
    """The certificate of a plan of both parts, whose slowest rank takes `objective_seconds`."""
    if devices is None:
        return tier.certificate.of(objective_seconds)
    parts = (devices, tier)
    alike = all(p.problem.topology.is_homogeneous(p.problem.capacity_bytes) for p in parts)
    bounds = [WeightedBounds.of(part.problem, alike) for part in parts]
    weights = [np.full(tier.problem.ranks, 1 / tier.problem.ranks)]
    if not alike:
        best = [each.best_weights() for each in bounds]
        weights += [*best, np.asarray(np.mean(best, axis=0))]
    means = max(sum(each.at(w) for each in bounds) for w in weights)
    largest = max((part.certificate for part in parts), key=lambda found: found.lower_bound_seconds)
    if means > largest.lower_bound_seconds:
        return Certificate(objective_seconds, means)
    # What all the devices' memory would allow is known of their own tables alone.
    return replace(largest.of(objective_seconds), full_memory_bound_seconds=None)


@dataclass(frozen=True)
class WeightedBounds:
    """Bounds on the weighted mean of the ranks' times in one part.

    `methods` are the items of each AllReduce method that a plan may use, each with prices of which
    those on capacities and budget are kept, for weights that add up to 1: prices that are not the
    best ones give a weaker bound, and a bound still.
    """

    problem: ClassProblem
    methods: tuple[tuple[PricingItems, tuple[DualPrices, ...]], ...]

    @staticmethod
    def of(problem: ClassProblem, alike: bool) -> "WeightedBounds":
        """The bounds of a problem, with the prices of ranks that are alike and, unless they are,
        with prices of each rank's own."""
        topology, workload = problem.topology, problem.workload
        limits = (problem.capacity_bytes, problem.budget_bytes)
        methods = []
        for method in usable_methods(workload, problem.ranks, problem.budget_bytes):
            rows = pricing_items(problem.classes, topology, workload, method)
            prices = [homogeneous_prices(rows, topology, *limits)]
            own = prices[0] if alike else good_prices(rows, topology, *limits)
            if not alike and (scale := float(own.rank.sum())) > 0:
                fair = own.rank / scale, own.capacity / scale, own.budget / scale
                prices.append(DualPrices(*fair))
            methods.append((rows, tuple(prices)))
        return WeightedBounds(problem, tuple(methods))

    def at(self, weights: Floats) -> float:
        """No plan within the limits has a smaller mean, in seconds, by `weights` [M]."""
        return min(
            max(self._seconds(rows, weights, each) for each in prices)
            for rows, prices in self.methods
        )

    def best_weights(self) -> Floats:
        """The weights by which the part's own bound is about largest."""
        found = [(self._seconds(rows, p[-1].rank, p[-1]), p[-1].rank) for rows, p in self.methods]
        return min(found, key=lambda bound: bound[0])[1]

    def _seconds(self, rows: PricingItems, weights: Floats, prices: DualPrices) -> float:
        found = DualPrices(weights, prices.capacity, prices.budget)
        problem = self.problem
        limits = (problem.capacity_bytes, problem.budget_bytes)
        return lagrangian(rows, problem.topology, found, *limits) + rows.latency
