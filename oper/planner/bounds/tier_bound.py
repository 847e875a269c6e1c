"""The certificate of a plan with a tier, from those of its two parts.

In: the problems and certificates of the tables on devices and of those in the tier. Out: the
`Certificate` of both. Each rank r takes T_r = a_r + b_r, a for the rows on devices and b for those
in the tier. Each part can be placed whatever the other does, so that for every plan

    max_r T_r ≥ max_r a_r ≥ A     and     max_r T_r ≥ max_r b_r ≥ B,

with A and B the parts' own bounds. Their sum is no bound: the rank with the largest a need not be
that with the largest b. But for any weights λ ≥ 0 of the ranks with Σλ = 1

    max_r T_r ≥ Σ_r λ_r (a_r + b_r) = Σ_r λ_r a_r + Σ_r λ_r b_r ≥ A(λ) + B(λ)

for any bounds A(λ), B(λ) on the weighted means. The Lagrangian at the prices λ on the ranks' times
is one of them, whatever its other prices are (lagrangian_bound.py). If ranks are equal, equal
weights are the best; elsewhere the weights, and the prices of each part's capacities, are those of
one linear programme of both parts (`solve_together` in lp/restricted_master.py).

The least over the AllReduce methods counts, because a plan uses one of them or none. If that leaves
a gap, an integer programme of both parts in which the hottest rows of each are whole is tried
(hot_rows_bound.py). The largest of all is taken.
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

from oper.plan.certificate import Certificate
from oper.planner.bounds.certify import HOT_ROWS_FROM_GAP
from oper.planner.bounds.hot_rows_bound import whole_rows_bound
from oper.planner.bounds.lagrangian_bound import homogeneous_prices, lagrangian, usable_methods
from oper.planner.lp.pricing import DualPrices, pricing_items
from oper.planner.lp.restricted_master import MemoryItems, solve_together
from oper.planner.problem.problem import ClassProblem

Memories = tuple[MemoryItems, ...]


class Certified(NamedTuple):
    """The problem of one part, and how good its own placement is."""

    problem: ClassProblem
    certificate: Certificate


def certify_together(
    devices: Certified | None, tier: Certified, objective_seconds: float
) -> Certificate:
    """Return the certificate of a plan of both parts, whose slowest rank takes
    `objective_seconds`."""
    if devices is None:
        return tier.certificate.of(objective_seconds)
    parts = (devices, tier)
    largest = max(
        (part.certificate for part in parts),
        key=lambda certificate: certificate.lower_bound_seconds,
    )
    # The bound with all the devices' memory is known for their own tables only.
    best = replace(largest.of(objective_seconds), full_memory_bound_seconds=None)
    by_methods = methods_of(devices.problem, tier.problem)
    weighted = [weighted_mean_bound(memories) for memories in by_methods]
    best = best.at_least(min(weighted))
    if not best.is_within(HOT_ROWS_FROM_GAP):
        whole = [
            max(whole_rows_bound(memories, best.lower_bound_seconds), split)
            for memories, split in zip(by_methods, weighted, strict=True)
        ]
        best = best.at_least(min(whole))
    return best


def methods_of(*problems: ClassProblem) -> list[Memories]:
    """Return the rows of all parts for each choice of the AllReduce methods that plans may use."""
    usable = [usable_methods(p.workload, p.ranks, p.budget_bytes) for p in problems]
    return [
        tuple(
            MemoryItems(
                pricing_items(p.classes, p.topology, p.workload, method),
                p.topology,
                p.capacity_bytes,
                p.budget_bytes,
            )
            for p, method in zip(problems, chosen, strict=True)
        )
        for chosen in product(*usable)
    ]


def weighted_mean_bound(memories: Memories) -> float:
    """Return a lower bound, in seconds, on the slowest rank's time of any placement of the rows in
    all memories: the least mean by weights of the ranks."""
    return sum(
        lagrangian(memory.rows, memory.topology, prices, memory.capacity_bytes, memory.budget_bytes)
        + memory.rows.latency
        for memory, prices in zip(memories, _prices(memories), strict=True)
    )


def _prices(memories: Memories) -> list[DualPrices]:
    """Return prices of each memory's limits; the prices of the ranks' times are equal for all
    memories."""
    if all(each.topology.is_homogeneous(each.capacity_bytes) for each in memories):
        return [homogeneous_prices(*memory) for memory in memories]
    return [placement.prices for placement in solve_together(memories)]
