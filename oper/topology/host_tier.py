"""Link costs and capacities of the host tier, for rows in the hosts' memory.

With h[j] the seconds per byte between rank j's device and its share of its host's memory, and L the
link costs between devices, a read of rank i from the tier of rank j takes

    h[j]                    if i = j
    max(h[j], L[i][j])      otherwise: its bytes pass the owner's host link and then the link from j
                            to i, as in a pipe, in which the slower of the two sets the pace

The payers are those of rows on devices (oper/cost/read_charges.py): the owner pays h[j] for every
byte that leaves its host's memory, and the reader pays for the link; in shared memory the reader
alone pays.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oper.base.errors import OperError
from oper.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class TierTopology(Topology):
    """Topology with the link costs of rows in the hosts' memory. Each rank caches such rows, and
    fetches them itself, without relays (relays.py)."""


def tier_topology(topology: Topology) -> TierTopology:
    """Return the topology with the tier's link costs, and each rank's share of the host's memory as
    its capacity.

    If the hosts share this machine's memory, the capacity is the paper's heap, as for rows on
    devices, so that a plan does not depend on the machine that made it. Raise OperError if the
    topology lacks the memory or bandwidth of its hosts.
    """
    missing = [
        f"{key} ({what})"
        for key, what, given in (
            (
                "host_memory",
                "bytes of each rank's share, such as 128GB",
                topology.host_memory_bytes,
            ),
            ("host_bandwidth", "to its device, such as 25GB/s", topology.host_bandwidth),
        )
        if given is None
    ]
    if missing:
        raise OperError(
            f"topology {topology.name}: has no {' and no '.join(missing)}, and plans with a tier "
            "need both; add them to its file (docs/topology.md)"
        )
    host = 1 / np.array(topology.host_bandwidth, dtype=np.float64)
    link_cost = np.maximum(topology.link_cost, host)
    np.fill_diagonal(link_cost, host)
    hosts = replace(
        topology,
        link_cost=link_cost,
        capacity=None if topology.shares_host_memory else topology.host_memory_bytes,
        device_memory_bytes=None,
        shares_host_memory=False,
        host_memory_bytes=None,
        host_bandwidth=None,
    )
    return TierTopology(**hosts.content)


def host_to_dict(topology: Topology) -> dict[str, Any]:
    """Return the hosts' part of a topology file, in addition to `Topology.to_dict`."""
    content: dict[str, list[Any]] = {}
    if topology.host_memory_bytes is not None:
        content["host_memory"] = [f"{size}B" for size in topology.host_memory_bytes]
    if topology.host_bandwidth is not None:
        content["host_bandwidth"] = list(topology.host_bandwidth)
    return {key: v[0] if len(set(v)) == 1 else v for key, v in content.items()}
