"""Equal ranks in place of ranks that differ only within the error of measurements.

Two measurements of equal links never give equal numbers. If each link cost is within `NEARLY` of
the mean of its kind, and capacities and memories are that near to their means, plans are sought for
the mean costs and the least capacity, with which ranks are interchangeable
(oper/planner/place_nearly_alike.py). Plans are priced on the true links.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np

from oper.topology.capacity import Capacity
from oper.topology.links import KINDS, link_matrix
from oper.topology.pooled_links import PooledTopology
from oper.topology.relays import without_relays
from oper.topology.topology import Topology

# Relative, from the mean of the kind: five standard deviations of measurements that vary by 5 %
# (docs/design/measured-links.md).
NEARLY = 0.25

Number = TypeVar("Number", int, float)


@lru_cache(maxsize=8)
def as_alike(topology: Topology) -> Topology:
    """Return the topology with the mean cost of each kind of link, and the least capacity and
    memory; the given object if ranks are equal, or differ by more than `NEARLY`."""
    if isinstance(topology, PooledTopology):
        unpooled = without_relays(topology.unpooled)
        alike = as_alike(unpooled)
        return topology if alike is unpooled else topology.on(alike)
    costs = dict(zip(KINDS, topology.seconds_by_kind(), strict=True))
    link_cost = link_matrix(topology.node_of, costs)
    memory = topology.memory_for_plans
    of_ranks: dict[str, Any] = {
        "capacity": _least_capacity(topology.capacity),
        "device_memory_bytes": topology.device_memory_bytes if memory is None else _least(memory),
        "host_memory_bytes": _least(topology.host_memory_bytes),
        "host_bandwidth": _mean_rate(topology.host_bandwidth),
    }
    equal = np.array_equal(link_cost, topology.link_cost) and all(
        value == getattr(topology, name) for name, value in of_ranks.items()
    )
    near = bool((np.abs(topology.link_cost - link_cost) <= NEARLY * link_cost).all())
    alike_topology = replace(topology, link_cost=link_cost, **of_ranks)
    return alike_topology if near and alike_topology.homogeneous and not equal else topology


def with_mean_capacity(topology: Topology) -> Topology:
    """Return `as_alike(topology)` with the mean of the given capacities, which some ranks do not
    have; the object of `as_alike` itself if no capacities differ."""
    alike, capacities = as_alike(topology), topology.capacity
    if alike.capacity == capacities or not isinstance(capacities, tuple):
        return alike
    mean = sum(capacities) / len(capacities)
    of_rank = int(mean) if isinstance(capacities[0], int) else mean
    return replace(alike, capacity=(of_rank,) * len(capacities))


def bounding(topology: Topology) -> Topology:
    """Return the topology with the least cost of each kind of link and the greatest memory, without
    a capacity: no placement takes less on the true links than there."""
    if isinstance(topology, PooledTopology):
        return topology.on(bounding(without_relays(topology.unpooled)))
    least = {
        kind: float(topology.link_cost[mask].min())
        for kind, mask in topology.masks().items()
        if mask.any()
    }
    memory = topology.device_memory_bytes
    return replace(
        topology,
        link_cost=link_matrix(topology.node_of, least),
        capacity=None,
        device_memory_bytes=memory and (max(memory),) * topology.ranks,
    )


def _least_capacity(capacity: Capacity) -> Capacity:
    """Return the least for all ranks if all are near their mean and of one kind, bytes or
    factors."""
    if not isinstance(capacity, tuple) or len({type(each) for each in capacity}) > 1:
        return capacity
    return _least(capacity)


def _least(values: tuple[Number, ...] | None) -> tuple[Number, ...] | None:
    """Return the least of the values for all ranks, if each is near their mean."""
    return (min(values),) * len(values) if values and _near(values) else values


def _mean_rate(rates: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """Return the rate at which a byte takes the mean time, for all ranks, if each is near the mean
    rate."""
    if not rates or len(set(rates)) == 1 or not _near(rates):
        return rates
    return (1 / float(np.mean(1 / np.array(rates))),) * len(rates)


def _near(values: Sequence[float]) -> bool:
    """Return whether each of the values is within `NEARLY` of their mean."""
    mean = sum(values) / len(values)
    return all(abs(value - mean) <= NEARLY * mean for value in values)
