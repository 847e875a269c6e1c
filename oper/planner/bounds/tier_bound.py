"""The certificate of a plan with a tier, from those of its two parts.

In: the problems and certificates of the tables on devices and of those in the tier. Out: the
`Certificate` of both. Each rank r takes T_r = a_r + b_r, a for the rows on devices and b for those
in the tier. Each part can be placed whatever the other does, so that for every plan

    max_r T_r ≥ max_r a_r ≥ A     and     max_r T_r ≥ max_r b_r ≥ B,

with A and B the parts' own bounds. Their sum is no bound: the rank with the largest a need not be
that with the largest b. But with M ranks

    max_r T_r ≥ (1/M) Σ_r (a_r + b_r) = mean a + mean b ≥ A' + B'

for any bounds A', B' on the means. The Lagrangian at equal prices λ_r = 1/M on the ranks' times is
one of them (lagrangian_bound.py). The largest of the three is taken. Where ranks are alike and no
single row is hot, A' is A and B' is B.
"""

from typing import NamedTuple

from oper.planner.bounds.certificate import Certificate
from oper.planner.bounds.lagrangian_bound import (
    Bound,
    homogeneous_prices,
    lagrangian,
    usable_methods,
)
from oper.planner.lp.pricing import pricing_items
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
    means = sum(mean_bound(part.problem) for part in parts)
    if means > best.bound.seconds:
        return Certificate(objective_seconds, Bound(means, None))
    bound = Bound(best.bound.seconds, None, best.bound.note)
    return Certificate(objective_seconds, bound, best.hot_row)


def mean_bound(problem: ClassProblem) -> float:
    """No plan within the limits has a smaller mean of the ranks' times, in seconds."""
    topology, budget = problem.topology, problem.budget_bytes
    least = []
    for method in usable_methods(problem.workload, problem.ranks, budget):
        rows = pricing_items(problem.classes, topology, problem.workload, method)
        # Of any ranks: prices that are not the best ones give a weaker bound, and a bound still.
        prices = homogeneous_prices(rows, topology, problem.capacity_bytes, budget)
        found = lagrangian(rows, topology, prices, problem.capacity_bytes, budget)
        least.append(found + rows.latency)
    return min(least)
