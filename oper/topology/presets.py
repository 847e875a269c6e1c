"""Topologies by name: `dgx-a100`, `NxG-a100`, `cpu:N` (sources: docs/topology.md)."""

import re
from collections.abc import Sequence

from oper.base.errors import OperError
from oper.base.free_memory import machine_memory_bytes
from oper.base.units import GB
from oper.topology.capacity import MAX_RANKS
from oper.topology.description import Description
from oper.topology.links import LINKED, SHARED, latency_seconds, link_matrix

PRESETS = ("dgx-a100", "dgx-h100", "2x4-a100", "4x4-a100", "cpu:N")  # as help and errors list them

# Bandwidths of the presets, bytes/s in one direction.
A100_MEMORY_BYTES = 40 * 10**9
A100_LOCAL = 1_244 * GB  # 0.8 × 1,555, the peak of the A100 40 GB's memory
A100_NVSWITCH = 240 * GB  # 300 the line, less about 20 % of protocol
A100_NVSWITCH_ALLREDUCE = 235 * GB  # NCCL's authors expect about 240 (NVIDIA/nccl #1712)
A100_PAIR = 80 * GB  # without a switch: four links of 25 between each pair, less protocol
A100_OTHER_NODE = 19 * GB  # 25 the line; 80 / 19 = 4.21 is the ratio of the paper's cluster
A100_HOST = 25.2 * GB  # 0.8 × 31.5, PCIe 4.0 x16: 16 lanes of 16 GT/s, 128 of 130 bits
A100_HOST_MEMORY_BYTES = 128 * 10**9  # an eighth of the 1 TB of a DGX A100 with 320 GB
A100_CLUSTER_ALLREDUCE = 72 * GB  # a model: a ring over four network adapters a node
H100_MEMORY_BYTES = 80 * 10**9
H100_LOCAL = 2_680 * GB  # 0.8 × 3,350, the peak of the H100's memory
H100_NVSWITCH = 370 * GB  # 450 the line (NVIDIA/nccl-tests #212)
H100_HOST = 50.4 * GB  # 0.8 × 63, PCIe 5.0 x16: 16 lanes of 32 GT/s, 128 of 130 bits
H100_HOST_MEMORY_BYTES = 256 * 10**9  # an eighth of the 2 TB of a DGX H100
H100_NVSWITCH_ALLREDUCE = 480 * GB  # in the switch (NVLS); a ring gets 370 (nccl-tests #212, #309)
# Measured with what `oper topology measure` runs, 2 ranks on a 2-core AMD EPYC (Zen 4) in a cloud,
# which other programs used too: so the CPU time of reads, and the fastest of many AllReduces.
CPU_LOCAL = 6 * GB  # random rows of 256 bytes: 5.8-6.3, own and the other rank's alike
CPU_ALLREDUCE = 2.5 * GB  # 2.5-2.7 by the clock; 3.5-4.6 of CPU time, as ranks wait for each other


def preset(spec: str) -> Description | None:
    """The preset of that name; None where there is none."""
    if spec == "dgx-a100":
        bandwidth = {"local": A100_LOCAL, "same_node": A100_NVSWITCH}
        made = uniform(spec, [0] * 8, bandwidth, A100_NVSWITCH_ALLREDUCE, A100_MEMORY_BYTES)
        return with_host(made, A100_HOST_MEMORY_BYTES, A100_HOST)
    if spec == "dgx-h100":
        bandwidth = {"local": H100_LOCAL, "same_node": H100_NVSWITCH}
        made = uniform(spec, [0] * 8, bandwidth, H100_NVSWITCH_ALLREDUCE, H100_MEMORY_BYTES)
        return with_host(made, H100_HOST_MEMORY_BYTES, H100_HOST)
    if match := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})-a100", spec):
        nodes, per_node = int(match[1]), int(match[2])
        _check_ranks(spec, nodes * per_node)
        bandwidth = {"local": A100_LOCAL, "same_node": A100_PAIR, "other_node": A100_OTHER_NODE}
        # In one node the ring uses the links between pairs, and no network adapter.
        allreduce = A100_CLUSTER_ALLREDUCE if nodes > 1 else A100_PAIR
        node_of = [rank // per_node for rank in range(nodes * per_node)]
        made = uniform(spec, node_of, bandwidth, allreduce, A100_MEMORY_BYTES)
        return with_host(made, A100_HOST_MEMORY_BYTES, A100_HOST)
    if match := re.fullmatch(r"cpu:([0-9]{1,9})", spec):
        ranks = int(match[1])
        _check_ranks(spec, ranks)
        bandwidth = {"local": CPU_LOCAL, "same_node": CPU_LOCAL}
        memory_bytes = machine_memory_bytes() // ranks
        made = uniform(spec, [0] * ranks, bandwidth, CPU_ALLREDUCE, memory_bytes)
        made["shares_host_memory"] = True
        made["memory"] = (SHARED,)
        return with_host(made, memory_bytes, CPU_LOCAL)  # device and host are one
    return None


def uniform(
    name: str,
    node_of: Sequence[int],
    bandwidth: dict[str, float],
    allreduce_bandwidth: float,
    device_memory_bytes: int,
) -> Description:
    """A topology whose links of one kind (KINDS) have one bandwidth, in bytes/s."""
    return Description(
        name=name,
        node_of=tuple(node_of),
        link_cost=link_matrix(node_of, {kind: 1 / value for kind, value in bandwidth.items()}),
        allreduce_bandwidth=allreduce_bandwidth,
        latency_seconds=latency_seconds(node_of),
        device_memory_bytes=(device_memory_bytes,) * len(node_of),
        shares_host_memory=False,
        host_memory_bytes=None,
        host_bandwidth=None,
        capacity=None,
        memory=(LINKED,) * len(set(node_of)),
    )


def with_host(described: Description, memory_bytes: int, bandwidth: float) -> Description:
    """The same with each rank's share of its host's memory, and the link to it in bytes/s."""
    ranks = len(described["node_of"])
    described["host_memory_bytes"] = (memory_bytes,) * ranks
    described["host_bandwidth"] = (bandwidth,) * ranks
    return described


def _check_ranks(name: str, ranks: int) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise OperError(f"topology {name}: {ranks} ranks, and 1 to {MAX_RANKS:,} were needed")
