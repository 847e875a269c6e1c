"""Seconds that no placement goes below whose rows travel themselves, on a machine and a batch.

Of a row that t nodes touch in a batch, t - 1 of them at least get its bytes from another node and
give it a gradient, or copies of it are made equal, in which t - 1 nodes give a gradient and as many
get the sum. Of ranks the same holds, by links and adapters together. So long do all adapters take
at least, and all links with them, if the bytes were spread evenly. It assumes any number of copies
in any memory, each row once a node, no ids, no latencies, and outputs and their gradients as the
only bytes of memory. It does not hold for pooled tables, whose vectors may be fewer than rows, nor
in inference, where all rows may be copied.
"""

import numpy as np

from benchmarks.planning.simulator.log import Ints, Log
from benchmarks.planning.simulator.machine import Machine
from benchmarks.planning.simulator.placement import FLOAT_BYTES, Part


def least_training_seconds(parts: list[Part], log: Log, samples: Ints, machine: Machine) -> float:
    """The bound for whole tables `parts` (whose holder sets do not matter), and rank i's samples
    `samples[i]`, [M, b]."""
    far = between = written = 0.0
    for part in parts:
        of_nodes = np.zeros(len(part.holder_set), dtype=np.int32)
        of_ranks = np.zeros_like(of_nodes)
        for node in range(machine.nodes):
            here = np.zeros_like(of_nodes)
            first = node * machine.ranks_per_node
            for rank in range(first, first + machine.ranks_per_node):
                here[np.unique(log.bags(part.table, samples[rank])[0])] += 1
            of_nodes += here > 0
            of_ranks += here
        size = part.row_bytes + FLOAT_BYTES * part.dim
        far += size * float(np.maximum(of_nodes - 1, 0).sum())
        between += size * float(np.maximum(of_ranks - 1, 0).sum())
        written += 2 * FLOAT_BYTES * part.dim * samples.shape[1]
    adapters = machine.nodes * machine.adapters_per_node * machine.adapter_bandwidth
    links = np.inf
    if machine.link_bandwidth is not None:
        links = machine.ranks * machine.link_bandwidth
    if machine.nodes == 1:
        adapters = 0.0
    seconds = between / (links + adapters)
    if far:
        seconds = max(seconds, far / adapters)
    return seconds + written / machine.memory_bandwidth
