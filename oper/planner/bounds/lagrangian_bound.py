"""A lower bound on the objective: no plan that keeps the limits has a smaller largest rank time.

In: `Classes` and the limits. Out: `Bound`, in seconds.

For any prices λ ≥ 0 with Σλ = 1 on the ranks' times, μ ≥ 0 on capacities and ν ≥ 0 on the budget
of extra copies, the largest T_r is at least Σ λ_r T_r, and within the limits

    Σ λ_r T_r ≥ Σ_c rows_c · (least price of a row of class c over all holder sets)
                - Σ_r μ_r capacity_r - ν budget

(the Lagrangian; `pricing.py` has the prices of holder sets). It holds for any prices, so their
source may make it weaker, never wrong: on homogeneous ranks they come from a knapsack, elsewhere
from the bucketed linear programme. Classes are exact here.

In training a plan uses one AllReduce method, or replicates nothing: the bound is the least over
the methods, each with the latency that any replica brings. A second bound is the hottest single
row alone, which cannot be split; `hot_rows_bound.py` has a tighter one, which takes longer.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from oper.base.arrays import Floats
from oper.base.portable_math import dot
from oper.cost.allreduce import METHODS, Method
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.plan.certificate import BoundNote
from oper.planner.lp import restricted_master
from oper.planner.lp.lower_envelope import Envelope
from oper.planner.lp.pricing import (
    DualPrices,
    PricingItems,
    cheapest,
    everywhere_price,
    homogeneous_lines,
    pricing_items,
    relayed_copies,
    relayed_prices,
)
from oper.planner.problem.classes import Classes
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

_BISECTIONS = 100
SAFETY = 1e-9  # of a bound's terms, such as the Lagrangian's: beyond the rounding of their sums


@dataclass(frozen=True)
class Bound:
    """Lower bound on the largest rank time: `seconds`. `hot_class` is the class whose single row
    binds; None if the work as a whole does. `note` says that a better bound was left out or cut
    because it would take too long."""

    seconds: float
    hot_class: int | None
    note: BoundNote | None = None


def lower_bound(
    classes: Classes,
    topology: Topology,
    workload: Workload,
    capacity_bytes: Floats,
    budget_bytes: float,
) -> Bound:
    """Return the bound for all plans within `capacity_bytes` [M] and `budget_bytes` of extra
    copies.

    Raises OperError if the capacities cannot hold the tables.
    """
    least = np.inf
    for method in usable_methods(workload, topology.ranks, budget_bytes):
        rows = pricing_items(classes, topology, workload, method)
        if rows.latency < least:
            least = min(least, split_bound(rows, topology, capacity_bytes, budget_bytes))
    hottest, hot_class = hot_row(classes, topology, workload, budget_bytes)
    return Bound(max(least, hottest), hot_class if hottest > least else None)


def split_bound(
    rows: PricingItems, topology: Topology, capacity_bytes: Floats, budget_bytes: float
) -> float:
    """Return the Lagrangian's bound in seconds for the items' AllReduce method, with its latency:
    every row may be held in parts."""
    prices = good_prices(rows, topology, capacity_bytes, budget_bytes)
    seconds = lagrangian(rows, topology, prices, capacity_bytes, budget_bytes)
    return seconds + rows.latency


def usable_methods(workload: Workload, ranks: int, budget_bytes: float) -> tuple[Method, ...]:
    """Return the AllReduce methods a plan may use; only "none" in inference or without replicas."""
    return METHODS if workload.training and ranks > 1 and budget_bytes > 0 else ("none",)


def lagrangian(
    rows: PricingItems,
    topology: Topology,
    prices: DualPrices,
    capacity_bytes: Floats,
    budget_bytes: float,
) -> float:
    """Return a bound in seconds from any non-negative prices; `rows` must be exact classes."""
    scale = float(prices.rank.sum())
    if scale <= 0:
        return 0.0
    fair = DualPrices(prices.rank / scale, prices.capacity / scale, prices.budget / scale)
    value = float(dot(rows.rows, cheapest(rows, topology, fair)))
    owed = float(dot(fair.capacity, capacity_bytes)) + fair.budget * budget_bytes
    return max(value - owed - SAFETY * (value + owed), 0.0)


def good_prices(
    rows: PricingItems, topology: Topology, capacity_bytes: Floats, budget_bytes: float
) -> DualPrices:
    """Return the prices at which the Lagrangian is (nearly) largest."""
    if topology.is_homogeneous(capacity_bytes):
        return homogeneous_prices(rows, topology, capacity_bytes, budget_bytes)
    return restricted_master.solve_items(rows, topology, capacity_bytes, budget_bytes).prices


def homogeneous_prices(
    rows: PricingItems, topology: Topology, capacity_bytes: Floats, budget_bytes: float
) -> DualPrices:
    """Return the best prices on homogeneous ranks.

    Averaged over the ranks' renamings, all λ and all μ are equal, and extra copies are a fractional
    knapsack: a row's next copies save seconds and take bytes, the best savings per byte come first,
    and the price of a byte is the saving of the first copies that do not fit.
    """
    M = topology.ranks
    even = DualPrices(np.full(M, 1 / M), np.zeros(M), 0.0)
    if rows.any_holders and isinstance(topology, RelayedTopology):
        byte = _price_of_copies(rows, topology, even, capacity_bytes, budget_bytes)
        return _for_copies(even, byte, rows, capacity_bytes, budget_bytes)
    per_byte, bytes_until = _copies_by_gain(rows, topology)
    room = float(np.sum(capacity_bytes)) - rows.total_bytes
    left_out = np.searchsorted(bytes_until, min(budget_bytes, room), side="right")
    byte = max(float(per_byte[left_out]), 0.0) if left_out < len(per_byte) else 0.0
    return _for_copies(even, byte, rows, capacity_bytes, budget_bytes)


@lru_cache(maxsize=len(METHODS))
def _copies_by_gain(rows: PricingItems, topology: Topology) -> tuple[Floats, Floats]:
    """Return the seconds that the next copies of rows save per byte, in descending order, and the
    bytes of all copies up to each. Bounds for many budgets share them."""
    M = topology.ranks
    even = DualPrices(np.full(M, 1 / M), np.zeros(M), 0.0)
    if rows.any_holders:
        slope, _ = homogeneous_lines(topology, even)
        copies = Envelope.of(slope, np.arange(M, dtype=np.float64))
        extra = np.diff(copies.intercept)
        saved = rows.weight_bytes[:, None] * -np.diff(copies.slope)
    elif rows.replicas:
        extra = np.array([M - 1.0])
        single = sum(
            float(part.charges.read_prices(even.rank).sum(axis=0).min()) * part.bytes
            for part in rows.traffic(topology).parts
        )
        saved = (single - everywhere_price(rows, topology, even))[:, None]
    else:
        extra, saved = np.zeros(0), np.zeros((len(rows), 0))
    taken = rows.memory_bytes[:, None] * extra
    per_byte, size = (saved / taken).ravel(), (rows.rows[:, None] * taken).ravel()
    order = np.argsort(-per_byte, kind="stable")
    return per_byte[order], np.cumsum(size[order])


def _for_copies(
    even: DualPrices,
    byte: float,
    rows: PricingItems,
    capacity_bytes: Floats,
    budget_bytes: float,
) -> DualPrices:
    """Return the prices with that of a byte of copies on the limit of copies: the budget, or the
    memory that the capacities leave."""
    if budget_bytes <= float(np.sum(capacity_bytes)) - rows.total_bytes:
        return DualPrices(even.rank, even.capacity, byte)
    return DualPrices(even.rank, np.full(len(even.rank), byte), 0.0)


def _price_of_copies(
    rows: PricingItems,
    topology: RelayedTopology,
    even: DualPrices,
    capacity_bytes: Floats,
    budget_bytes: float,
) -> float:
    """Return nearly the least price of a byte of copies at which the copies that pay fit, with
    relays. Rows differ in the savings of further nodes and further ranks, so the price is found by
    bisection."""
    copies, *_ = relayed_copies(topology, even)
    seconds = relayed_prices(rows, topology, even)
    extra = np.outer(rows.memory_bytes, copies - 1)
    room = min(budget_bytes, float(np.sum(capacity_bytes)) - rows.total_bytes)

    def spent(byte: float) -> float:
        chosen = (seconds + byte * extra).argmin(axis=1)
        return float(dot(rows.rows, np.take_along_axis(extra, chosen[:, None], axis=1)[:, 0]))

    if spent(0.0) <= room:
        return 0.0
    low, high = 0.0, float((seconds[:, 0] / rows.memory_bytes).max())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > room else (low, middle)
    return high


def hot_row(
    classes: Classes, topology: Topology, workload: Workload, budget_bytes: float
) -> tuple[float, int]:
    """Return the longest that any single row must take some rank whatever else there is, and its
    class.

    A row with one owner j: all that j serves, M local reads if it serves every rank, or the dearest
    link to it. In inference with h copies at most: some holder has M/h readers, rounded up, the
    farthest of which pays for its link, and each reads at its least cost. With relays other nodes
    are one reader each, so that there are fewer: as many as when all copies are in one node. In
    training with copies everywhere: a local read of all and the AllReduce of the row, if the budget
    allows it.
    """
    M, charges = topology.ranks, Charges.of(topology)
    rows = pricing_items(classes, topology, workload, "none")
    least = _slowest_owner(rows, topology)
    if not workload.training:
        copies = np.minimum(1 + np.floor(budget_bytes / rows.memory_bytes), M)
        reading = M
        if isinstance(topology, RelayedTopology):
            reading = int(topology.sizes.min()) + topology.nodes - 1
        readers = np.ceil(reading / copies).astype(np.int64)
        served = charges.least_largest_seconds(readers)
        least = np.where(copies > 1, np.minimum(least, served * rows.weight_bytes), least)
    for method in usable_methods(workload, M, budget_bytes):
        rows = pricing_items(classes, topology, workload, method)
        if workload.training and rows.replicas:
            fits = (M - 1) * rows.memory_bytes <= budget_bytes
            slowest = float(charges.memory_seconds.max())
            copied = slowest * rows.everywhere_bytes + rows.allreduce_seconds + rows.latency
            least = np.where(fits, np.minimum(least, copied), least)
    hottest = int(least.argmax())
    return float(least[hottest]) * (1 - SAFETY), hottest


@lru_cache(maxsize=1)
def _slowest_owner(rows: PricingItems, topology: Topology) -> Floats:
    """Return the seconds [C] that a row of each class with one owner takes some rank at the
    least."""
    return rows.traffic(topology).least_largest_seconds()
