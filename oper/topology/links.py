"""Link costs between ranks from bandwidths inside and between nodes, and latencies."""

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SAME_NODE_LATENCY_SECONDS = 2e-6
OTHER_NODE_LATENCY_SECONDS = 5e-6
KINDS = ("local", "same_node", "other_node")


def host_memory_bytes() -> int:
    """The physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def link_matrix(node_of: Sequence[int], cost_by_kind: dict[str, float]) -> NDArray[np.float64]:
    """Link costs [M, M] from one for each kind of link; kinds without a link may be missing."""
    node = np.array(node_of)
    same, other = cost_by_kind.get("same_node", np.nan), cost_by_kind.get("other_node", np.nan)
    matrix = np.where(node[:, None] == node[None], same, other)
    np.fill_diagonal(matrix, cost_by_kind["local"])
    return matrix


def latency_seconds(node_of: Sequence[int]) -> float:
    """The latency of a hop where none was measured."""
    return OTHER_NODE_LATENCY_SECONDS if len(set(node_of)) > 1 else SAME_NODE_LATENCY_SECONDS
