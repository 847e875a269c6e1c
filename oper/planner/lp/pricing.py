"""The cheapest holders of a row under prices on the limits of a plan.

In: `PricingItems` (bytes and seconds of a row of each class), `DualPrices`. Out: holder sets and
prices. A linear programme over placements (and its Lagrangian) sees the plan's limits as prices:
λ_r ≥ 0 on rank r's time, Σλ = 1; π_ij on the fetch time of the pair (i, j), used only if even links
are the aim; μ_j on a byte of rank j's capacity; ν on a byte of extra copies. Then every row can be
priced alone, and a row with read weight w (bytes that one reader moves for it: S·R, in training
S·(R + D) if it has one owner) and memory m costs

    w · Σ_i min_{j∈H} K[i][j] + m · (Σ_{j∈H} μ_j + ν (|H| - 1)),
    K[i][j] = (λ_i + π_ij) L[i][j] [i≠j] + λ_j L[j][j]

when the ranks H hold it and each rank, holders too, reads from the cheapest of them. Divided by m
this is a line in the row's density ρ = w/m, so the cheapest holder set of every class lies on the
lower envelope of the lines: built once, searched by ρ.

In training there is one owner or a copy everywhere, M lines and one cost of its own:

    Σ_r λ_r L[r][r] · S(R + U) + AllReduce + m · (Σ_j μ_j + ν (M - 1)).

If ranks share memory, K of reads has no λ_j L[j][j] within their node, and that of gradients has:
S·R and S·D then have prices of their own, and the M owners are tried one by one.

With relays (oper/topology/relays.py) a row has a weight w and one for each size of node, w·τ, and a
price that is linear in both: K is that of w and of τ together (`ReadPrices`). The least over holder
sets is concave in (w, w·τ): between two ratios τ it is at least the line between its values there.
So in inference it is found at some ratios, each by an envelope, and bounded from below between.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot, geometric_steps, whole_dot
from oper.cost.allreduce import METHODS, Method, allreduce_cost
from oper.cost.holder_sets import Sums
from oper.cost.read_charges import Charges, ReadPrices
from oper.cost.traffic import Traffic
from oper.cost.workload import Workload
from oper.planner.lp.lower_envelope import Envelope
from oper.planner.problem.classes import Classes
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

ENUMERABLE_RANKS = 16  # up to here all 2^M - 1 holder sets are enumerated
_ROUNDING = 1e-12  # relative, of ratios
_CELLS = 1 << 20  # classes times holder sets, or pairs of ranks, that are looked at at a time
# With relays, classes times holder sets times ranks that are all looked at, and ratios between
# which prices are bounded if there are more. 16 ranks and 100 buckets of rows took 40 CPU s to plan
# with all looked at, and take 9.
_MOST_PRICES = 1 << 24
_RATIOS = 8


@dataclass(frozen=True, eq=False)
class PricingItems:
    """Bytes and seconds of one row of each class, vectors of shape [C].

    A row with copies on all ranks takes `everywhere_bytes[c]` on each, read and (in training)
    updated, and `allreduce_seconds[c]` of the AllReduce by `method`; inference has none.
    """

    training: bool
    method: Method  # "none" in training: no replicas
    latency: float  # seconds of the AllReduce, once if there is any replica
    rows: Floats
    memory_bytes: Floats  # m
    weight_bytes: Floats  # w
    fetch_bytes: Floats  # S·R, the bytes that pairs of ranks fetch
    gradient_bytes: Floats  # S·D, in training
    everywhere_bytes: Floats
    allreduce_seconds: Floats
    node_bytes: Floats  # [C, K] S·D of a node, by the size of nodes that have relays
    # Parts of fetch_bytes and of gradient_bytes: those of pooled tables.
    pooled_fetch_bytes: Floats
    pooled_gradient_bytes: Floats

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def any_holders(self) -> bool:
        """True if any set of ranks may hold a row, as in inference."""
        return not self.training

    @property
    def replicas(self) -> bool:
        return self.method != "none" or not self.training

    @cached_property
    def density(self) -> Floats:
        return self.weight_bytes / self.memory_bytes

    @cached_property
    def total_bytes(self) -> float:
        return float(dot(self.rows, self.memory_bytes))

    def traffic(self, topology: Topology) -> Traffic:
        """Return the bytes of `weight_bytes` with the ranks that pay for them."""
        return Traffic.of(
            topology,
            self.training,
            self.weight_bytes,
            self.fetch_bytes,
            self.gradient_bytes,
            self.node_bytes,
            self.pooled_fetch_bytes,
            self.pooled_gradient_bytes,
        )

    @cached_property
    def ratios(self) -> Floats:
        """Ratio τ [C, K] of the bytes that a relay moves for its node to the bytes that a rank
        moves."""
        weight = self.fetch_bytes[:, None]
        ratios = np.ones_like(self.node_bytes)
        np.divide(self.node_bytes, weight, out=ratios, where=weight > 0)
        return ratios

    def merged(self, bucket: NDArray[np.int64]) -> "PricingItems":
        """Return row-weighted averages over the classes of `bucket[c]`: for prices, never for a
        bound."""
        rows = np.bincount(bucket, self.rows).astype(np.float64)

        def mean(vector: Floats) -> Floats:
            return np.bincount(bucket, self.rows * vector) / rows

        vectors: dict[str, Any] = {name: mean(getattr(self, name)) for name in _OF_ROWS}
        of_nodes = [mean(of_size) for of_size in self.node_bytes.T]
        node_bytes = np.array(of_nodes).reshape(-1, len(rows)).T
        return replace(self, rows=rows, **vectors, node_bytes=node_bytes)


_OF_ROWS = (
    "memory_bytes",
    "weight_bytes",
    "fetch_bytes",
    "gradient_bytes",
    "everywhere_bytes",
    "allreduce_seconds",
    "pooled_fetch_bytes",
    "pooled_gradient_bytes",
)


@lru_cache(maxsize=len(METHODS))
def pricing_items(
    classes: Classes, topology: Topology, workload: Workload, method: Method
) -> PricingItems:
    """Return the items of all classes; `method` is the replicas' AllReduce (ignored in
    inference)."""
    count = classes.rows.astype(np.float64)
    return pricing_items_of(classes.row_sums, count, topology, workload, method)


def pricing_items_of(
    each: Sums, count: Floats, topology: Topology, workload: Workload, method: Method
) -> PricingItems:
    """Return `count[c]` items of sums `each[c]`, each of which stays whole: a row, a partition."""
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
        node_bytes=each.node_bytes,
        pooled_fetch_bytes=each.pooled_read_bytes,
        pooled_gradient_bytes=each.pooled_gradient_bytes,
    )


@dataclass(frozen=True)
class DualPrices:
    """Prices λ [M], μ [M], ν and, if links are the aim, π [M, M]: all non-negative, of any
    scale."""

    rank: Floats
    capacity: Floats
    budget: float
    pair: Floats | None = None

    def read_prices(self, topology: Topology) -> ReadPrices:
        """Return K: the price of a byte that rank i (row) reads from rank j (column)."""
        return ReadPrices.of(Charges.of(topology), self.rank, self.pair)


def owner_lines(read_prices: Floats, prices: DualPrices) -> tuple[Floats, Floats]:
    """Return the slopes and intercepts [M] of a single copy on each rank."""
    return read_prices.sum(axis=0), prices.capacity


def owner_price(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """Return the least price [C] of one row of each class over its owners."""
    parts = rows.traffic(topology).parts
    slopes = [part.charges.read_prices(prices.rank, prices.pair).sum(axis=0) for part in parts]
    if len(parts) == 1:
        lines = Envelope.of(slopes[0], prices.capacity)
        return np.asarray(rows.memory_bytes * lines.value(rows.density))
    amounts = np.stack([*(part.bytes for part in parts), rows.memory_bytes])
    least = np.full(len(rows), np.inf)
    for owner in np.unique(np.stack([*slopes, prices.capacity], axis=1), axis=0):
        least = np.minimum(least, dot(owner, amounts))
    return least


def homogeneous_lines(topology: Topology, prices: DualPrices) -> tuple[Floats, Floats]:
    """Return the slopes and intercepts [M] of 1 to M copies at equal prices on homogeneous ranks
    without relays.

    The cost of k copies on q of the N nodes of G ranks depends on the number of these nodes with
    only one copy: as few as possible, because holders in the others may also read from each other.
    If nearer rows are cheaper, the first copies are all in different nodes.
    """
    M, N = topology.ranks, topology.nodes
    G = M // N
    price = prices.read_prices(topology).of_rank
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


def relayed_copies(topology: Topology, prices: DualPrices) -> tuple[Ints, Floats, Floats]:
    """Return, with relays and at equal prices on homogeneous ranks, numbers of copies, among which
    is the cheapest for every row, and their prices for a byte of a rank's weight and of a node's,
    [kinds] each. The first are one copy, one a node, and one a rank.

    Unlike in `homogeneous_lines`, ranks of nodes with copies read there. So the cost of k copies on
    q nodes is linear in both except for a bend at k = 2q, and cheapest at a corner.
    """
    M, N = topology.ranks, topology.nodes
    G = M // N
    read_prices = prices.read_prices(topology)
    masks = topology.masks()
    own, mate = (float(read_prices.of_rank[masks[kind]][0]) for kind in ("local", "same_node"))
    far, of_node = (
        float(p[masks["other_node"]][0]) for p in (read_prices.of_rank, read_prices.of_nodes[0])
    )
    k = np.array([1, N, M, 2, G, 2 * N])
    q = np.array([1, N, N, 1, 1, N])
    alone = np.clip(2 * q - k, 0, q)
    near = alone * own + (k - alone) * min(own, mate) + (G * q - k) * mate
    return k, near + G * (N - q) * far, G * (N - q) * of_node


def _times(ranks: NDArray[np.int64], price: Floats | float) -> Floats:
    """Return the price of `ranks` times one rank; 0 for no ranks, even if the price is infinite."""
    return np.where(ranks > 0, ranks * np.where(ranks > 0, price, 0.0), 0.0)


def subset_lines(
    read_prices: Floats, prices: DualPrices, near: NDArray[np.bool_] | None = None
) -> tuple[Floats, Floats]:
    """Return the slopes and intercepts of all holder sets, [2^M - 1]; entry H - 1 has the ranks of
    H's bits. `near` [reader, source] are sources that come before all others. With prices of
    several rows, [..., M, M], there are slopes for each, [..., 2^M - 1].

    Each table is built by doubling: the sets with highest rank k are those without it, and k.
    """
    ranks = read_prices.shape[-1]
    shape = (*read_prices.shape[:-2], 1 << ranks)

    def cheapest_of(prices: Floats) -> Floats:
        nearest = np.full(shape, np.inf)
        for k in range(ranks):
            half = 1 << k
            of_rank = prices[..., k, None]
            np.minimum(nearest[..., :half], of_rank, out=nearest[..., half : 2 * half])
        return nearest

    slope = np.zeros(shape)
    far = slope
    for reader in range(ranks):
        of_reader = read_prices[..., reader, :]
        if near is None:
            slope += cheapest_of(of_reader)
            continue
        first = cheapest_of(np.where(near[reader], of_reader, np.inf))
        if reader == 0 or (near[reader] != near[reader - 1]).any():  # equal for the ranks of a node
            far = cheapest_of(np.where(near[reader], np.inf, of_reader))
        slope += np.where(np.isfinite(first), first, far)
    intercept = np.full(1 << ranks, -prices.budget)
    for k in range(ranks):
        half = 1 << k
        intercept[half : 2 * half] = intercept[:half] + (prices.capacity[k] + prices.budget)
    return slope[..., 1:], intercept[1:]


class _Found(NamedTuple):
    """The cheapest of all holder sets of each class by number, as `subset_lines` numbers them, [C],
    and a bound on its price per row from below."""

    line: Ints
    price: Floats


def _of_all_subsets(rows: PricingItems, found: ReadPrices, prices: DualPrices) -> _Found:
    """Return the cheapest holder sets of all. With relays, if the sets are too many to try them for
    each row alone, the price is a bound, and the set the cheapest for rows with nearly the
    ratio."""
    ranks = len(prices.rank)
    if found.near is None:
        envelope = Envelope.of(*subset_lines(found.of_rank, prices))
        line = envelope.line[envelope.find(rows.density)]
        return _Found(line, rows.memory_bytes * envelope.value(rows.density))
    if len(rows) * ranks << ranks <= _MOST_PRICES:
        return _each_alone(rows, found, prices)
    ratios = ratios_between(rows.ratios, _RATIOS)
    # The last of those that no ratio of the class is below, and how far it is from the next one.
    at_least = (ratios[None] <= rows.ratios[:, None] * (1 + _ROUNDING)).all(axis=2)
    below = np.maximum(at_least.sum(axis=1) - 1, 0)
    above = np.minimum(below + 1, len(ratios) - 1)
    step = ratios[above] - ratios[below]
    part = np.ones_like(step)
    np.divide(rows.ratios - ratios[below], step, out=part, where=step > 0)
    share = np.where(above > below, np.clip(part.min(axis=1), 0.0, 1.0), 0.0)
    line = np.zeros(len(rows), dtype=np.int64)
    price = np.zeros(len(rows))
    for n, ratio in enumerate(ratios):
        envelope = Envelope.of(*subset_lines(found.at(ratio), prices, found.near))
        nearest = np.where(share < 0.5, below, above) == n
        line[nearest] = envelope.line[envelope.find(rows.density[nearest])]
        weight = np.where(below == n, 1 - share, 0.0) + np.where(above == n, share, 0.0)
        some = weight > 0
        price[some] += weight[some] * envelope.value(rows.density[some])
    return _Found(line, rows.memory_bytes * price)


def _each_alone(rows: PricingItems, found: ReadPrices, prices: DualPrices) -> _Found:
    """Return the cheapest holder set of each class, and its price."""
    line, price = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows))
    at_a_time = max(_CELLS >> len(prices.rank), 1)
    for begin in range(0, len(rows), at_a_time):
        part = slice(begin, begin + at_a_time)
        slope, intercept = subset_lines(found.at(rows.ratios[part]), prices, found.near)
        prices_of_sets = rows.density[part, None] * slope + intercept
        line[part] = prices_of_sets.argmin(axis=1)
        price[part] = prices_of_sets.min(axis=1)
    return _Found(line, rows.memory_bytes * price)


def ratios_between(ratios: Floats, most: int) -> Floats:
    """Return at most `most` ratios [T, K], ascending, that span the given ones, [C, K], or are all
    of them: spread by the logarithm of the first column; the other columns are taken at the same
    positions of their order."""
    ascending = np.sort(ratios, axis=0)
    steps = geometric_steps(ascending[0, 0], ascending[-1, 0], most)
    at = np.unique(np.searchsorted(ascending[:, 0], steps * (1 - _ROUNDING)))
    spread = ascending[np.minimum(at, len(ratios) - 1)]
    spread[0], spread[-1] = ascending[0], ascending[-1]
    different = np.unique(ratios, axis=0)
    all_of_them = len(different) <= most and ratios.shape[1] == 1
    return different if all_of_them else np.unique(spread, axis=0)


def cheapest_holders(
    rows: PricingItems, topology: Topology, prices: DualPrices
) -> tuple[NDArray[np.bool_], Floats]:
    """Return a cheap holder set for each class in inference, [C, M], and its price per row, [C].

    The cheapest of all up to `ENUMERABLE_RANKS` ranks, or nearly so with relays, and then a bound
    on the price; beyond, the result of adding the best rank to the best owner, again and again.
    """
    read_prices = prices.read_prices(topology)
    if topology.ranks <= ENUMERABLE_RANKS:
        line, least = _of_all_subsets(rows, read_prices, prices)
        holds = (line[:, None] + 1) >> np.arange(topology.ranks) & 1 == 1
        return holds, least
    if read_prices.near is not None:
        return _added_one_by_one(rows, read_prices, topology, prices)
    price = read_prices.of_rank
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


def _added_one_by_one(
    rows: PricingItems, found: ReadPrices, topology: Topology, prices: DualPrices
) -> tuple[NDArray[np.bool_], Floats]:
    """Return the holder sets that adding the best rank again and again comes to, with relays: a
    node's first copy is read by all its ranks."""
    assert found.near is not None
    M, byte = topology.ranks, prices.capacity + prices.budget
    holds, least = np.zeros((len(rows), M), dtype=bool), np.full(len(rows), np.inf)
    at_a_time = max(_CELLS // M**2, 1)
    for begin in range(0, len(rows), at_a_time):
        part = slice(begin, begin + at_a_time)
        price, density = found.at(rows.ratios[part]), rows.density[part, None]
        cost = density * price.sum(axis=1) + prices.capacity
        nearest = np.full(cost.shape, np.inf)
        held, best_so_far = holds[part], least[part]
        for _ in range(M):
            best, number = cost.argmin(axis=1), np.arange(len(cost))
            better = np.flatnonzero(cost[number, best] < best_so_far)
            if not len(better):
                break
            best_so_far[better] = cost[better, best[better]]
            served = whole_dot(held, found.near) > 0  # [part, M]: of nodes with copies
            held[better, best[better]] = True
            of_best = price[number, :, best]
            near = found.near[best]
            switched = np.where(near & ~served, of_best, np.minimum(nearest, of_best))
            switched = np.where(~near & served, nearest, switched)
            nearest[better] = switched[better]
            served = whole_dot(held, found.near) > 0
            # Price by next holder: for the ranks of its own node, and for all others.
            nearest_price, first = nearest[:, :, None], ~served[:, :, None]
            after = np.where(
                found.near[None] & first,
                price,
                np.where(found.near[None] | first, np.minimum(nearest_price, price), nearest_price),
            )
            saved = (nearest_price - after).sum(axis=1)
            cost = best_so_far[:, None] - density * saved + byte
            cost[held] = np.inf
    return holds, rows.memory_bytes * least


def everywhere_seconds(rows: PricingItems, topology: Topology) -> Floats:
    """Return the seconds [C, M] on each rank for one row of each class with copies on all, in
    training."""
    seconds = rows.everywhere_bytes[:, None] * Charges.of(topology).memory_seconds
    return np.asarray(seconds + rows.allreduce_seconds[:, None])


def everywhere_price(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """Price [C] of one row of each class with copies on all ranks, in training."""
    copies = float(prices.capacity.sum()) + prices.budget * (topology.ranks - 1)
    seconds = _everywhere_at(rows, topology, prices.rank.tobytes())
    return np.asarray(seconds + copies * rows.memory_bytes)


@lru_cache(maxsize=len(METHODS))
def _everywhere_at(rows: PricingItems, topology: Topology, rank_prices: bytes) -> Floats:
    """Return the price [C] of the seconds alone: bounds for many budgets have the same one."""
    return dot(everywhere_seconds(rows, topology), np.frombuffer(rank_prices).copy())


def cheapest(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """Return the least price [C] of one row of each class over all holder sets, or less.

    Exact in training and for up to `ENUMERABLE_RANKS` ranks; beyond, in inference, a relaxation.
    `prices.pair` must be None: fetches then have a density of their own.
    """
    if not rows.any_holders:
        least = owner_price(rows, topology, prices)
        if rows.replicas and topology.ranks > 1:
            least = np.minimum(least, everywhere_price(rows, topology, prices))
        return least
    alike = topology.is_homogeneous(prices.capacity) and np.ptp(prices.rank) == 0
    if alike and isinstance(topology, RelayedTopology):
        return np.asarray(relayed_prices(rows, topology, prices).min(axis=1))
    if alike:
        lines = homogeneous_lines(topology, prices)
        return np.asarray(rows.memory_bytes * Envelope.of(*lines).value(rows.density))
    if topology.ranks <= ENUMERABLE_RANKS:
        return _of_all_subsets(rows, prices.read_prices(topology), prices).price
    return _relaxed(rows, topology, prices)


def relayed_prices(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """Return the price of one row of each class for each kind of `relayed_copies`, [C, kinds]."""
    copies, of_rank, of_node = relayed_copies(topology, prices)
    seconds = np.outer(rows.weight_bytes, of_rank) + np.outer(rows.node_bytes[:, 0], of_node)
    byte = float(prices.capacity[0]) * copies + prices.budget * (copies - 1)
    return np.asarray(seconds + np.outer(rows.memory_bytes, byte))


def _relaxed(rows: PricingItems, topology: Topology, prices: DualPrices) -> Floats:
    """Return a lower bound on the least price if holder sets are too many to enumerate.

    A single copy is priced exactly. With two or more, each reader pays only for its cheapest link
    to another node, or inside its node if that holds a copy, whatever the real holders; then ranks
    and nodes separate, up to there being at least two copies: a table over nodes of the least
    price with none, one, or more copies so far.
    """
    read_prices = prices.read_prices(topology)
    price, relays = read_prices.of_rank, read_prices.near is not None
    single = owner_price(rows, topology, prices) / rows.memory_bytes
    if not relays:
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
        if relays:  # ranks read in their node if it has a copy, and else from one rank
            near = np.where(np.isfinite(near), near, block.diagonal())
            one_rank = price[members[0], ~inside, None]
            of_nodes = read_prices.of_nodes[:, members[0]][:, ~inside]
            far = (one_rank + dot(of_nodes.T, rows.ratios.T)).min(axis=0)
            uncovered = len(members) * far * density
        elif not inside.all():
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
