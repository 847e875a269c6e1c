"""The replicas' AllReduce: its methods, and the cost per rank of each (§5.3)."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from oper.base.arrays import Floats
from oper.cost.holder_sets import Sums
from oper.topology.pooled_links import without_pooling
from oper.topology.topology import Topology

Method = Literal["none", "dense", "bitmap", "allgather"]
METHODS: tuple[Method, ...] = ("none", "dense", "bitmap", "allgather")


@dataclass(frozen=True)
class AllReduceCost:
    """Cost per rank of the replicas' AllReduce by one method: linear in sums, plus a constant.

    Seconds = latency (once, if there is any replica) + row·ΣS + union·ΣSU + gather·Σ(S+4)D +
    count·(replicas). The bytes are those of a ring (§5.3). The latency follows the runtime, which
    sums within a node through its memory, then between nodes (`node_sum`).
    """

    method: Method
    latency: float
    row: float = 0.0
    union: float = 0.0
    gather: float = 0.0
    count: float = 0.0

    def row_seconds(self, sums: Sums) -> Floats:
        """Return the seconds for the rows of each entry of `sums`, [G], without the latency."""
        return np.asarray(
            self.row * sums.row_bytes
            + self.union * sums.union_bytes
            + self.gather * sums.gather_bytes
            + self.count * sums.rows
        )

    def seconds(self, replicas: Sums) -> float:
        """Return the seconds for all replicas, given their sums as one entry; 0 without
        replicas."""
        return self.latency + self.row_seconds(replicas).item() if replicas.rows else 0.0

    def memory_bytes(self, replicas: Sums, ranks: int) -> float:
        """Return the bytes of a rank's memory that a step's gradients occupy in flight: the rank's
        own buffer, and its part of the sums that all ranks of one node share. A gradient is counted
        with the bytes of its row, as everywhere in the cost; the runtime's gradients are float32
        even if the rows are narrower."""
        both = 1 + 1 / ranks
        parts: dict[Method, Floats | float] = {
            "none": 0.0,
            "dense": both * replicas.row_bytes,
            "bitmap": both * replicas.union_bytes + replicas.rows / 8,
            "allgather": replicas.gather_bytes,
        }
        return float(parts[self.method])


def allreduce_cost(topology: Topology, method: Method) -> AllReduceCost:
    """Return the AllReduce coefficients of `method` on a topology."""
    ranks, bandwidth = topology.ranks, topology.allreduce_bandwidth
    ring = 2 * (ranks - 1) / ranks / bandwidth
    seconds = _latency(topology, method)
    if method == "dense":
        return AllReduceCost(method, seconds, row=ring)
    if method == "bitmap":
        # The bitmaps of a node's ranks are gathered, and one of each other node (R/8 bytes each),
        # then the union is reduced.
        bitmaps = ranks / topology.nodes + topology.nodes - 1
        return AllReduceCost(method, seconds, union=ring, count=bitmaps / 8 / bandwidth)
    if method == "allgather":
        return AllReduceCost(method, seconds, gather=(ranks - 1) / bandwidth)
    return AllReduceCost("none", 0.0)


@dataclass(frozen=True)
class NodeCopiesCost:
    """Cost of adding up the gradients of rows with one copy on each node. The holders of a row,
    which have the same position in their nodes, add them up among themselves: one holder gets the
    sums of all nodes and sends the total back.

    Seconds of rank r = latency (once, if there are such rows) + union[r]·ΣSU of the rows it holds:
    a ring's bytes on its own link, and the update of its copies.
    """

    latency: float
    union: Floats  # [M]

    @staticmethod
    def of(topology: Topology) -> "NodeCopiesCost":
        """Return the cost on a topology whose nodes have one size, with or without pooled
        tables."""
        topology = without_pooling(topology)
        M, N = topology.ranks, topology.nodes
        if N == 1:
            return NodeCopiesCost(0.0, np.zeros(M))
        other, own = topology.masks()["other_node"], np.arange(M)[:, None]
        links = topology.link_cost[own, topology.proxy]  # to the rank at the same position
        link = np.where(other, links, 0.0).sum(axis=1) / other.sum(axis=1)
        seconds = NODE_COPIES.exchanges * exchange_seconds(topology, N - 1)
        seconds += NODE_COPIES.kernels * topology.latency.kernel
        return NodeCopiesCost(seconds, 2 * (N - 1) / N * link + topology.link_cost.diagonal())


class ReplicaBytes(NamedTuple):
    """Replicas that an AllReduce sums: their number, and the bytes of the float32 gradients of all,
    of those that any rank touched, and (with their row numbers) of those that one rank touched."""

    rows: float
    all: float
    of_any: float
    of_rank: float


def level_seconds(topology: Topology, method: Method, replicas: ReplicaBytes) -> float:
    """Return the seconds for the bytes of an AllReduce, level after level: over the links inside a
    node, in which every rank adds up a slice of its node's sum, then between nodes, and back. On
    one node the bus bandwidth decides."""
    M, N = topology.ranks, topology.nodes
    if N == 1:
        ring, bandwidth = 2 * (M - 1) / M, topology.allreduce_bandwidth
        return {
            "none": 0.0,
            "dense": ring * replicas.all,
            "bitmap": ring * replicas.of_any + (M - 1) * replicas.rows / 8,
            "allgather": (M - 1) * replicas.of_rank,
        }[method] / bandwidth
    G = M / N
    _, same_node, other_node = topology.seconds_by_kind()

    def summed(size: float) -> float:
        slices = 2 * (G - 1) / G * size * same_node
        return slices + 2 * (N - 1) / N * size / G * other_node

    def gathered(size: float, by_nodes: float) -> float:
        return (G - 1) * by_nodes * size * same_node + (N - 1) * size * other_node

    return {
        "none": 0.0,
        "dense": summed(replicas.all),
        "bitmap": summed(replicas.of_any) + gathered(replicas.rows / 8, 1),
        "allgather": gathered(replicas.of_rank, N),
    }[method]


class _Phases(NamedTuple):
    """Fixed work of the runtime for a method, whatever the number of replicas
    (oper/runtime/allreduce/): kernels that run one after the other, exchanges between nodes, and
    sums over nodes. The ranks of a node wait for each other twice more than in a step without
    replicas."""

    kernels: int
    exchanges: int
    sums: int


# For copies on each node: the number of rows and the rows themselves, there and back.
NODE_COPIES = _Phases(kernels=2, exchanges=4, sums=0)

_NODE_WAITS = 2
PHASES: dict[Method, _Phases] = {
    "dense": _Phases(kernels=4, exchanges=0, sums=1),
    "bitmap": _Phases(kernels=5, exchanges=1, sums=1),
    "allgather": _Phases(kernels=3, exchanges=2, sums=0),
}


def _latency(topology: Topology, method: Method) -> float:
    if method == "none" or topology.ranks == 1:
        return 0.0
    phases, latency = PHASES[method], topology.latency
    seconds = phases.kernels * latency.kernel
    if topology.nodes < topology.ranks:
        seconds += _NODE_WAITS * latency.same_node
    if topology.nodes > 1:
        seconds += phases.exchanges * exchange_seconds(topology, topology.nodes - 1)
        seconds += phases.sums * _sum_seconds(topology)[node_sum(topology)]
    return seconds


def exchange_seconds(topology: Topology, peers: int) -> float:
    """Return the fixed latency, in seconds, of an exchange between nodes in which a rank sends to
    `peers` others. gloo, which CPU ranks use, sends an empty message to each of the rest."""
    return topology.latency.exchange_seconds(peers if topology.of_devices else topology.ranks - 1)


# Sums over nodes: all nodes exchange at once, twice; or each with one other in each of 2·⌈log2 N⌉
# rounds. Both move 2(N-1)/N of the summed bytes.
NodeSum = Literal["at_once", "in_rounds"]


def node_sum(topology: Topology) -> NodeSum:
    """Return the faster way to sum the replicas' gradients over a topology's nodes. Rounds need
    nodes of equal size."""
    sizes = set(Counter(topology.node_of).values())
    seconds = _sum_seconds(topology)
    rounds_pay = seconds["in_rounds"] < seconds["at_once"]
    return "in_rounds" if len(sizes) == 1 and rounds_pay else "at_once"


def _sum_seconds(topology: Topology) -> dict[NodeSum, float]:
    """Return the fixed latency of each way: its exchanges, and a kernel for each addition."""
    nodes, kernel = topology.nodes, topology.latency.kernel
    rounds = (nodes - 1).bit_length()
    return {
        "at_once": 2 * exchange_seconds(topology, nodes - 1) + kernel,
        "in_rounds": rounds * (2 * exchange_seconds(topology, 1) + kernel),
    }


def published_replication_frequency(topology: Topology, batch_size: float) -> float:
    """Return BW_p2p / (B · BW_allreduce), the reads per sample above which the paper's rule (§4.3)
    gives a row a copy on every rank, for two ranks or more. BW_p2p is the bandwidth of the mean
    link between two ranks, and B the paper's Batch_Size, of one rank or of all: the paper does not
    say."""
    away = ~np.eye(topology.ranks, dtype=bool)
    p2p_bandwidth = 1 / float(topology.link_cost[away].mean())
    return p2p_bandwidth / (batch_size * topology.allreduce_bandwidth)
