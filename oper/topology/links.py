"""Link costs between ranks from bandwidths inside and between nodes, and latencies."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Of one hop, rounded from NCCL's own tuning model (nccl/src/graph/tuning.cc, hwLat): 1.9 µs over
# NVLink (ring, LL128), 4 to 5 µs over a network (ring LL128, tree LL).
SAME_NODE_LATENCY_SECONDS = 2e-6
OTHER_NODE_LATENCY_SECONDS = 5e-6

# Of a node: each rank's rows are served by that rank; or every rank reads them itself.
NodeMemory = Literal["linked", "shared"]
LINKED: NodeMemory = "linked"
SHARED: NodeMemory = "shared"

# Of links: a rank's own rows, those of another rank in its node, those of another node.
KINDS = ("local", "same_node", "other_node")


def link_matrix(node_of: Sequence[int], cost_by_kind: dict[str, float]) -> NDArray[np.float64]:
    """Link costs [M, M], s/byte, from one cost for each kind of link (KINDS).

    Kinds that no pair of ranks has may be missing.
    """
    node = np.array(node_of)
    same, other = cost_by_kind.get("same_node", np.nan), cost_by_kind.get("other_node", np.nan)
    matrix = np.where(node[:, None] == node[None], same, other)
    np.fill_diagonal(matrix, cost_by_kind["local"])
    return matrix


def latency_seconds(node_of: Sequence[int]) -> float:
    """The latency of a hop between these ranks, where none was measured."""
    return OTHER_NODE_LATENCY_SECONDS if len(set(node_of)) > 1 else SAME_NODE_LATENCY_SECONDS
