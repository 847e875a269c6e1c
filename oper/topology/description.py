"""The fields of a topology, as presets.py and topology_file.py give them to topology.py."""

from typing import TypedDict

from oper.base.arrays import Floats
from oper.topology.capacity import Capacity
from oper.topology.links import NodeMemory


class Description(TypedDict):
    """The arguments of `Topology`, which documents them."""

    name: str
    node_of: tuple[int, ...]
    link_cost: Floats
    allreduce_bandwidth: float
    latency_seconds: float
    device_memory_bytes: tuple[int, ...] | None
    shares_host_memory: bool
    host_memory_bytes: tuple[int, ...] | None
    host_bandwidth: tuple[float, ...] | None
    capacity: Capacity
    memory: tuple[NodeMemory, ...]
