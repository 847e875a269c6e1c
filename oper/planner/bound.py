"""A lower bound on the objective: no plan that keeps the limits has a smaller largest rank time.

For any prices λ ≥ 0 with Σλ = 1 on the ranks' times, μ ≥ 0 on capacities and ν ≥ 0 on the budget
of extra copies, the largest T_r is at least Σ λ_r T_r, and within the limits

    Σ λ_r T_r ≥ Σ_c rows_c · (least price of a row of class c over all patterns)
                - Σ_r μ_r capacity_r - ν budget

(the Lagrangian; `patterns.py` has the prices of patterns). It holds whatever the prices are, so
where they come from can cost tightness, never validity: on ranks that look alike from a knapsack,
elsewhere from the bucketed linear programme. Classes are exact here.

In training a plan uses one AllReduce method, or replicates nothing: the bound is the least over
the methods, each with the latency that any replica brings. A second bound is the hottest single
row on its own, which cannot be split; `head.py` has a tighter, dearer one where that binds.
"""

from dataclasses import dataclass, replace

import numpy as np

from oper.cost import METHODS, Floats, Method, Workload
from oper.planner import programme
from oper.planner.classes import Classes
from oper.planner.patterns import (
    Demand,
    Envelope,
    Prices,
    cheapest,
    copies_slope,
    demand,
    everywhere_price,
    everywhere_seconds,
    looks_alike,
)
from oper.topology import Topology

SAFETY = 1e-9  # relative to the terms of the Lagrangian: beyond the rounding of their sums


@dataclass(frozen=True)
class Bound:
    """`seconds` bounds the largest rank time from below. `method` is the AllReduce for which it
    is least. `hot_class` is the class of which one row alone takes so long, None where the
    Lagrangian is the larger; `relaxed` where holder sets were too many to enumerate."""

    seconds: float
    method: Method
    hot_class: int | None
    relaxed: bool


def methods(workload: Workload, ranks: int, budget_bytes: float) -> tuple[Method, ...]:
    """The AllReduce methods that a plan can use: none where it cannot replicate in training."""
    return METHODS if workload.training and ranks > 1 and budget_bytes > 0 else ("none",)


def lower_bound(
    classes: Classes,
    topology: Topology,
    workload: Workload,
    capacity_bytes: Floats,
    budget_bytes: float,
) -> Bound:
    """The largest of the bounds above for all plans within `capacity_bytes` [M] and `budget_bytes`
    of extra copies. Raises OperError where the capacities cannot hold the tables."""
    least, method = np.inf, METHODS[0]
    for candidate in methods(workload, topology.ranks, budget_bytes):
        rows = demand(classes, topology, workload, candidate)
        if looks_alike(topology, capacity_bytes):
            prices = alike_prices(rows, topology, capacity_bytes, budget_bytes)
        else:
            solved = programme.solve_demand(rows, topology, capacity_bytes, budget_bytes)
            prices = solved.prices
        seconds = lagrangian(rows, topology, prices, capacity_bytes, budget_bytes)
        if seconds + rows.latency_seconds < least:
            least, method = seconds + rows.latency_seconds, candidate
    hottest, hot_class = hot_row(classes, topology, workload, capacity_bytes, budget_bytes)
    return Bound(
        seconds=max(least, hottest),
        method=method,
        hot_class=hot_class if hottest > least else None,
        relaxed=not workload.training and topology.ranks > 16 and not topology.alike,
    )
