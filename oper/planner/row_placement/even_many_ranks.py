"""Many homogeneous ranks evened out at once, before swaps of single pairs (beyond §4.2).

In: a `SwapSearch`, whose first M sets are the single owners. Out: its counts and seconds, changed.
A search moves traffic between two ranks a round, and a thousand ranks need thousands of rounds. On
homogeneous ranks the traffic that each rank should give or take follows from T alone: with δ_r more
on rank r and Δ_n = Σ δ_r on its node, T_r changes by a·δ_r - b·Δ_n (`node_loads_bound.py`), because
nearby rows are cheaper to read. So a rank that cannot give up its hot row gets faster if its node
has more. `targets` finds the δ of the least largest T by bisection; then the rank that gives most
swaps rows with the one that takes most, until all have their targets.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints
from oper.base.portable_math import dot
from oper.planner.class_placement.class_placement import MANY_RANKS
from oper.planner.row_placement.swaps import SwapSearch
from oper.topology.relays import RelayedTopology
from oper.topology.topology import Topology

_PASSES = 6
_BISECTIONS = 60
_LEAST_GAIN = 1e-3  # of the spread of T over its mean: a pass that gains less is the last
# Rows above this share of a rank's traffic stay where they are.
_STAYS = 0.25
_LEFT = 0.02  # of a rank's traffic to give or take: not worth another swap


class Targets(NamedTuple):
    """Traffic that each rank should have more, [M], for a largest time of `seconds`."""

    more: Floats
    seconds: float


def even_many_ranks(search: SwapSearch, topology: Topology) -> None:
    """Swap rows between single owners until T follows the targets, or a pass gains little."""
    ranks = topology.ranks
    if not topology.homogeneous or ranks <= MANY_RANKS or isinstance(topology, RelayedTopology):
        return
    own, mate, far = (_cost(search.columns[:ranks], mask) for mask in topology.masks().values())
    if own <= mate:
        return
    far = max(far, mate)
    node_of = np.unique(topology.node_of, return_inverse=True)[1]
    held = search.counts[:, :ranks].astype(np.float64)  # as products would make of it every time
    light = search.traffic_bytes <= _STAYS * float(dot(search.traffic_bytes, held).mean())
    light_bytes = np.where(light, search.traffic_bytes, 0.0)
    for _ in range(_PASSES):
        before = float(search.seconds.max())
        wanted = targets(search.seconds, dot(light_bytes, held), node_of, own - mate, far - mate)
        moved = _move(search, wanted.more.copy())
        held[:, moved] = search.counts[:, moved]
        gained = before - float(search.seconds.max())
        if gained <= _LEAST_GAIN * (before - float(search.seconds.mean())):
            break


def targets(seconds: Floats, movable: Floats, node_of: Ints, a: float, b: float) -> Targets:
    """Return the δ [M] of the least largest T: a rank can give up `movable` [M] of its traffic at
    most.

    Within a largest time θ a node's Δ is at least the need of its hottest rank and at most the room
    of all its ranks; θ is possible if the least sum to at most 0 and the most to at least 0.
    """
    nodes = int(node_of.max()) + 1
    size = len(node_of) // nodes

    def limits(largest: float) -> tuple[Floats, Floats]:
        spare = np.bincount(node_of, largest - seconds, nodes)
        slope = a - size * b
        least: Floats = -np.bincount(node_of, movable, nodes).astype(np.float64)
        most = np.full(nodes, np.inf)
        over = np.full(nodes, -np.inf)
        np.maximum.at(over, node_of, seconds - a * movable - largest)
        if b > 0:
            least = np.maximum(least, over / b)
        elif (over > 0).any():
            most[:] = -np.inf
        if slope > 0:
            most = np.minimum(most, spare / slope)
        elif slope < 0:
            least = np.maximum(least, spare / slope)
        elif (spare < 0).any():
            most[:] = -np.inf
        return least, most

    low, high = float(seconds.min()), float(seconds.max())
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        least, most = limits(middle)
        fits = (least <= most).all() and least.sum() <= 0 <= most.sum()
        low, high = (low, middle) if fits else (middle, high)
    least, most = limits(high)
    of_node = _nearest(np.minimum(least, most), np.maximum(least, most), 0.0)
    highest = (high - seconds + b * of_node[node_of]) / a
    more = np.zeros(len(seconds))
    for node in range(nodes):
        of = node_of == node
        lowest = np.minimum(-movable[of], highest[of])
        more[of] = _nearest(lowest, highest[of], float(of_node[node]))
    return Targets(more, high)


def _nearest(low: Floats, high: Floats, total: float) -> Floats:
    """Return values in [low, high] that sum to `total` as far as they can, all moved from the one
    nearest to 0 by the same share of their room."""
    values: Floats = np.clip(np.zeros(len(low)), low, high)
    short = total - float(values.sum())
    room = high - values if short > 0 else values - low
    room = np.where(np.isfinite(room), room, abs(short))
    if room.sum() <= 0:
        return values
    return np.asarray(
        values + short * np.minimum(room / room.sum(), room / max(abs(short), 1e-300))
    )


def _cost(columns: Floats, mask: NDArray[np.bool_]) -> float:
    """Return the cost of a byte for the ranks of one kind, equal for all of them; 0 if there are
    none."""
    costs = columns[mask]
    return float(costs[0]) if len(costs) else 0.0


def _move(search: SwapSearch, more: Floats) -> list[int]:
    """Swap rows so that each rank has `more` [M] traffic, from the largest on; uses `more` up. The
    ranks whose rows are others then."""
    least = _LEFT * np.abs(more)
    changed: set[int] = set()
    for _ in range(2 * len(more)):
        source, target = int(more.argmin()), int(more.argmax())
        amount = min(-float(more[source]), float(more[target]))
        if amount <= 0:
            break
        moved = search.move(source, target, amount)
        more[source] += moved
        more[target] -= moved
        # Nothing that comes near, or near enough: the end that was nearer is done.
        done = source if -more[source] <= more[target] else target
        if moved <= 0.5 * amount or abs(float(more[done])) <= least[done]:
            more[done] = 0.0
        changed |= {source, target}
    return sorted(changed)
