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

If rows lie in two memories, each has columns, capacities and a budget of its own, and T is the sum
of both for every rank: `solve_together` makes that one programme.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csc_array, csr_array

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.base.portable_math import dot, log
from oper.cost.holder_sets import (
    HolderSets,
    cheapest_holder_sets,
    everywhere_set,
    per_node_sets,
    single_owner_sets,
)
from oper.cost.read_charges import Charges
from oper.cost.traffic import link_parts
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
TIME_WEIGHT = 1e-3  # of T next to the largest link, both relative to their size


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


class MemoryItems(NamedTuple):
    """The rows of one memory, its links, and its limits: `capacity_bytes` [M], and `budget_bytes`
    of extra copies."""

    rows: PricingItems
    topology: Topology
    capacity_bytes: Floats
    budget_bytes: float

    def check_room(self) -> None:
        """Raise OperError if the capacities cannot hold one copy of every row."""
        needed, held = self.rows.total_bytes, float(np.sum(self.capacity_bytes))
        if needed > held:
            raise OperError(
                f"the ranks' capacities hold {held:,.0f} bytes in all, and one copy of every row "
                f"needs {needed:,.0f}: give more capacity or more ranks"
            )


def solve_items(
    rows: PricingItems,
    topology: Topology,
    capacity_bytes: Floats,
    budget_bytes: float,
    objective: Objective = "time",
) -> FractionalPlacement:
    """Return the least time of a fractional placement of the items.

    `capacity_bytes` [M] and `budget_bytes` (of extra copies) are the limits. Raises OperError if
    the capacities cannot hold the tables.
    """
    items = MemoryItems(rows, topology, capacity_bytes, budget_bytes)
    items.check_room()
    bucket = buckets(rows)
    master = RestrictedMaster(items._replace(rows=rows.merged(bucket)), objective)
    master.solve()
    for _ in range(ROUNDS if rows.any_holders else 0):
        if not master.add_cheaper():
            break
        master.solve()
    return master.placement(bucket)


def solve_together(memories: Sequence[MemoryItems]) -> list[FractionalPlacement]:
    """Return the fractional placements in several memories, in training, with which the slowest
    rank takes the least time in all of them; their `seconds`, equal, are that time.

    Raises OperError if the capacities of one cannot hold its tables.
    """
    assert not any(memory.rows.any_holders for memory in memories), "columns would be generated"
    merged, bucket = [], []
    for memory in memories:
        memory.check_room()
        bucket.append(buckets(memory.rows))
        merged.append(memory._replace(rows=memory.rows.merged(bucket[-1])))
    second = sum(ScaledLimits(each, "time").second for each in merged)
    masters = [RestrictedMaster(each, "time", second) for each in merged]
    optimise(masters)
    seconds = masters[0].rank_time * second + sum(master.latency for master in masters)
    return [
        replace(master.placement(of), seconds=seconds)
        for master, of in zip(masters, bucket, strict=True)
    ]


def buckets(rows: PricingItems) -> NDArray[np.int64]:
    """Return the bucket of each class: the hottest alone, the rest by memory, then density on a log
    scale."""
    alone = np.zeros(len(rows))
    hottest = np.argsort(-rows.weight_bytes, kind="stable")[:HOT_CLASSES]
    alone[hottest] = 1 + np.arange(len(hottest))
    with np.errstate(divide="ignore"):
        step = np.floor(log(rows.density) / log(BUCKET_RATIO))
    step[hottest] = 0
    keys = np.stack([alone, rows.memory_bytes, step], axis=1)
    return np.asarray(np.unique(keys, axis=0, return_inverse=True)[1].ravel(), dtype=np.int64)


class ScaledLimits:
    """Limits of a programme over the rows of some buckets, and the use of them by rows.

    In order: each rank's time, each rank's capacity, the budget, and with the aim "link" the time
    of each ordered pair of ranks. Seconds and bytes are scaled to about 1 a rank, because the
    solver's tolerances are absolute: `second`, `pair` and `byte` are 1 of them.
    """

    def __init__(
        self, items: MemoryItems, objective: Objective, second: float | None = None
    ) -> None:
        """Scale the limits; `second` is given if it is to equal that of other limits."""
        rows, topology = items.rows, items.topology
        self.rows, self.topology = rows, topology
        self.links_first = objective == "link" and topology.ranks > 1
        self.away = np.flatnonzero(~np.eye(topology.ranks, dtype=bool).ravel())
        self.charges = Charges.of(topology)
        scale = self.charges.mean_seconds
        self.second = second or scale * float(dot(rows.rows, rows.weight_bytes)) or 1.0
        self.pair = scale * float(dot(rows.rows, rows.fetch_bytes)) or 1.0
        self.byte = rows.total_bytes / topology.ranks or 1.0
        self.limit = np.concatenate(
            [
                np.zeros(topology.ranks),
                np.asarray(items.capacity_bytes, dtype=np.float64) / self.byte,
                [items.budget_bytes / self.byte],
                np.zeros(len(self.away) if self.links_first else 0),
            ]
        )
        # Objective: T, and Z before it if links are first.
        self.weights = [TIME_WEIGHT, 1.0] if self.links_first else [1.0]
        self.aims = np.zeros((len(self.limit), len(self.weights)))
        self.aims[: topology.ranks, 0] = -1
        self.aims[2 * topology.ranks + 1 :, -1] = -1

    def uses(self, sets: HolderSets, b: Ints, g: Ints) -> Floats:
        """Return the use of each limit, [N, limits], by one row of bucket b[n] in holder set
        g[n]."""
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
            bytes = (rows.fetch_bytes, rows.node_bytes, rows.pooled_fetch_bytes)
            fetched = np.zeros((len(b), M * M))
            for part in link_parts(topology, *bytes):
                fetched += part.bytes[b, None] * part.charges.set_link_seconds(sets)[g]
            uses.append(fetched[:, self.away] / self.pair)
        return np.asarray(np.concatenate(uses, axis=1))


class RestrictedMaster:
    """The programme restricted to the columns so far, its last solution and prices."""

    def __init__(
        self, items: MemoryItems, objective: Objective, second: float | None = None
    ) -> None:
        rows, topology = items.rows, items.topology
        self.rows, self.topology = rows, topology
        self.limits = ScaledLimits(items, objective, second)
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
        optimise([self])

    def uses(self) -> Floats:
        """Return the use of each limit, [columns, limits], by each column, all rows of its
        bucket."""
        rows = self.rows.rows[self.bucket, None]
        return rows * self.limits.uses(self.holder_sets, self.bucket, self.group)

    def take(self, value: float, share: Floats, rank_time: float, dual: Floats) -> None:
        """Take a solution: its value, the columns' shares, T and the limits' prices."""
        self.value, self.share, self.rank_time = value, share, rank_time
        self.dual = dual
        self.prices = self._prices(self.dual)

    def add_cheaper(self) -> bool:
        """Add each bucket's cheapest holder set, at the last prices and nearer to those of the best
        bound (which keeps prices from swinging); return True if the programme is worth solving
        again."""
        if self.best_bound == -np.inf:
            self.best_dual = self._spread(self.dual)
        candidates = []
        for dual in (self.dual / 4 + self.best_dual * 3 / 4, self.dual):
            prices = self._prices(dual)
            holds, price = cheapest_holders(self.rows, self.topology, prices)
            bound = float(dot(self.rows.rows, price) - dot(dual, self.limits.limit))
            if bound > self.best_bound:
                self.best_bound, self.best_dual = bound, dual
            candidates.append((holds, prices))
        if self.value - self.best_bound <= TOLERANCE * self.value:
            return False
        columns = len(self.bucket)
        for holds, prices in candidates:
            self._add(holds, prices)
        return len(self.bucket) > columns

    def _spread(self, dual: Floats) -> Floats:
        """Return prices in which each rank's time, and each pair's, has an equal share of the
        total. Pricing starts there, because nearly all of a solver's own first prices are zero."""
        M = self.topology.ranks
        spread = dual.copy()
        spread[:M] = dual[:M].mean()
        if self.limits.links_first:
            spread[2 * M + 1 :] = dual[2 * M + 1 :].mean()
        return spread

    def placement(self, bucket: Ints) -> FractionalPlacement:
        """Return the last solution, of classes in `bucket` [C], in the groups that it uses."""
        fraction = np.zeros((len(self.rows), len(self.holder_sets)))
        np.add.at(fraction, (self.bucket, self.group), self.share)
        fraction /= fraction.sum(axis=1, keepdims=True)
        used = fraction.any(axis=0)
        sets = self.holder_sets.take(used)
        return FractionalPlacement(bucket, sets, fraction[:, used], self.prices, self.seconds)

    @property
    def seconds(self) -> float:
        return self.rank_time * self.limits.second + self.latency

    @property
    def latency(self) -> float:
        """Latency of the AllReduce, in seconds, if there are replicas."""
        replicas = self.share[self.holder_sets.copies[self.group] > 1].any()
        return self.rows.latency * bool(replicas)

    def _prices(self, dual: Floats) -> DualPrices:
        M, limits = self.topology.ranks, self.limits
        pair = None
        if limits.links_first:
            pair = np.zeros((M, M))
            pair.flat[limits.away] = dual[2 * M + 1 :] / limits.pair
        scaled = dual[M : 2 * M + 1] / limits.byte
        return DualPrices(dual[:M] / limits.second, scaled[:M], float(scaled[M]), pair)

    def _add(self, holds: NDArray[np.bool_], prices: DualPrices) -> None:
        """Add the columns (bucket b, holders holds[b]), each rank reading from the holder that
        costs it least."""
        read_prices = prices.read_prices(self.topology)
        cheapest = cheapest_holder_sets(holds, read_prices.order(self.rows.ratios))
        group = np.zeros(len(holds), dtype=np.int64)
        fresh: list[int] = []
        for b, key in enumerate(set_keys(cheapest)):
            group[b] = self.known.setdefault(key, len(self.known))
            if group[b] == len(self.holder_sets) + len(fresh):
                fresh.append(b)
        self.holder_sets = self.holder_sets + cheapest.take(fresh)
        old = self.bucket * len(self.holder_sets) + self.group
        new = np.setdiff1d(np.arange(len(holds)) * len(self.holder_sets) + group, old)
        self.bucket = np.concatenate([self.bucket, new // len(self.holder_sets)])
        self.group = np.concatenate([self.group, new % len(self.holder_sets)])


def optimise(masters: Sequence[RestrictedMaster]) -> None:
    """Optimise over the columns so far of masters that share nothing but the ranks' times, of which
    each takes its own part of the solution."""
    first, M = masters[0].limits, masters[0].topology.ranks
    uses = [master.uses() for master in masters]
    own_limits = [len(master.limits.limit) - M for master in masters]  # limits other than the times
    columns, buckets = [len(u) for u in uses], [len(master.rows) for master in masters]
    total = sum(columns)
    after = np.zeros((M + sum(own_limits), total))
    item = []
    for n, (master, used) in enumerate(zip(masters, uses, strict=True)):
        held, limits = slice(sum(columns[:n]), sum(columns[: n + 1])), M + sum(own_limits[:n])
        after[:M, held] = used[:, :M].T
        after[limits : limits + own_limits[n], held] = used[:, M:].T
        item.append(sum(buckets[:n]) + master.bucket)
    aims = np.concatenate([first.aims, np.zeros((sum(own_limits[1:]), len(first.weights)))])
    result = linprog(
        np.concatenate([np.zeros(total), first.weights]),
        A_ub=csc_array(np.concatenate([after, aims], axis=1)),
        b_ub=np.concatenate([first.limit, *(master.limits.limit[M:] for master in masters[1:])]),
        A_eq=csr_array(
            (np.ones(total), (np.concatenate(item), np.arange(total))),
            shape=(sum(buckets), total + len(first.weights)),
        ),
        b_eq=np.ones(sum(buckets)),
        method="highs",
    )
    if result.status != 0:
        raise OperError(
            f"the placement programme has no solution ({result.message}): the capacities "
            "leave no room; give more capacity or more ranks"
        )
    share = np.maximum(result.x[:total], 0.0)
    dual = np.maximum(-result.ineqlin.marginals, 0.0)
    for n, master in enumerate(masters):
        limits = M + sum(own_limits[:n])
        master.take(
            float(result.fun),
            share[sum(columns[:n]) : sum(columns[: n + 1])],
            float(result.x[total]),
            np.concatenate([dual[:M], dual[limits : limits + own_limits[n]]]),
        )


def set_keys(sets: HolderSets) -> list[bytes]:
    """Return a key for each holder set, equal for equal sets alone."""
    return [
        source.tobytes() + holds.tobytes()
        for source, holds in zip(sets.source, sets.holds, strict=True)
    ]
