"""Link costs between ranks from bandwidths inside and between nodes."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Memory of a node: linked, a rank serves its own rows; or shared, every rank reads all rows itself.
NodeMemory = Literal["linked", "shared"]
LINKED: NodeMemory = "linked"
SHARED: NodeMemory = "shared"

# Kinds of links: to a rank's own rows, to those of another rank in its node, to those of another
# node.
KINDS = ("local", "same_node", "other_node")


class Network(NamedTuple):
    """Resources that the ranks of a cluster share on the way to other nodes; None: not shared.

    adapters_per_node: network adapters of a node, if they are fewer than its ranks.
    bisection_bandwidth: bytes/s, in one direction, of all links between the first half of the nodes
    and the others.
    """

    adapters_per_node: int | None = None
    bisection_bandwidth: float | None = None


UNSHARED = Network()


def link_matrix(
    node_of: Sequence[int], cost_by_kind: dict[str, float], network: Network = UNSHARED
) -> NDArray[np.float64]:
    """Return link costs [M, M], s/byte, from one cost for each kind of link (KINDS).

    Kinds that no pair of ranks has may be missing. The resources of `network` are shared evenly:
    all ranks read at once, equally from each rank of the other nodes.
    """
    node = np.array(node_of)
    same_node = node[:, None] == node[None]
    same, other = cost_by_kind.get("same_node", np.nan), cost_by_kind.get("other_node", np.nan)
    between = np.full(len(node), other)
    if network.adapters_per_node is not None:
        between *= np.maximum(same_node.sum(axis=1) / network.adapters_per_node, 1.0)
    if network.bisection_bandwidth is not None and not same_node.all():
        crossing = _crossing_bisection(same_node, node)
        between = np.maximum(between, crossing / network.bisection_bandwidth)
    matrix = np.where(same_node, same, between[:, None])
    np.fill_diagonal(matrix, cost_by_kind["local"])
    return matrix


def _crossing_bisection(same_node: NDArray[np.bool_], node: NDArray[np.int64]) -> float:
    """Return the bytes that cross from one half of the nodes to the other, in the direction with
    more, per byte that every rank reads from other nodes."""
    nodes, place = np.unique(node, return_inverse=True)
    half = place < len(nodes) / 2
    others = ~same_node
    share = others / np.maximum(others.sum(axis=1), 1)[:, None]
    return float(max(share[half][:, ~half].sum(), share[~half][:, half].sum()))
