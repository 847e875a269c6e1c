"""The latency of a step: the seconds that it takes however few bytes its rows have.

The objective (objective.py) counts bytes alone, which no plan can move in no time: kernels must be
started, ranks must wait for each other, and between nodes messages must be sent. What these take
follows from the ranks and from how rows are fetched, not from where rows are, so that it is no part
of what plans are compared by. The AllReduce's own, which only plans with replicas pay, is
(allreduce.py). What a batch needs before its lookup, translation and sort, is left out: it is done
a batch ahead.
"""

from dataclasses import dataclass

from oper.cost.allreduce import exchange_seconds
from oper.cost.workload import Workload
from oper.topology.relays import RelayedTopology, relayed
from oper.topology.topology import Topology
from oper.topology.transports import COLLECTIVE, NVSHMEM


@dataclass(frozen=True)
class StepLatency:
    """What one rank does in a step, one after the other, and the seconds that it all takes.

    kernels: that are started, or operators called on CPU ranks. waits: for the ranks of its node.
    exchanges: between nodes, each with a message to every one of `peers` ranks.
    """

    kernels: int = 0
    waits: int = 0
    exchanges: int = 0
    peers: int = 0
    seconds: float = 0.0


def step_latency(
    topology: Topology, workload: Workload, widths: int, pooled_widths: int = 0
) -> StepLatency:
    """What a step takes of tables of `widths` widths whose rows travel, and of pooled ones of
    `pooled_widths`, as the runtime does it (row_fetcher.py, row_relay.py, apply_gradients.py): rows
    are copied and gradients summed and applied by width, and go between nodes in messages of all
    widths, those of pooled tables in others."""
    latency, transport = topology.latency, topology.known_transport
    over_nodes, shared = topology.nodes > 1, topology.nodes < topology.ranks
    fetch = workload.known_fetch
    kernels, waits, exchanges = 1, 0, 0
    peers = topology.ranks - topology.ranks // topology.nodes if over_nodes else 0
    if over_nodes and pooled_widths:
        exchanges += 1  # of sums; which bags they are of is told a batch ahead
        kernels += 1
    if not widths:
        pass  # all that is fetched is sums
    elif over_nodes and transport == COLLECTIVE:
        kernels += widths + 1  # asked rows are copied, and accesses redirected to them
        exchanges += 3  # how many slots there are, slots, rows
        if fetch == "distinct":
            kernels += 1  # a node's slots are united
            waits += 2 * shared
    elif fetch == "distinct" and topology.ranks > 1:
        kernels += 1
    if over_nodes and transport == NVSHMEM:
        exchanges += 1
    if workload.training:
        kernels += 2 * (widths + pooled_widths)
        waits += 2 * shared
        if over_nodes:
            exchanges += 2 * (widths > 0)  # how many gradients there are, gradients
            exchanges += pooled_widths > 0
            kernels += widths > 0  # gradients are made messages of
    relays = relayed(topology, fetch == "distinct")
    if isinstance(relays, RelayedTopology):
        peers = relays.most_peers
    seconds = kernels * latency.kernel + waits * latency.same_node
    seconds += exchanges * (exchange_seconds(topology, peers) if peers else 0.0)
    return StepLatency(kernels, waits, exchanges, peers, seconds)
