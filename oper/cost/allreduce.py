"""The replicas' AllReduce: what each of its methods costs a rank (§5.3)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from oper.base.arrays import Floats
from oper.cost.holder_sets import Sums
from oper.topology.topology import Topology

Method = Literal["none", "dense", "bitmap", "allgather"]
METHODS: tuple[Method, ...] = ("none", "dense", "bitmap", "allgather")


@dataclass(frozen=True)
class AllReduceCost:
    """What the replicas' AllReduce by one method costs a rank: linear in sums, plus a constant.

    Seconds = latency (once, if there is any replica) + row·ΣS + union·ΣSU + gather·Σ(S+4)D +
    count·(replicas). Ring and bitmap as in §5.3.
    """

    method: Method
    latency: float
    row: float = 0.0
    union: float = 0.0
    gather: float = 0.0
    count: float = 0.0

    def row_seconds(self, sums: Sums) -> Floats:
        """Seconds for the rows of each entry of `sums`, [G], the latency left out."""
        return np.asarray(
            self.row * sums.row_bytes
            + self.union * sums.union_bytes
            + self.gather * sums.gather_bytes
            + self.count * sums.rows
        )

    def seconds(self, replicas: Sums) -> float:
        """Seconds for all replicas, whose sums are one entry; 0 where there are none."""
        return self.latency + self.row_seconds(replicas).item() if replicas.rows else 0.0

    def memory_bytes(self, replicas: Sums, ranks: int) -> float:
        """What the gradients of a step take of a rank's memory on their way: its own buffer, and
        its part of the sums that all ranks of one node share. Gradients are counted with the bytes
        of their rows, as in all of the cost; the runtime's are float32, of narrower rows too."""
        both = 1 + 1 / ranks
        parts: dict[Method, Floats | float] = {
            "none": 0.0,
            "dense": both * replicas.row_bytes,
            "bitmap": both * replicas.union_bytes + replicas.rows / 8,
            "allgather": replicas.gather_bytes,
        }
        return float(parts[self.method])


def allreduce_cost(topology: Topology, method: Method) -> AllReduceCost:
    """The AllReduce coefficients of `method` on a topology."""
    ranks, bandwidth = topology.ranks, topology.allreduce_bandwidth
    ring = 2 * (ranks - 1) / ranks / bandwidth
    hop = topology.latency_seconds
    if method == "dense":
        return AllReduceCost(method, 2 * (ranks - 1) * hop, row=ring)
    if method == "bitmap":
        # The bitmaps of all ranks are gathered (M·R/8 bytes), then the union is reduced.
        return AllReduceCost(method, 3 * (ranks - 1) * hop, union=ring, count=ranks / 8 / bandwidth)
    if method == "allgather":
        return AllReduceCost(method, (ranks - 1) * hop, gather=(ranks - 1) / bandwidth)
    return AllReduceCost("none", 0.0)


def published_replication_frequency(topology: Topology, batch_size: int) -> float:
    """BW_p2p / (B · BW_allreduce): above so many reads per sample the paper's rule (§4.3) gives a
    row a copy on every rank, of two or more. BW_p2p is that of the mean link between two ranks."""
    away = ~np.eye(topology.ranks, dtype=bool)
    p2p_bandwidth = 1 / float(topology.link_cost[away].mean())
    return p2p_bandwidth / (batch_size * topology.allreduce_bandwidth)
