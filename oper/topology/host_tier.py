"""The ranks as rows in the hosts' memory see them: the tier's link costs and capacities.

With h[j] the seconds per byte between rank j's device and its share of its host's memory, and L the
link costs between devices, a read of rank i from the tier of rank j takes

    h[j]                    where i = j
    max(h[j], L[i][j])      elsewhere: its bytes pass the owner's host link and then the link from j
                            to i, one after the other as in a pipe, and the slower of the two sets
                            the pace

Who pays is as for rows on devices (oper/cost/read_charges.py): the owner for every byte that
leaves its host's memory, at h[j], and the reader for the link; in shared memory the reader alone.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oper.base.errors import OperError
from oper.topology.topology import Topology


@dataclass(frozen=True, eq=False)
class TierTopology(Topology):
    """A topology with the link costs of rows in the hosts' memory. Each rank caches such rows, and
    fetches them for itself: no relay reads them (relays.py)."""


def tier_topology(topology: Topology) -> TierTopology:
    """The ranks with the tier's link costs, each with its share of the host's memory as capacity.

    Where that is a part of this machine's the capacity is the paper's heap, as for the ranks' own
    rows: a plan must not depend on where it was made. OperError where the topology does not say
    what its hosts have.
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
    """What a topology file says of the hosts, beside `Topology.to_dict`."""
    content: dict[str, list[Any]] = {}
    if topology.host_memory_bytes is not None:
        content["host_memory"] = [f"{size}B" for size in topology.host_memory_bytes]
    if topology.host_bandwidth is not None:
        content["host_bandwidth"] = list(topology.host_bandwidth)
    return {key: v[0] if len(set(v)) == 1 else v for key, v in content.items()}
