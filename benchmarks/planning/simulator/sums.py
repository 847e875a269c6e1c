"""The AllReduce of the replicas' gradients: seconds of a sum over all ranks, by each algorithm.

ring        2(M - 1) hops, each of a part of 1/M, over the slowest of the links in a row
switch      one full node whose switch adds up: two hops
two levels  the ranks of a node add up a slice each, the ranks at one position of all nodes add
            these up by recursive halving and doubling (Rabenseifner), and the node shares them
"""

import math
from typing import NamedTuple

from benchmarks.planning.simulator.machine import Machine


class SumSeconds(NamedTuple):
    """Seconds of hops and messages, and of bytes."""

    latency: float
    moving: float

    @property
    def total(self) -> float:
        return self.latency + self.moving

    def then(self, other: "SumSeconds") -> "SumSeconds":
        """This sum and then another."""
        return SumSeconds(self.latency + other.latency, self.moving + other.moving)


NO_SUM = SumSeconds(0.0, 0.0)
NEVER = SumSeconds(math.inf, math.inf)


def sum_seconds(machine: Machine, size: float) -> SumSeconds:
    """Adding up `size` bytes of every rank, by the algorithm that is done first."""
    return min((f(machine, size) for f in ALGORITHMS.values()), key=lambda each: each.total)


def ring_seconds(machine: Machine, size: float) -> SumSeconds:
    """A ring through all ranks; where there are several nodes as many rings as adapters."""
    M = machine.ranks
    hops, hop, bandwidth = 2 * (M - 1), machine.near_hop, near_bandwidth(machine)
    if machine.nodes > 1:
        hop = machine.far_hop + machine.message
        bandwidth = min(bandwidth, machine.adapters_per_node * machine.adapter_bandwidth)
    return SumSeconds(hops * hop, hops / M * size / bandwidth)


def switch_seconds(machine: Machine, size: float) -> SumSeconds:
    """Sums by the switch of the only node; never done where it makes none."""
    if machine.nodes > 1 or machine.switch_sum_bandwidth is None:
        return NEVER
    M = machine.ranks
    return SumSeconds(2 * machine.near_hop, 2 * (M - 1) / M * size / machine.switch_sum_bandwidth)


def two_level_seconds(machine: Machine, size: float) -> SumSeconds:
    """Slices inside the nodes, halving and doubling between them."""
    N, G = machine.nodes, machine.ranks_per_node
    latency = moving = 0.0
    if G > 1:
        latency += 2 * machine.near_hop
        moving += 2 * (G - 1) / G * size / near_bandwidth(machine)
    if N > 1:
        steps = int(math.log2(N))
        hops, share = 2 * steps, 2 * (1 - 2.0**-steps)
        if 2**steps < N:  # the others first give theirs to a partner, and get the sums at the end
            hops, share = hops + 2, share + 2
        latency += hops * (machine.far_hop + machine.message)
        moving += share * size / G / far_bandwidth(machine)
    return SumSeconds(latency, moving)


ALGORITHMS = {"ring": ring_seconds, "switch": switch_seconds, "two levels": two_level_seconds}


def gather_seconds(machine: Machine, size: float) -> SumSeconds:
    """Every rank gets the `size` bytes of each: the ranks at one position of all nodes exchange
    theirs, and then those of a node read what each other have."""
    N, G = machine.nodes, machine.ranks_per_node
    latency = moving = 0.0
    if N > 1:
        latency += machine.far_hop + (N - 1) * machine.message
        moving += (N - 1) * size / far_bandwidth(machine)
    if G > 1:
        latency += machine.near_hop
        moving += N * (G - 1) * size / near_bandwidth(machine)
    return SumSeconds(latency, moving)


def near_bandwidth(machine: Machine) -> float:
    """Bytes/s of a rank to the others of its node."""
    return machine.memory_bandwidth if machine.link_bandwidth is None else machine.link_bandwidth


def far_bandwidth(machine: Machine) -> float:
    """Bytes/s of a rank to other nodes, where all ranks of its node use their adapters."""
    return machine.adapters_per_node * machine.adapter_bandwidth / machine.ranks_per_node
