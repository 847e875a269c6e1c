"""A lower bound on homogeneous ranks, of any number, if rows are whole and have one owner.

In: `PricingItems`, a `Topology` of N nodes of G ranks. Out: seconds, or None if it says nothing.

Ranks that cannot be told apart differ only in the rows that they own. With W_r the weight of rank
r's rows, V_n = Σ W_r over the ranks of node n and W = Σ V_n, of which every rank reads all,

    T_r = own·W_r + mate·(V_n - W_r) + far·(W - V_n) = a·W_r - b·V_n + far·W,   b = far - mate ≥ 0,

own, mate, far being the cost of a byte of weight for its owner, the owner's node and all others. If
no T_r is above far·W + D, then a·W_r ≤ D + b·V_n on every rank: a node whose hottest row has weight
q must have a load V_n ≥ L(q) = (a·q - D) / b, because nearby rows are cheaper to read; and summed
over its G ranks, (a - G·b)·V_n ≤ G·D. So for each D the nodes' loads have least sums:

* nodes in order of their hottest rows q_1 ≥ q_2 ≥ …: all rows hotter than q_k lie on the nodes
  before k, whose load is therefore at least the weight of these rows;
* the loads S_k of the first k nodes satisfy S_k ≥ S_{k-1} + L(q_k), so S_k ≥ F(S_{k-1}) with
  F(s) = min over s' ≥ s of s' + L(hottest row beyond the s' hottest bytes);
* of k·M + 1 rows some rank owns k + 1, a row like any other for the first node.

The D at which S_N exceeds W, or a node's largest load, is passed by every plan. Memory is left out,
and a row may count in parts if the sum ends within it: both make the bound lower, never wrong. The
work is a bisection with N steps each, whatever the number of rows.

If hosts share memory, a gradient takes its owner more than a read does (traffic.py): own, and so a,
is larger for it, mate and far are not. A row then counts in a·W_r by both its parts, each at its
own a, and in V_n by their sum; the step from ranks to a whole node takes the smaller a.
"""

from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats
from oper.base.portable_math import dot
from oper.planner.lp.pricing import PricingItems
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

HOT_ROWS = 4096  # kept whole, at most; the others count as if they could be split
BISECTIONS = 100
SAFETY = 1e-9  # relative: beyond the rounding of the sums


class _OwnerSeconds(NamedTuple):
    """Seconds per byte of traffic to rows with one owner: for the owner, by part of the traffic,
    and for any part for the ranks of the owner's node and for all other ranks."""

    own: tuple[float, ...]
    mate: float
    far: float


def node_loads_bound(rows: PricingItems, topology: Topology) -> float | None:
    """Return a bound in seconds on the largest rank time of every plan in which each row has one
    owner; None if ranks differ, or if owning a row costs a rank no more than reading it from its
    node."""
    cost = _owner_seconds(rows, topology)
    if cost is None or min(cost.own) < cost.mate or max(cost.own) == cost.mate:
        return None
    loads = _Loads(rows, topology, cost)
    low, high = loads.reach
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if loads.possible(middle) else (middle, high)
    return max(loads.elsewhere + low - SAFETY * loads.elsewhere, 0.0)


def _owner_seconds(rows: PricingItems, topology: Topology) -> _OwnerSeconds | None:
    """Return the costs of a homogeneous topology; None if ranks can be told apart, and with relays,
    which read most at the owner's position in their nodes."""
    if not topology.homogeneous or isinstance(topology, RelayedTopology):
        return None
    parts = []
    for part in rows.traffic(topology).parts:
        seconds: list[float] = []
        for mask in topology.masks().values():
            kind = part.charges.owner_seconds[mask]
            if len(kind) and np.ptp(kind) > 1e-12 * kind.max():
                return None
            seconds.append(float(kind[0]) if len(kind) else seconds[-1])
        parts.append(seconds)
    own, mates, fars = zip(*parts, strict=True)
    # Readers pay the link for gradients as for reads, so that only `own` differs.
    mate, far = min(mates), min(fars)
    return _OwnerSeconds(own, mate, far) if mate <= far else None


class _Loads:
    """The loads of nodes that a largest time of `elsewhere` + D allows."""

    def __init__(self, rows: PricingItems, topology: Topology, cost: _OwnerSeconds) -> None:
        ranks, self.nodes = topology.ranks, topology.nodes
        self.ranks_per_node = ranks // self.nodes
        more = [seconds - cost.mate for seconds in cost.own]
        self.a, self.least_a, self.b = max(more), min(more), cost.far - cost.mate
        self.weight = float(dot(rows.rows, rows.weight_bytes))
        self.elsewhere = cost.far * self.weight
        # Bytes of a row, at `a` a byte, for its owner's extra time over the peers in the node.
        parts = rows.traffic(topology).parts
        part_bytes = [part.bytes * (of / self.a) for part, of in zip(parts, more, strict=True)]
        owned = np.sum(part_bytes, axis=0)
        order = np.argsort(-owned, kind="stable")
        before = np.cumsum(rows.rows[order]) - rows.rows[order]
        order = order[before < HOT_ROWS]
        count = np.minimum(rows.rows[order], HOT_ROWS).astype(np.int64)
        hot = np.repeat(owned[order], count)[:HOT_ROWS]
        # Row k is the hottest beyond the `held[k]` hottest bytes; none is left in the end.
        held = np.repeat(rows.weight_bytes[order], count)[:HOT_ROWS]
        self.held = np.concatenate([[0.0], np.cumsum(held)])
        self.next = np.append(hot, 0.0)
        self.first = max(self.next[0], *_least_of_a_rank(hot, ranks))

    @property
    def reach(self) -> tuple[float, float]:
        """A D that is not possible, or is as low as the bound goes, and one that is possible."""
        return -self.b * self.weight, self.a * self.weight

    def possible(self, over: float) -> bool:
        """Return False if loads of nodes within D = `over` are ruled out, else True."""
        spread = self.least_a - self.ranks_per_node * self.b
        least, most = 0.0, np.inf
        if spread > 0:
            if over < 0:
                return self.weight == 0
            most = self.ranks_per_node * over / spread
        elif over < 0:
            if spread == 0:
                return self.weight == 0
            least = self.ranks_per_node * over / spread
        if most * self.nodes < self.weight:
            return False
        if self.b <= 0:
            return bool(self.a * self.first <= over)
        need = np.maximum((self.a * self.next - over) / self.b, least)
        first = max((self.a * self.first - over) / self.b, least)
        if first > most:
            return False
        # sums[k]: the loads so far and the next node's, if k rows lie on nodes so far; later[k]:
        # the least of them from k rows on.
        later = np.minimum.accumulate((self.held + need)[::-1])[::-1]
        total = max(first, later[0])
        for node in range(1, self.nodes):
            if total > self.weight:
                return False
            k = int(np.searchsorted(self.held, total, side="right")) - 1
            if k == len(self.next) - 1:
                return bool(total + (self.nodes - node) * need[-1] <= self.weight)
            total = min(total + need[k], later[k + 1])
        return bool(total <= self.weight)


def _least_of_a_rank(hot: Floats, ranks: int) -> list[float]:
    """Return lower bounds for the rank with the most hot rows, by k: of the k·M + 1 hottest rows
    some rank owns at least k + 1, which weigh at least as much as the k + 1 lightest of them."""
    return [
        float(hot[k * (ranks - 1) : k * ranks + 1].sum())
        for k in range((len(hot) - 1) // ranks + 1)
    ]
