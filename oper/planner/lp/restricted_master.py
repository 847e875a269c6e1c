"""The linear programme over buckets of classes and holder sets, for any link matrix.

In: `PricingItems` and the limits. Out: `FractionalPlacement`, with the `DualPrices` of the limits.

    minimise T   over x[b, p] ≥ 0, Σ_p x[b, p] = 1 for each bucket b of rows, subject to
    time         Σ x[b, p] · seconds[b, p, r] ≤ T                      rank r         (price λ_r)
    capacity     Σ x[b, p] · bytes[b] · [j holds p] ≤ capacity_j       rank j         (price μ_j)
    budget       Σ x[b, p] · bytes[b] · (copies_p - 1) ≤ budget                       (price ν)

With the aim "link" the largest fetch time Z of an ordered pair (equation 3; price π_ij) comes
first and T second, by a small weight. In inference any ranks may hold a row: columns are generated
at the programme's own prices (`pricing.py`) until no holder set is cheaper. In training the M + 1
holder sets are all there from the start.

Buckets put classes of one width and nearly one density together, by their averages, so the value
is no bound by itself; its prices, evaluated on the exact classes, give one (`lagrangian_bound.py`).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csc_array, csr_array

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.cost.holder_sets import (
    HolderSets,
    cheapest_holder_sets,
    everywhere_set,
    per_node_sets,
    single_owner_sets,
)
from oper.cost.read_charges import Charges
from oper.planner.lp.pricing import (
    DualPrices,
    PricingItems,
    cheapest_holders,
    everywhere_seconds,
)
from oper.topology.topology import Topology

Objective = Literal["time", "link"]

HOT_CLASSES = 60  # each a bucket of its own: they decide how evenly the ranks can be loaded
BUCKET_RATIO = 1.1  # of the densities in one bucket
ROUNDS = 40  # of column generation, at most; time takes about 10, links on 8 ranks 20 to 40
TOLERANCE = 1e-6  # of the value, to the best bound on it
TIME_WEIGHT = 1e-3  # of T beside the largest link, both relative to their size


@dataclass(frozen=True)
class FractionalPlacement:
    """The fractional plan: `fraction[b, g]` of bucket b's rows go to group g; `bucket[c]` is the
    bucket of class c. `seconds` is its largest rank time, with the AllReduce's latency if it has
    replicas; for the aim "link" it is still T. `prices` are of the limits, none negative."""

    bucket: NDArray[np.int64]
    holder_sets: HolderSets
    fraction: Floats
    prices: DualPrices
    seconds: float


def solve_items(
    rows: PricingItems,
    topology: Topology,
    capacity_bytes: Floats,
    budget_bytes: float,
    objective: Objective = "time",
) -> FractionalPlacement:
    """The least time of a fractional placement of the items.

    `capacity_bytes` [M] and `budget_bytes` (of extra copies) are the limits. Raises OperError
    where the capacities cannot hold the tables.
    """
    if rows.total_bytes > float(np.sum(capacity_bytes)):
        raise OperError(
            f"the ranks' capacities hold {np.sum(capacity_bytes):,.0f} bytes in all, and one copy "
            f"of every row needs {rows.total_bytes:,.0f}: give more capacity or more ranks"
        )
    bucket = buckets(rows)
    master = RestrictedMaster(
        rows.merged(bucket), topology, capacity_bytes, budget_bytes, objective
    )
    master.solve()
    for _ in range(ROUNDS if rows.any_holders else 0):
        if not master.add_cheaper():
            break
        master.solve()
    sets, fraction = master.placement()
    return FractionalPlacement(bucket, sets, fraction, master.prices, master.seconds)


def buckets(rows: PricingItems) -> NDArray[np.int64]:
    """Bucket of each class: the hottest alone, the rest by memory, then density on a log scale."""
    alone = np.zeros(len(rows))
    hottest = np.argsort(-rows.weight_bytes, kind="stable")[:HOT_CLASSES]
    alone[hottest] = 1 + np.arange(len(hottest))
    with np.errstate(divide="ignore"):
        step = np.floor(np.log(rows.density) / np.log(BUCKET_RATIO))
    step[hottest] = 0
    keys = np.stack([alone, rows.memory_bytes, step], axis=1)
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1].ravel(), dtype=np.int64)


class ScaledLimits:
    """The limits of a programme over the rows of some buckets, and what rows use of them.

    In order: each rank's time, each rank's capacity, the budget, and with the aim "link" the time
    of each ordered pair of ranks. Seconds and bytes are scaled to about 1 a rank, as the solver's
    tolerances are absolute: `second`, `pair` and `byte` are 1 of them.
    """

    def __init__(
        self,
        rows: PricingItems,
        topology: Topology,
        capacity_bytes: Floats,
        budget_bytes: float,
        objective: Objective,
    ) -> None:
        self.rows, self.topology = rows, topology
        self.links_first = objective == "link" and topology.ranks > 1
        self.away = np.flatnonzero(~np.eye(topology.ranks, dtype=bool).ravel())
        self.charges = Charges.of(topology)
        scale = self.charges.mean_seconds
        self.second = scale * float(rows.rows @ rows.weight_bytes) or 1.0
        self.pair = scale * float(rows.rows @ rows.fetch_bytes) or 1.0
        self.byte = rows.total_bytes / topology.ranks or 1.0
        self.limit = np.concatenate(
            [
                np.zeros(topology.ranks),
                np.asarray(capacity_bytes, dtype=np.float64) / self.byte,
                [budget_bytes / self.byte],
                np.zeros(len(self.away) if self.links_first else 0),
            ]
        )
        # What is made small: T, and Z before it where links are first.
        self.weights = [TIME_WEIGHT, 1.0] if self.links_first else [1.0]
        self.aims = np.zeros((len(self.limit), len(self.weights)))
        self.aims[: topology.ranks, 0] = -1
        self.aims[2 * topology.ranks + 1 :, -1] = -1

    def uses(self, sets: HolderSets, b: Ints, g: Ints) -> Floats:
        """What one row of bucket b[n] in holder set g[n] uses of each limit, [N, limits]."""
        rows, topology, M = self.rows, self.topology, self.topology.ranks
        seconds = rows.traffic(topology).set_seconds(b, sets, g, read_by_read=True)
        if rows.training:
            everywhere = (sets.copies == M)[g] & (M > 1)
            seconds[everywhere] = everywhere_seconds(rows, topology)[b[everywhere]]
        uses = [
            seconds / self.second,
            rows.memory_bytes[b, None] * sets.holds[g] / self.byte,
            rows.memory_bytes[b, None] * (sets.copies[g, None] - 1) / self.byte,
        ]
        if self.links_first:
            fetched = rows.fetch_bytes[b, None] * self.charges.set_link_seconds(sets)[g]
            for of, node_bytes in zip(self.charges.of_nodes, rows.node_bytes.T, strict=True):
                fetched = fetched + node_bytes[b, None] * of.set_link_seconds(sets)[g]
            uses.append(fetched[:, self.away] / self.pair)
        return np.asarray(np.concatenate(uses, axis=1))


class RestrictedMaster:
    """The programme restricted to the columns so far, its last solution and prices."""

    def __init__(
        self,
        rows: PricingItems,
        topology: Topology,
        capacity_bytes: Floats,
        budget_bytes: float,
        objective: Objective,
    ) -> None:
        self.rows, self.topology = rows, topology
        self.limits = ScaledLimits(rows, topology, capacity_bytes, budget_bytes, objective)
        self.best_bound = -np.inf
        self.holder_sets = single_owner_sets(topology.ranks)
        if topology.ranks > 1 and rows.replicas:
            self.holder_sets = self.holder_sets + everywhere_set(topology.ranks)
        # With one rank a node, a copy a node is a copy everywhere, which is there already.
        if 1 < topology.nodes < topology.ranks and rows.any_holders:
            self.holder_sets = self.holder_sets + per_node_sets(
                topology, self.limits.charges.read_seconds
            )
        # On uneven nodes some sets of a copy a node have a single holder, and are there already.
        keys = set_keys(self.holder_sets)
        self.holder_sets = self.holder_sets.take([keys.index(key) for key in dict.fromkeys(keys)])
        self.known = {key: g for g, key in enumerate(dict.fromkeys(keys))}
        every = np.meshgrid(np.arange(len(rows)), np.arange(len(self.holder_sets)), indexing="ij")
        self.bucket, self.group = (axis.ravel() for axis in every)  # of each column

    def solve(self) -> None:
        """Optimise over the columns so far."""
        limits, columns = self.limits, len(self.bucket)
        rows = self.rows.rows[self.bucket, None]
        uses = rows * limits.uses(self.holder_sets, self.bucket, self.group)
        result = linprog(
            np.concatenate([np.zeros(columns), limits.weights]),
            A_ub=csc_array(np.concatenate([uses.T, limits.aims], axis=1)),
            b_ub=limits.limit,
            A_eq=csr_array(
                (np.ones(columns), (self.bucket, np.arange(columns))),
                shape=(len(self.rows), columns + len(limits.weights)),
            ),
            b_eq=np.ones(len(self.rows)),
            method="highs",
        )
        if result.status != 0:
            raise OperError(
                f"the placement programme has no solution ({result.message}): the capacities "
                "leave no room; give more capacity or more ranks"
            )
        self.value, self.share = float(result.fun), np.maximum(result.x[:columns], 0.0)
        self.rank_time = float(result.x[columns])
        self.dual = np.maximum(-result.ineqlin.marginals, 0.0)
        self.prices = self._prices(self.dual)

    def add_cheaper(self) -> bool:
        """Add each bucket's cheapest holder set, at the last prices and nearer to those of the best
        bound (which keeps prices from swinging); whether the programme is worth solving again."""
        if self.best_bound == -np.inf:
            self.best_dual = self._spread(self.dual)
        found = []
        for dual in (self.dual / 4 + self.best_dual * 3 / 4, self.dual):
            prices = self._prices(dual)
            holds, price = cheapest_holders(self.rows, self.topology, prices)
            bound = float(self.rows.rows @ price - dual @ self.limits.limit)
            if bound > self.best_bound:
                self.best_bound, self.best_dual = bound, dual
            found.append((holds, prices))
        if self.value - self.best_bound <= TOLERANCE * self.value:
            return False
        columns = len(self.bucket)
        for holds, prices in found:
            self._add(holds, prices)
        return len(self.bucket) > columns

    def _spread(self, dual: Floats) -> Floats:
        """Prices of which each rank's time, and each pair's, has an equal share of the total. They
        are where pricing starts, as a solver's own first ones are zero but for a few."""
        M = self.topology.ranks
        spread = dual.copy()
        spread[:M] = dual[:M].mean()
        if self.limits.links_first:
            spread[2 * M + 1 :] = dual[2 * M + 1 :].mean()
        return spread

    def placement(self) -> tuple[HolderSets, Floats]:
        """The groups that are used and their shares of each bucket, [B, G]."""
        fraction = np.zeros((len(self.rows), len(self.holder_sets)))
        np.add.at(fraction, (self.bucket, self.group), self.share)
        fraction /= fraction.sum(axis=1, keepdims=True)
        used = fraction.any(axis=0)
        return self.holder_sets.take(used), fraction[:, used]

    @property
    def seconds(self) -> float:
        replicas = self.share[self.holder_sets.copies[self.group] > 1].any()
        return self.rank_time * self.limits.second + self.rows.latency * bool(replicas)

    def _prices(self, dual: Floats) -> DualPrices:
        M, limits = self.topology.ranks, self.limits
        pair = None
        if limits.links_first:
            pair = np.zeros((M, M))
            pair.flat[limits.away] = dual[2 * M + 1 :] / limits.pair
        scaled = dual[M : 2 * M + 1] / limits.byte
        return DualPrices(dual[:M] / limits.second, scaled[:M], float(scaled[M]), pair)

    def _add(self, holds: NDArray[np.bool_], prices: DualPrices) -> None:
        """Add the columns (bucket b, holders holds[b]), each rank reading where it costs least."""
        read_prices = prices.read_prices(self.topology)
        found = cheapest_holder_sets(holds, read_prices.order(self.rows.ratios))
        group = np.zeros(len(holds), dtype=np.int64)
        fresh: list[int] = []
        for b, key in enumerate(set_keys(found)):
            group[b] = self.known.setdefault(key, len(self.known))
            if group[b] == len(self.holder_sets) + len(fresh):
                fresh.append(b)
        self.holder_sets = self.holder_sets + found.take(fresh)
        old = self.bucket * len(self.holder_sets) + self.group
        new = np.setdiff1d(np.arange(len(holds)) * len(self.holder_sets) + group, old)
        self.bucket = np.concatenate([self.bucket, new // len(self.holder_sets)])
        self.group = np.concatenate([self.group, new % len(self.holder_sets)])


def set_keys(sets: HolderSets) -> list[bytes]:
    """A key for each holder set, equal for equal sets alone."""
    return [
        source.tobytes() + holds.tobytes()
        for source, holds in zip(sets.source, sets.holds, strict=True)
    ]
