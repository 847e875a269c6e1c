"""Link costs between ranks from bandwidths inside and between nodes."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# Of a node: each rank's rows are served by that rank; or every rank reads them itself.
NodeMemory = Literal["linked", "shared"]
LINKED: NodeMemory = "linked"
SHARED: NodeMemory = "shared"

# Of links: a rank's own rows, those of another rank in its node, those of another node.
KINDS = ("local", "same_node", "other_node")


def link_matrix(
    node_of: Sequence[int], cost_by_kind: dict[str, float], adapters_per_node: int | None = None
) -> NDArray[np.float64]:
    """Link costs [M, M], s/byte, from one cost for each kind of link (KINDS).

    Kinds that no pair of ranks has may be missing. Each rank has a network adapter of its own, or
    `adapters_per_node` are shared by the ranks of a node: all read at once, so that each has its
    share of them.
    """
    node = np.array(node_of)
    same, other = cost_by_kind.get("same_node", np.nan), cost_by_kind.get("other_node", np.nan)
    matrix = np.where(node[:, None] == node[None], same, other)
    if adapters_per_node is not None:
        ranks_of_node = (node[:, None] == node[None]).sum(axis=1)
        sharing = np.maximum(ranks_of_node / adapters_per_node, 1.0)[:, None]
        matrix = np.where(node[:, None] == node[None], matrix, matrix * sharing)
    np.fill_diagonal(matrix, cost_by_kind["local"])
    return matrix
