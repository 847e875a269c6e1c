"""The cheapest holders of a row under prices on the limits of a plan.

In: `PricingItems` (what a row of each class asks for), `DualPrices`. Out: holder sets and prices. A
linear programme over placements (and its Lagrangian) sees the plan's limits as prices:
λ_r ≥ 0 on rank r's time, Σλ = 1; π_ij on the fetch time of the pair (i, j), used only where
even links are the aim; μ_j on a byte of rank j's capacity; ν on a byte of extra copies. Then every
row can be priced alone, and a row with read weight w (bytes that one reader moves for it: S·R, in
training S·(R + D) where it has one owner) and memory m costs

    w · Σ_i min_{j∈H} K[i][j] + m · (Σ_{j∈H} μ_j + ν (|H| - 1)),
    K[i][j] = (λ_i + π_ij) L[i][j] [i≠j] + λ_j L[j][j]

when the ranks H hold it and each rank, holders too, reads from the cheapest of them. Divided by m
this is a line in the row's density ρ = w/m, so the cheapest holder set of every class lies on the
lower envelope of the lines: built once, searched by ρ.
In training there is one owner or a copy everywhere, M lines and one cost of its own:
Σ_r λ_r L[r][r] · S(R + U) + AllReduce + m · (Σ_j μ_j + ν (M - 1)).
Where ranks share memory, K of reads has no λ_j L[j][j] within their node, and that of gradients
has: S·R and S·D then have prices of their own, and the M owners are looked at one by one.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats
from oper.cost.allreduce import Method, allreduce_cost
from oper.cost.holder_sets import Sums
from oper.cost.read_charges import Charges
from oper.cost.traffic import Traffic
from oper.cost.workload import Workload
from oper.planner.lp.lower_envelope import Envelope
from oper.planner.problem.classes import Classes
from oper.topology.topology import Topology

ENUMERABLE_RANKS = 16  # up to here all 2^M - 1 holder sets are enumerated


@dataclass(frozen=True)
class PricingItems:
    """What one row of each class asks for, vectors of shape [C].

    A row with copies on all ranks takes `everywhere_bytes[c]` on each, read and (in training)
    updated, and `allreduce_seconds[c]` of the AllReduce by `method`; inference has none.
    """

    training: bool
    method: Method  # "none" in training: no replicas
    latency: float  # seconds of the AllReduce, once if there is any replica
    rows: Floats
    memory_bytes: Floats  # m
    weight_bytes: Floats  # w
    fetch_bytes: Floats  # S·R, what pairs of ranks fetch
    gradient_bytes: Floats  # S·D, in training
    everywhere_bytes: Floats
    allreduce_seconds: Floats
    # Of fetch_bytes and of gradient_bytes, those of pooled tables.
    pooled_fetch_bytes: Floats
    pooled_gradient_bytes: Floats

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def any_holders(self) -> bool:
        """Whether any set of ranks may hold a row, as in inference."""
        return not self.training

    @property
    def replicas(self) -> bool:
        return self.method != "none" or not self.training

    @cached_property
    def density(self) -> Floats:
        return self.weight_bytes / self.memory_bytes

    @property
    def total_bytes(self) -> float:
        return float(self.rows @ self.memory_bytes)

    def traffic(self, topology: Topology) -> Traffic:
        """The bytes of `weight_bytes` with who pays for them."""
        return Traffic.of(
            topology,
            self.training,
            self.weight_bytes,
            self.fetch_bytes,
            self.gradient_bytes,
            self.pooled_fetch_bytes,
            self.pooled_gradient_bytes,
        )

    def merged(self, bucket: NDArray[np.int64]) -> "PricingItems":
        """Row-weighted averages over the classes of `bucket[c]`: for prices, never for a bound."""
        rows = np.bincount(bucket, self.rows).astype(np.float64)
        sums = [np.bincount(bucket, self.rows * vector) for vector in self._vectors[1:]]
        return self._replace(rows, *(total / rows for total in sums))

    @property
    def _vectors(self) -> tuple[Floats, ...]:
        return (
            self.rows,
            self.memory_bytes,
            self.weight_bytes,
            self.fetch_bytes,
            self.gradient_bytes,
            self.everywhere_bytes,
            self.allreduce_seconds,
            self.pooled_fetch_bytes,
            self.pooled_gradient_bytes,
        )

    def _replace(self, *vectors: Floats) -> "PricingItems":
        return PricingItems(self.training, self.method, self.latency, *vectors)


def pricing_items(
    classes: Classes, topology: Topology, workload: Workload, method: Method
) -> PricingItems:
    """The items of all classes; `method` is the replicas' AllReduce (ignored in inference)."""
    count = classes.rows.astype(np.float64)
    return pricing_items_of(classes.row_sums, count, topology, workload, method)


def pricing_items_of(
    each: Sums, count: Floats, topology: Topology, workload: Workload, method: Method
) -> PricingItems:
    """`count[c]` items of sums `each[c]`, each of which stays whole: a row, a partition."""
    reduce = allreduce_cost(topology, method if workload.training else "none")
    return PricingItems(
        training=workload.training,
        method=reduce.method,
        latency=reduce.latency,
        rows=count,
        memory_bytes=each.memory_bytes,
        weight_bytes=each.read_bytes + (each.gradient_bytes if workload.training else 0.0),
        fetch_bytes=each.read_bytes,
        gradient_bytes=each.gradient_bytes,
        everywhere_bytes=each.memory_read_bytes + (each.union_bytes if workload.training else 0.0),
        allreduce_seconds=reduce.row_seconds(each),
        pooled_fetch_bytes=each.pooled_read_bytes,
        pooled_gradient_bytes=each.pooled_gradient_bytes,
    )


@dataclass(frozen=True)
class DualPrices:
    """λ [M], μ [M], ν and, where links are the aim, π [M, M]: all non-negative, of any scale."""

    rank: Floats
    capacity: Floats
    budget: float
    pair: Floats | None = None

    def read_prices(self, topology: Topology) -> Floats:
        """K [M, M]: the price of a byte that rank i (row) reads from rank j (column)."""
        return Charges.of(topology).read_prices(self.rank, self.pair)


def owner_lines(read_prices: Floats, prices: DualPrices) -> tuple[Floats, Floats]:
    """Slopes and intercepts [M] of a single copy on each rank."""
    return read_prices.sum(axis=0), prices.capacity


def owner_price(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """The least price [C] of one row of each class over its owners."""
    parts = rows.traffic(topology).parts
    slopes = [part.charges.read_prices(prices.rank, prices.pair).sum(axis=0) for part in parts]
    if len(parts) == 1:
        lines = Envelope.of(slopes[0], prices.capacity)
        return np.asarray(rows.memory_bytes * lines.value(rows.density))
    each = np.stack([*(part.bytes for part in parts), rows.memory_bytes])
    least = np.full(len(rows), np.inf)
    for owner in np.unique(np.stack([*slopes, prices.capacity], axis=1), axis=0):
        least = np.minimum(least, owner @ each)
    return least


def homogeneous_lines(topology: Topology, prices: DualPrices) -> tuple[Floats, Floats]:
    """Slopes and intercepts [M] of 1 to M copies at equal prices on homogeneous ranks.

    What k copies on q of the N nodes of G ranks cost depends on how many of these nodes have one
    copy alone: as few as can be, as holders in the others may also read from each other. Where
    nearer rows are cheaper, the first copies are all in different nodes.
    """
    M, N = topology.ranks, topology.nodes
    G = M // N
    price = prices.read_prices(topology)
    kinds = [price[mask] for mask in topology.masks().values()]
    own, mate, far = (float(of_kind[0]) if len(of_kind) else np.inf for of_kind in kinds)
    k, q = np.arange(1, M + 1), np.arange(1, N + 1)[:, None]
    elsewhere = np.where(q > 1, far, np.inf)  # from the other nodes with copies
    alone = np.clip(2 * q - k, 0, q)
    cost = _times(alone, np.minimum(own, elsewhere))
    cost += _times(k - alone, np.minimum(min(own, mate), elsewhere))
    cost += _times(G * q - k, np.minimum(mate, elsewhere))
    cost += _times(G * (N - q), far)
    slope = np.where((q <= k) & (k <= G * q), cost, np.inf).min(axis=0)
    return slope, prices.capacity * k + prices.budget * (k - 1)


def _times(ranks: NDArray[np.int64], price: Floats | float) -> Floats:
    """What so many ranks pay; nothing where there are none, whose price may be infinite."""
    return np.where(ranks > 0, ranks * np.where(ranks > 0, price, 0.0), 0.0)


def subset_lines(read_prices: Floats, prices: DualPrices) -> tuple[Floats, Floats]:
    """Slopes and intercepts of all holder sets, [2^M - 1]; entry H - 1 has the ranks of H's bits.

    Each table is built by doubling: the sets with highest rank k are those without it, and k.
    """
    ranks = len(read_prices)
    slope = np.zeros(1 << ranks)
    for reader in range(ranks):
        nearest = np.full(1 << ranks, np.inf)
        for k in range(ranks):
            half = 1 << k
            np.minimum(nearest[:half], read_prices[reader, k], out=nearest[half : 2 * half])
        slope += nearest
    intercept = np.full(1 << ranks, -prices.budget)
    for k in range(ranks):
        half = 1 << k
        intercept[half : 2 * half] = intercept[:half] + (prices.capacity[k] + prices.budget)
    return slope[1:], intercept[1:]


def cheapest_holders(
    rows: PricingItems, topology: Topology, prices: DualPrices
) -> tuple[NDArray[np.bool_], Floats]:
    """A cheap holder set for each class in inference, [C, M], and its price per row, [C].

    The cheapest of all up to `ENUMERABLE_RANKS` ranks; beyond, what adding the best rank to the
    best owner, again and again, comes to.
    """
    price = prices.read_prices(topology)
    if topology.ranks <= ENUMERABLE_RANKS:
        envelope = Envelope.of(*subset_lines(price, prices))
        line = envelope.line[envelope.find(rows.density)]
        holds = (line[:, None] + 1) >> np.arange(topology.ranks) & 1 == 1
        return holds, rows.memory_bytes * envelope.value(rows.density)
    byte, density = prices.capacity + prices.budget, rows.density[:, None]
    cost = density * price.sum(axis=0) + prices.capacity  # [C, M], of each next holder
    nearest = np.full((len(rows), topology.ranks), np.inf)
    least = np.full(len(rows), np.inf)
    holds = np.zeros((len(rows), topology.ranks), dtype=bool)
    for _ in range(topology.ranks):
        best = cost.argmin(axis=1)
        better = np.flatnonzero(cost.min(axis=1) < least)
        if not len(better):
            break
        least[better] = cost[better, best[better]]
        holds[better, best[better]] = True
        nearest[better] = np.minimum(nearest[better], price.T[best[better]])
        saved = np.maximum(nearest[:, :, None] - price[None], 0.0).sum(axis=1)
        cost = least[:, None] - density * saved + byte
        cost[holds] = np.inf
    return holds, rows.memory_bytes * least


def everywhere_seconds(rows: PricingItems, topology: Topology) -> Floats:
    """Seconds [C, M] on each rank for one row of each class with copies on all, in training."""
    own = rows.everywhere_bytes[:, None] * Charges.of(topology).memory_seconds
    return np.asarray(own + rows.allreduce_seconds[:, None])


def everywhere_price(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """Price [C] of one row of each class with copies on all ranks, in training."""
    copies = float(prices.capacity.sum()) + prices.budget * (topology.ranks - 1)
    return np.asarray(everywhere_seconds(rows, topology) @ prices.rank + copies * rows.memory_bytes)


def cheapest(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """The least price [C] of one row of each class over all holder sets, or less.

    Exact in training and for up to `ENUMERABLE_RANKS` ranks; beyond, in inference, a relaxation.
    `prices.pair` must be None: fetches then have a density of their own.
    """
    if not rows.any_holders:
        least = owner_price(rows, topology, prices)
        if rows.replicas and topology.ranks > 1:
            least = np.minimum(least, everywhere_price(rows, topology, prices))
        return least
    if topology.is_homogeneous(prices.capacity) and np.ptp(prices.rank) == 0:
        lines = homogeneous_lines(topology, prices)
    elif topology.ranks <= ENUMERABLE_RANKS:
        lines = subset_lines(prices.read_prices(topology), prices)
    else:
        return _relaxed(rows, topology, prices)
    return np.asarray(rows.memory_bytes * Envelope.of(*lines).value(rows.density))


def _relaxed(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """A lower bound on the least price where holder sets are too many to enumerate.

    A single copy is priced exactly. With two or more, each reader pays only for its cheapest link
    to another node, or inside its node if that holds a copy, whatever the real holders; then ranks
    and nodes separate, up to there being at least two copies: a table over nodes of the least
    price with none, one, or more copies so far.
    """
    price = prices.read_prices(topology)
    single = Envelope.of(*owner_lines(price, prices)).value(rows.density)
    node_of = np.asarray(topology.node_of)
    density = rows.density
    none, one = np.zeros(len(rows)), np.full(len(rows), np.inf)
    more = one
    for node in range(topology.nodes):
        inside = node_of == node
        members = np.flatnonzero(inside)
        block = price[np.ix_(members, members)]
        near = np.where(np.eye(len(members), dtype=bool), np.inf, block).min(axis=1)
        uncovered = np.full(len(rows), np.inf)
        if not inside.all():
            far = price[np.ix_(members, ~inside)].min(axis=1)
            near = np.minimum(near, far)
            uncovered = far.sum() * density
        gain = near - np.minimum(near, np.diag(block))
        held = prices.capacity[members] + prices.budget - gain * density[:, None]
        held.sort(axis=1)
        first = near.sum() * density + held[:, 0]
        second = np.full(len(rows), np.inf)
        if len(members) > 1:
            second = first + held[:, 1] + np.minimum(held[:, 2:], 0.0).sum(axis=1)
        several = np.minimum(first, second)
        none, one, more = (
            none + uncovered,
            np.minimum(one + uncovered, none + first),
            np.minimum.reduce(
                [more + np.minimum(uncovered, several), one + several, none + second]
            ),
        )
    return np.asarray(rows.memory_bytes * np.minimum(single, more - prices.budget))
