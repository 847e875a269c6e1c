"""Transports: the ways in which ranks read each other's rows.

    shared_memory   ranks of one host map its memory
    peer            devices of one node map each other's memory
    collective      ranks of several nodes send rows to each other; those of a node map its memory
    nvshmem         devices of one or several nodes: kernels themselves fetch rows, and send
                    gradients, by NVSHMEM if the other device's memory is not mapped

NVSHMEM's memory is symmetric: every rank allocates as much as the largest, so no rank may hold more
rows than fit on the smallest device.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from oper.base.errors import OperError
from oper.topology.links import SHARED, NodeMemory

Transport = Literal["shared_memory", "peer", "collective", "nvshmem"]
SHARED_MEMORY: Transport = "shared_memory"
PEER: Transport = "peer"
COLLECTIVE: Transport = "collective"
NVSHMEM: Transport = "nvshmem"
TRANSPORTS = (SHARED_MEMORY, PEER, COLLECTIVE, NVSHMEM)

# Bytes of NVSHMEM's memory that a rank keeps for rows in flight from other nodes, in addition to
# the rows that it holds: two rows of 16 KB, or more narrower ones, per group of threads that a
# device runs.
STAGE_BYTES = 64 << 20


def default_transport(memory: Sequence[NodeMemory]) -> Transport:
    """Return the default transport of ranks on nodes with these memories."""
    if len(memory) > 1:
        return COLLECTIVE
    return SHARED_MEMORY if memory[0] == SHARED else PEER


def why_not(transport: Transport, memory: Sequence[NodeMemory]) -> str:
    """Return why ranks on nodes with these memories cannot have a transport, with the transports
    that they can have; "" if they can have it."""
    usual = default_transport(memory)
    if transport == usual or (transport == NVSHMEM and SHARED not in memory):
        return ""
    if transport == NVSHMEM:
        return (
            f"{NVSHMEM} is for devices, and the memory of these ranks is {SHARED}: leave the "
            f"transport out, or say memory: linked"
        )
    one = len(memory) == 1
    nodes = f"one node of {memory[0]} memory" if one else f"{len(memory)} nodes"
    others = f"{usual} (the default)"
    if SHARED not in memory:
        others += f" or {NVSHMEM}"
    return f"expected {others}, got {transport} for ranks of {nodes}"


def check_transport(
    name: str, transport: Transport, memory: Sequence[NodeMemory], node_of: Sequence[int]
) -> None:
    """Raise OperError if the ranks of topology `name`, on nodes with these memories, cannot have
    this transport."""
    if reason := why_not(transport, memory):
        raise OperError(f"topology {name}: transport: {reason}")
    sizes = sorted(set(Counter(node_of).values()))
    if transport == NVSHMEM and len(sizes) > 1:
        raise OperError(
            f"topology {name}: its nodes have {sizes[0]} to {sizes[-1]} ranks, and {NVSHMEM} runs "
            "where all have as many: leave the transport out, or plan for nodes of one size"
        )
