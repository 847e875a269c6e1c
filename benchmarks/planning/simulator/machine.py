"""The machine that is simulated: ranks on nodes, what joins them, and what each part takes.

Every rank has a memory, a cache before it, and a link into and out of its node's switch; each node
has adapters to the other nodes, which its ranks share in turn. Ranks of a host that share memory
have no links between them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GB = 1e9


@dataclass(frozen=True)
class Machine:
    """Nodes of equally many ranks; bandwidths are bytes/s of one direction, times are seconds.

    memory_bandwidth, cache_bandwidth: of a rank. link_bandwidth: of a rank's link to its node's
    switch; None where the ranks of a node share memory. adapter_bandwidth: of each of a node's
    adapters; rank i of a node uses adapter i modulo their number. switch_sum_bandwidth: bus
    bandwidth of sums that the switch of a whole node makes itself, None where it makes none.
    bisection_bandwidth: between the first half of the nodes and the others; None: never in the way.
    near_hop, far_hop: latency of a message inside a node and between nodes. message: of each
    message that a rank sends to another node, one after the other. kernel: of each kernel, beside
    its work.
    """

    name: str
    nodes: int
    ranks_per_node: int
    memory_bandwidth: float
    cache_bandwidth: float
    link_bandwidth: float | None
    adapter_bandwidth: float
    adapters_per_node: int
    near_hop: float
    far_hop: float
    message: float
    kernel: float
    switch_sum_bandwidth: float | None = None
    bisection_bandwidth: float | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def node_of(self) -> NDArray[np.int64]:
        """The node of each rank, [M]."""
        return np.arange(self.ranks) // self.ranks_per_node

    @property
    def adapter_of(self) -> NDArray[np.int64]:
        """The adapter of each rank, numbered over all nodes, [M]."""
        position = np.arange(self.ranks) % self.ranks_per_node
        return self.node_of * self.adapters_per_node + position % self.adapters_per_node

    def proxy(self, rank: int, node: int) -> int:
        """The rank of a node that talks to `rank` of another: the one at its position."""
        return int(self.proxies(np.array(rank), node))

    def proxies(self, rank: NDArray[np.int64], node: int) -> NDArray[np.int64]:
        """Those of several ranks."""
        return node * self.ranks_per_node + rank % self.ranks_per_node


def h100(nodes: int, ranks_per_node: int = 8, adapters_per_node: int | None = None) -> Machine:
    """Nodes of up to eight H100 on one NVSwitch; an adapter of 400 Gb/s a rank, unless given."""
    return Machine(
        name=f"{nodes}x{ranks_per_node}-h100",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        # 0.8 of the 3,350 GB/s of NVIDIA's data sheet, as random rows are read.
        memory_bandwidth=2_680 * GB,
        # Measured on an H100 PCIe: Chips and Cheese, "Nvidia's H100: Funny L2, and Tons of
        # Bandwidth", 2023.
        cache_bandwidth=5_500 * GB,
        # Of 450, the line: NVIDIA/nccl-tests #212.
        link_bandwidth=370 * GB,
        # 400 Gb/s are 50 GB/s; rows come in smaller messages than the sums of which NCCL's authors
        # expect 46 to 48 (NVIDIA/nccl-tests #290): the paper's cluster has 19 of 25.
        adapter_bandwidth=38 * GB,
        adapters_per_node=ranks_per_node if adapters_per_node is None else adapters_per_node,
        # NCCL's own tuning model (nccl/src/graph/tuning.cc, hwLat): 1.9 µs over NVLink (ring,
        # LL128), 4 to 5 over a network (ring LL128, tree LL).
        near_hop=1.9e-6,
        far_hop=4.5e-6,
        # A thread of the host posts about 1.7 million messages a second: NVIDIA, "Improving Network
        # Performance of HPC Systems Using NVSHMEM and GPUDirect Async", 2022, of IBRC.
        message=0.6e-6,
        # Short kernels in a stream start 3.8 µs apart, of which 2.9 are their work: NVIDIA,
        # "Getting Started with CUDA Graphs", 2019.
        kernel=0.9e-6,
        # In the switch (NVLS), reported of eight: nccl-tests #212, #309.
        switch_sum_bandwidth=480 * GB if ranks_per_node == 8 else None,
    )
