"""A phase of an iteration, between two points at which ranks wait for each other, and its time.

In a phase all bytes move at once, over the resources of the machine:

    memory of a rank           what its kernels read and write there, and what leaves it or arrives
    cache of a rank            what its kernels read again
    link out, link in          of a rank to its node's switch
    adapter out, adapter in    of a node
    bisection, each way        of the nodes

Before them come the hops, the messages that a rank sends one after the other, and the kernels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.planning.simulator.flows import Floats, Flows
from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.sums import NO_SUM, SumSeconds

MOST_RANKS_OF_FAIR_FLOWS = 32  # each of M² flows ends at a time of its own, when rates are found


class PhaseSeconds(NamedTuple):
    """Seconds of a phase: its latencies, and its bytes, by max-min fair rates (None where there are
    too many flows) and at least."""

    latency: float
    fair: float | None
    bound: float

    @property
    def seconds(self) -> float:
        """Latencies and bytes, by fair rates where there are some."""
        return self.latency + (self.bound if self.fair is None else self.fair)

    @property
    def least(self) -> float:
        """Latencies, and bytes at least."""
        return self.latency + self.bound


@dataclass(frozen=True)
class Phase:
    """What M ranks do at once.

    moved: bytes from rank i to rank j ≠ i, [M, M]; they are read from the memory of i and, if they
    land, written to that of j (otherwise j's kernel has read them itself). memory, cache: bytes of
    kernels in their own rank's, [M]. rounds: how often messages go to all who are sent something,
    one after the other. kernels: one after the other, too. sums: of an AllReduce in it, beside what
    the ranks' kernels do.
    """

    name: str
    moved: Floats
    memory: Floats
    cache: Floats
    lands: bool = True
    rounds: int = 1
    kernels: int = 1
    sums: SumSeconds = NO_SUM

    def on(self, machine: Machine) -> PhaseSeconds:
        """What it takes; nothing where nothing is done."""
        if not (self.moved.any() or self.memory.any() or self.cache.any() or self.sums.total):
            return PhaseSeconds(0.0, 0.0, 0.0)
        node_of = machine.node_of
        far = (self.moved > 0) & (node_of[:, None] != node_of)
        near = (self.moved > 0) & ~far
        latency = self.kernels * machine.kernel + self.sums.latency
        if far.any():
            sent = int(np.maximum(far.sum(axis=0), far.sum(axis=1)).max())
            latency += self.rounds * (machine.far_hop + sent * machine.message)
        elif near.any():
            latency += self.rounds * machine.near_hop
        flows = self.flows(machine)
        fair = flows.fair_seconds if machine.ranks <= MOST_RANKS_OF_FAIR_FLOWS else None
        moving = self.sums.moving
        return PhaseSeconds(latency, None if fair is None else fair + moving, flows.bound + moving)

    def flows(self, machine: Machine) -> Flows:
        """Its bytes, and the resources of the machine that they go through."""
        M, adapters = machine.ranks, machine.nodes * machine.adapters_per_node
        ranks = np.arange(M)
        memory, cache, link_out, link_in = (n * M + ranks for n in range(4))
        adapter_out = 4 * M + machine.adapter_of
        adapter_in = adapter_out + adapters
        bisection = 4 * M + 2 * adapters
        none = bisection + 2
        link = np.inf if machine.link_bandwidth is None else machine.link_bandwidth
        crossing = machine.bisection_bandwidth or np.inf
        bandwidth = np.concatenate(
            [
                np.full(M, machine.memory_bandwidth),
                np.full(M, machine.cache_bandwidth),
                np.full(2 * M, link),
                np.full(2 * adapters, machine.adapter_bandwidth),
                np.full(2, crossing),
            ]
        )
        source, target = np.nonzero(self.moved)
        node_of = machine.node_of
        far = node_of[source] != node_of[target]
        half = node_of < machine.nodes / 2
        crosses = half[source] != half[target]
        # Where ranks share memory a reader takes bytes from it with its own share of bandwidth.
        by_reader = ~far & (machine.link_bandwidth is None)
        used = np.stack(
            [
                np.where(by_reader, memory[target], memory[source]),
                np.where(far | by_reader, none, link_out[source]),
                np.where(far | by_reader, none, link_in[target]),
                np.where(far, adapter_out[source], none),
                np.where(far, adapter_in[target], none),
                np.where(crosses, bisection + half[source], none),
                np.where(self.lands & ~by_reader, memory[target], none),
            ],
            axis=1,
        )
        own = np.full((2 * M, used.shape[1]), none)
        own[:, 0] = np.concatenate([memory, cache])
        return Flows(
            np.concatenate([self.moved[source, target], self.memory, self.cache]),
            np.concatenate([used, own]),
            bandwidth,
        )


def nothing(ranks: int) -> NDArray[np.float64]:
    """No bytes between so many ranks, [M, M]."""
    return np.zeros((ranks, ranks))
