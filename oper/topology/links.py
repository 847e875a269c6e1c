"""Link costs between ranks from bandwidths inside and between nodes."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Of a node: each rank's rows are served by that rank; or every rank reads them itself.
NodeMemory = Literal["linked", "shared"]
LINKED: NodeMemory = "linked"
SHARED: NodeMemory = "shared"

# Of links: a rank's own rows, those of another rank in its node, those of another node.
KINDS = ("local", "same_node", "other_node")


class Network(NamedTuple):
    """What the ranks of a cluster share on their way to other nodes; None: nothing.

    adapters_per_node: network adapters of a node, if they are fewer than its ranks.
    bisection_bandwidth: bytes/s, in one direction, of all that joins the first half of the nodes to
    the others.
    """

    adapters_per_node: int | None = None
    bisection_bandwidth: float | None = None


UNSHARED = Network()


def link_matrix(
    node_of: Sequence[int], cost_by_kind: dict[str, float], network: Network = UNSHARED
) -> NDArray[np.float64]:
    """Link costs [M, M], s/byte, from one cost for each kind of link (KINDS).

    Kinds that no pair of ranks has may be missing. What `network` says is shared is shared evenly:
    all ranks read at once, as much from each rank of the other nodes.
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
    """Bytes that cross from one half of the nodes to the other, whichever way are more, for each
    byte that every rank reads of other nodes."""
    nodes, place = np.unique(node, return_inverse=True)
    half = place < len(nodes) / 2
    others = ~same_node
    share = others / np.maximum(others.sum(axis=1), 1)[:, None]
    return float(max(share[half][:, ~half].sum(), share[~half][:, half].sum()))
