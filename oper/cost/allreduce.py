"""The replicas' AllReduce: what each of its methods costs a rank (§5.3)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oper.cost.sums import Sums
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

    def seconds(self, sums: Sums, which: NDArray[np.bool_]) -> float:
        if not sums.rows[which].sum():
            return 0.0
        return self.latency + self.bytes_rate(sums, which)

    def bytes_rate(self, sums: Sums, which: NDArray[np.bool_]) -> float:
        return float(
            self.row * sums.row_bytes[which].sum()
            + self.union * sums.union_bytes[which].sum()
            + self.gather * sums.gather_bytes[which].sum()
            + self.count * sums.rows[which].sum()
        )

    def memory_bytes(self, sums: Sums, which: NDArray[np.bool_], ranks: int) -> float:
        """What the gradients of a step take of a rank's memory on their way: its own buffer, and
        its part of the sums that all ranks of one node share. Gradients are counted with the bytes
        of their rows, as in all of the cost; the runtime's are float32, of narrower rows too."""
        both = 1 + 1 / ranks
        parts = {
            "none": 0.0,
            "dense": both * sums.row_bytes[which].sum(),
            "bitmap": both * sums.union_bytes[which].sum() + sums.rows[which].sum() / 8,
            "allgather": sums.gather_bytes[which].sum(),
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
