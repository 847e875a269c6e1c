"""Topologies by name: one server (`dgx-h100`), a cluster (`NxG-h100`), or CPU ranks (`cpu:N`).

Bandwidths are bytes/s in one direction, from published figures (sources: docs/topology.md): 0.8 of
the peak of memories and of PCIe, the line rate of a link less its protocol. Only the CPU's were
measured.
"""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple, NotRequired, TypedDict

from oper.base.arrays import Floats
from oper.base.errors import OperError
from oper.base.free_memory import machine_memory_bytes
from oper.base.units import GB
from oper.topology.capacity import MAX_RANKS, Capacity
from oper.topology.latency import CPU_RANKS, DEVICES, Latency
from oper.topology.links import LINKED, SHARED, Network, NodeMemory, link_matrix
from oper.topology.transports import Transport


class Description(TypedDict):
    """The arguments of `Topology`, which documents them."""

    name: str
    node_of: tuple[int, ...]
    link_cost: Floats
    allreduce_bandwidth: float
    latency: Latency
    device_memory_bytes: tuple[int, ...] | None
    shares_host_memory: bool
    host_memory_bytes: tuple[int, ...] | None
    host_bandwidth: tuple[float, ...] | None
    capacity: Capacity
    memory: tuple[NodeMemory, ...]
    transport: NotRequired[Transport | None]
    cache_bandwidth: NotRequired[float | None]


# In the order of help and errors.
PRESETS = ("dgx-a100", "dgx-h100", "dgx-h200", "hgx-b200", "NxG-a100", "NxG-h100", "cpu:N")


class Accelerator(NamedTuple):
    """Device of a server, with the switch that joins eight devices, and its share of the host."""

    memory_bytes: int
    local: float
    switch: float
    switch_allreduce: float  # bus bandwidth of eight
    host_bandwidth: float
    host_memory_bytes: int
    cache: float | None = None  # of kernels that read rows again; None: not known


A100 = Accelerator(
    memory_bytes=40 * 10**9,
    local=1_244 * GB,  # 0.8 × 1,555, the peak of the A100 40 GB's memory
    switch=240 * GB,  # 300 the line, less about 20 % of protocol
    switch_allreduce=235 * GB,  # NCCL's authors expect about 240 (NVIDIA/nccl #1712)
    host_bandwidth=25.2 * GB,  # 0.8 × 31.5, PCIe 4.0 x16: 16 lanes of 16 GT/s, 128 of 130 bits
    host_memory_bytes=128 * 10**9,  # an eighth of the 1 TB of a DGX A100 with 320 GB
)
H100 = Accelerator(
    memory_bytes=80 * 10**9,
    local=2_680 * GB,  # 0.8 × 3,350, the peak of the H100's memory
    switch=370 * GB,  # 450 the line (NVIDIA/nccl-tests #212)
    switch_allreduce=480 * GB,  # in the switch (NVLS); a ring gets 370 (nccl-tests #212, #309)
    host_bandwidth=50.4 * GB,  # 0.8 × 63, PCIe 5.0 x16: 16 lanes of 32 GT/s, 128 of 130 bits
    host_memory_bytes=256 * 10**9,  # an eighth of the 2 TB of a DGX H100
    # Of the second-level cache, measured on an H100 PCIe ("Nvidia's H100: Funny L2, and Tons of
    # Bandwidth", Chips and Cheese, 2023).
    cache=5_500 * GB,
)
H200 = H100._replace(  # the H100 with other memory: the same links, and hosts of 2 TB too
    memory_bytes=141 * 10**9,
    local=3_840 * GB,  # 0.8 × 4,800
)
B200 = H100._replace(  # PCIe 5.0 x16 and hosts of 2 TB as with the H100
    cache=None,
    memory_bytes=180 * 10**9,  # of 192 on the device; 1,440 GB of a DGX B200
    local=6_400 * GB,  # 0.8 × 8,000
    switch=720 * GB,  # 900 the line; NCCL itself counts 18 links of 40.1 (NVIDIA/nccl #1807)
    switch_allreduce=830 * GB,  # in the switch, reported by a user of eight (NVIDIA/nccl #1807)
)
SERVERS = {"dgx-a100": A100, "dgx-h100": H100, "dgx-h200": H200, "hgx-b200": B200}

DEVICES_A_SERVER = 8  # of every server here

A100_PAIR = 80 * GB  # without a switch: four links of 25 per pair, less protocol
A100_OTHER_NODE = 19 * GB  # 25 the line; 80 / 19 = 4.21 is the ratio of the paper's cluster
A100_ADAPTERS = 4  # per node, like in the paper's cluster, or one per device if those are fewer
A100_ADAPTER_ALLREDUCE = 18 * GB  # a model: a ring over a node's adapters, 72 with all four
H100_OTHER_NODE = 38 * GB  # 50 the line, an adapter of 400 Gb/s a device; 19 / 25 of it, as above
H100_MOST_A_NODE = 8  # devices that one switch joins
# Measured with the kernels of `oper topology measure`, 2 ranks on a 2-core AMD EPYC (Zen 4) in a
# cloud, which other programs used too: hence the CPU time of reads, and the fastest of many
# AllReduces.
CPU_LOCAL = 6 * GB  # random rows of 256 bytes: 5.8-6.3, both own and the other rank's
CPU_ALLREDUCE = 2.5 * GB  # 2.5-2.7 by the clock; 3.5-4.6 of CPU time, because ranks wait


def preset(spec: str) -> Description | None:
    """Return the preset named `spec`; None if `spec` names no preset."""
    if device := SERVERS.get(spec):
        bandwidth = {"local": device.local, "same_node": device.switch}
        return _devices(spec, device, [0] * DEVICES_A_SERVER, bandwidth, device.switch_allreduce)
    if match := re.fullmatch(r"([0-9]{1,9})x([0-9]{1,9})-(a100|h100)(?::([0-9]{1,9}))?", spec):
        nodes, per_node = int(match[1]), int(match[2])
        _check_ranks(spec, nodes * per_node)
        usual = min(A100_ADAPTERS, per_node) if match[3] == "a100" else per_node
        adapters = usual if match[4] is None else int(match[4])
        if not 1 <= adapters <= per_node:
            raise OperError(
                f"topology {spec}: expected 1 to {per_node} network adapters in a node of "
                f"{per_node} devices, got {adapters}"
            )
        cluster = _a100_cluster if match[3] == "a100" else _h100_cluster
        return cluster(spec, nodes, per_node, adapters)
    if match := re.fullmatch(r"cpu:([0-9]{1,9})", spec):
        ranks = int(match[1])
        _check_ranks(spec, ranks)
        bandwidth = {"local": CPU_LOCAL, "same_node": CPU_LOCAL}
        memory_bytes = machine_memory_bytes() // ranks
        made = uniform(spec, [0] * ranks, bandwidth, CPU_ALLREDUCE, memory_bytes)
        made["latency"] = CPU_RANKS
        made["shares_host_memory"] = True
        made["memory"] = (SHARED,)
        return with_host(made, memory_bytes, CPU_LOCAL)  # device and host are one
    return None


def nearest_preset(spec: str) -> str | None:
    """Return the preset that was probably meant by an unknown name; None if none is near.

    A device with one number means that many devices (`h100x8`, `8xh100`); with two numbers, nodes
    and devices per node (`2x8h100`). With the name of a server, the number counts servers.
    """
    name = spec.lower()
    device = re.search(r"[ahb][0-9]00(?![0-9])", name)
    if device is None:
        if cpu := re.fullmatch(r"\D*?([0-9]{0,4})\W*x?\W*cpus?\W*x?\W*([0-9]{0,4})", name):
            return f"cpu:{int(cpu[1] or cpu[2] or 0) or 'N'}"
        near = difflib.get_close_matches(name, PRESETS, n=1)
        return near[0] if near else None
    server = next((server for server in SERVERS if server.endswith(device[0])), None)
    if f"NxG-{device[0]}" not in PRESETS:
        return server
    rest = name[: device.start()] + " " + name[device.end() :]
    rest = re.sub(r"[0-9]+ *gb?(?![a-z])", " ", rest)  # of memory: h100-80gb
    numbers = [int(number) for number in re.findall(r"[0-9]{1,4}", rest)]
    if re.search("[dh]gx", rest) and len(numbers) == 1:
        numbers.append(DEVICES_A_SERVER)
    meant = _cluster_of(numbers, device[0])
    return server if meant is None else meant


def _cluster_of(numbers: Sequence[int], device: str) -> str | None:
    """Return the cluster with these numbers of devices, or of nodes and devices per node; None if
    there is none."""
    nodes = 1
    if len(numbers) == 1:
        (per_node,) = numbers
        if per_node > DEVICES_A_SERVER and per_node % DEVICES_A_SERVER == 0:
            nodes, per_node = per_node // DEVICES_A_SERVER, DEVICES_A_SERVER
    elif len(numbers) == 2:
        nodes, per_node = numbers
    else:
        return None
    in_a_server = nodes == 1 and per_node == DEVICES_A_SERVER
    fits = 1 <= per_node <= DEVICES_A_SERVER and 1 <= nodes * per_node <= MAX_RANKS
    return f"{nodes}x{per_node}-{device}" if fits and not in_a_server else None


def _a100_cluster(spec: str, nodes: int, per_node: int, adapters: int) -> Description:
    """Describe nodes without a switch, like the paper's."""
    bandwidth = {"local": A100.local, "same_node": A100_PAIR, "other_node": A100_OTHER_NODE}
    # In one node the ring uses the links between pairs, and no network adapter.
    allreduce = adapters * A100_ADAPTER_ALLREDUCE if nodes > 1 else A100_PAIR
    node_of = [rank // per_node for rank in range(nodes * per_node)]
    return _devices(spec, A100, node_of, bandwidth, min(allreduce, A100_PAIR), adapters)


def _h100_cluster(spec: str, nodes: int, per_node: int, adapters: int) -> Description:
    """Describe nodes of up to eight devices on one switch, which share the node's network
    adapters."""
    if per_node > H100_MOST_A_NODE:
        raise OperError(
            f"topology {spec}: {per_node} H100 in a node, and a node's switch joins at most "
            f"{H100_MOST_A_NODE}; say more nodes, as {nodes * -(-per_node // 8)}x8-h100"
        )
    if nodes == 1 and per_node == 8:
        allreduce = H100.switch_allreduce
    elif nodes == 1:
        allreduce = (
            H100.switch
        )  # a ring: the gain of sums in the switch was reported for eight only
    else:
        allreduce = min(H100.switch, adapters * H100_OTHER_NODE)  # a ring over a node's adapters
    bandwidth = {"local": H100.local, "same_node": H100.switch, "other_node": H100_OTHER_NODE}
    node_of = [rank // per_node for rank in range(nodes * per_node)]
    return _devices(spec, H100, node_of, bandwidth, allreduce, adapters)


def _devices(
    name: str,
    device: Accelerator,
    node_of: Sequence[int],
    bandwidth: dict[str, float],
    allreduce_bandwidth: float,
    adapters_per_node: int | None = None,
) -> Description:
    made = uniform(name, node_of, bandwidth, allreduce_bandwidth, device.memory_bytes)
    cost = {kind: 1 / value for kind, value in bandwidth.items()}
    made["link_cost"] = link_matrix(node_of, cost, Network(adapters_per_node))
    made["cache_bandwidth"] = device.cache
    return with_host(made, device.host_memory_bytes, device.host_bandwidth)


def uniform(
    name: str,
    node_of: Sequence[int],
    bandwidth: dict[str, float],
    allreduce_bandwidth: float,
    device_memory_bytes: int,
) -> Description:
    """Describe a topology whose links of one kind (KINDS) have one bandwidth, in bytes/s."""
    return Description(
        name=name,
        node_of=tuple(node_of),
        link_cost=link_matrix(node_of, {kind: 1 / value for kind, value in bandwidth.items()}),
        allreduce_bandwidth=allreduce_bandwidth,
        latency=DEVICES,
        device_memory_bytes=(device_memory_bytes,) * len(node_of),
        shares_host_memory=False,
        host_memory_bytes=None,
        host_bandwidth=None,
        capacity=None,
        memory=(LINKED,) * len(set(node_of)),
    )


def with_host(described: Description, memory_bytes: int, bandwidth: float) -> Description:
    """Add each rank's share of its host's memory, and the link to it in bytes/s."""
    ranks = len(described["node_of"])
    described["host_memory_bytes"] = (memory_bytes,) * ranks
    described["host_bandwidth"] = (bandwidth,) * ranks
    return described


def _check_ranks(name: str, ranks: int) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise OperError(f"topology {name}: expected 1 to {MAX_RANKS:,} ranks, got {ranks}")
