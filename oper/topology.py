"""Topology: the ranks, the nodes they are on, what they can hold and what their links cost.

`link_cost[i, j]` is L[i][j] of the paper's §3.2: seconds per byte for rank i to read random rows
of rank j; the diagonal is a rank's own rows. Ranks are bound by their capacity (capacity.py). A
device's memory binds nothing, as embedding tables share it with much else; a plan that passes it
is warned about.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.capacity import Capacity, parse_capacity, rank_capacities
from oper.errors import OperError
from oper.yaml_file import Document

GB = 1e9

# Bandwidths of the presets, bytes/s in one direction.
A100_MEMORY_BYTES = 40 * 10**9
A100_LOCAL = 1_244 * GB  # 0.8 × 1,555, the peak of the A100 40 GB's memory
A100_NVSWITCH = 240 * GB  # 300 the line, less about 20 % of protocol
A100_NVSWITCH_ALLREDUCE = 235 * GB  # NCCL's authors expect about 240 (NVIDIA/nccl #1712)
A100_PAIR = 80 * GB  # without a switch: four links of 25 between each pair, less protocol
A100_OTHER_NODE = 19 * GB  # 25 the line; 80 / 19 = 4.21 is the ratio of the paper's cluster
A100_CLUSTER_ALLREDUCE = 72 * GB  # a model: a ring over four network adapters a node
H100_MEMORY_BYTES = 80 * 10**9
H100_LOCAL = 2_680 * GB  # 0.8 × 3,350, the peak of the H100's memory
H100_NVSWITCH = 370 * GB  # 450 the line (NVIDIA/nccl-tests #212)
H100_NVSWITCH_ALLREDUCE = 480 * GB  # in the switch (NVLS); a ring gets 370 (nccl-tests #212, #309)
CPU_LOCAL = 4.5 * GB  # measured: random rows from memory, on the 2 cores of a cloud machine
CPU_ALLREDUCE = 3 * GB  # a model; `oper topology measure` measures both

SAME_NODE_LATENCY_SECONDS = 2e-6
OTHER_NODE_LATENCY_SECONDS = 5e-6

MAX_RANKS = 4_096  # a matrix of link costs is then 128 MiB

PRESETS = ("dgx-a100", "dgx-h100", "2x4-a100", "4x4-a100", "cpu:N")
KINDS = ("local", "same_node", "other_node")


@dataclass(frozen=True, eq=False)
class Topology:
    """M ranks on nodes, with their link costs; immutable.

    `allreduce_bandwidth` is NCCL's bus bandwidth in bytes/s, 2(M-1)/M counted; `latency_seconds`
    that of one hop. `capacity` None is the paper's heap size. `device_memory_bytes` only warns.
    """

    name: str
    node_of: tuple[int, ...]
    link_cost: NDArray[np.float64]
    allreduce_bandwidth: float
    latency_seconds: float
    device_memory_bytes: tuple[int, ...] | None = None
    capacity: Capacity = None

    def __post_init__(self) -> None:
        cost = np.array(self.link_cost, dtype=np.float64)
        if cost.shape != (self.ranks, self.ranks):
            raise OperError(
                f"topology {self.name}: link costs of shape {cost.shape}, and {self.ranks} ranks "
                f"need {self.ranks} × {self.ranks}"
            )
        bad = np.argwhere(~((cost > 0) & (cost < np.inf)))
        if len(bad):
            reader, source = bad[0]
            raise OperError(
                f"topology {self.name}: the link cost of rank {reader} reading from rank {source} "
                f"is {cost[reader, source]}, and every link needs a positive, finite cost"
            )
        cost.setflags(write=False)
        object.__setattr__(self, "link_cost", cost)

    @property
    def ranks(self) -> int:
        return len(self.node_of)

    @property
    def nodes(self) -> int:
        return len(set(self.node_of))

    @property
    def alike(self) -> bool:
        """Whether every rank looks like every other: renaming ranks within nodes, and nodes,
        changes neither capacities nor link costs."""
        capacities = self.capacity if isinstance(self.capacity, tuple) else ()
        return (
            len(set(capacities)) <= 1
            and len(set(Counter(self.node_of).values())) == 1
            and self._cost_by_kind() is not None
        )

    @classmethod
    def load(cls, spec: str) -> "Topology":
        """A preset's name (`dgx-a100`, `2x4-a100`, `cpu:4`) or the path of a YAML file."""
        if made := _preset(spec):
            return made
        if not Path(spec).exists() and Path(spec).suffix not in (".yaml", ".yml", ".json"):
            raise OperError(
                f"topology {spec!r}: neither a preset ({', '.join(PRESETS)}; any N and G in "
                "NxG-a100) nor a file; `oper topology measure -o FILE` writes one for this machine"
            )
        return _parse(Document.read(spec), Path(spec).stem)

    @classmethod
    def from_dict(cls, content: Any, source: str = "topology") -> "Topology":
        """The inverse of `to_dict`; `source` names in errors where the content is from."""
        return _parse(Document(content, source), source)

    def to_dict(self) -> dict[str, Any]:
        """What a YAML topology says, costs to the last bit. Device memory is left out: it binds
        nothing, and of `cpu:N` it is the machine's, while a plan is the same on every machine."""
        content: dict[str, Any] = {
            "name": self.name,
            "node_of": list(self.node_of),
            "link_cost": self._cost_by_kind() or self.link_cost.tolist(),
            "allreduce_bandwidth": self.allreduce_bandwidth,
            "latency_seconds": self.latency_seconds,
        }
        if isinstance(self.capacity, tuple):
            values = [f"{c}B" if isinstance(c, int) else c for c in self.capacity]
            same_bytes = len(set(values)) == 1 and isinstance(self.capacity[0], int)
            content["capacity"] = values[0] if same_bytes else values
        elif self.capacity is not None:
            content["capacity"] = self.capacity
        return content

    def with_capacity(self, text: str) -> "Topology":
        """The same with the capacity of `--capacity`: see `parse_capacity`."""
        return replace(self, capacity=parse_capacity(text, self.ranks))

    def capacities(
        self, total_bytes: int, extra_memory: float, width_memory_bytes: Sequence[int]
    ) -> NDArray[np.int64]:
        """The bytes that each rank may hold, int64 [M], for tables of `total_bytes` in all.

        `width_memory_bytes`: the bytes m of one row of each width. Raises OperError, with the
        bytes that are missing and the number of ranks that would do, where not even one copy of
        every row fits.
        """
        return np.array(
            rank_capacities(
                self.capacity, self.ranks, total_bytes, extra_memory, width_memory_bytes
            ),
            dtype=np.int64,
        )

    def memory_warning(self, memory_bytes: Sequence[float] | NDArray[Any]) -> str | None:
        """A sentence where what the ranks are to hold (bytes, [M]) passes their device's memory."""
        if self.device_memory_bytes is None:
            return None
        have = np.array(self.device_memory_bytes, dtype=np.float64)
        over = np.asarray(memory_bytes, dtype=np.float64) - have
        if not (over > 0).any():
            return None
        rank = int(over.argmax())
        return (
            f"rank {rank} is to hold {(have + over)[rank] / GB:,.1f} GB of rows and has "
            f"{have[rank] / GB:,.1f} GB of memory ({self.name}): it will not fit without more "
            "ranks, narrower rows or a host tier"
        )

    def masks(self) -> dict[str, NDArray[np.bool_]]:
        """Which pairs (reader, source), bool [M, M], are `local`, `same_node`, `other_node`."""
        node_of = np.array(self.node_of)
        own = np.eye(self.ranks, dtype=bool)
        same = node_of[:, None] == node_of[None]
        return {"local": own, "same_node": same & ~own, "other_node": ~same}

    def _cost_by_kind(self) -> dict[str, float] | None:
        """The one cost of each kind of link there is; None where links of a kind differ."""
        costs = {kind: self.link_cost[mask] for kind, mask in self.masks().items() if mask.any()}
        if any(values.min() < values.max() for values in costs.values()):
            return None
        return {kind: float(values[0]) for kind, values in costs.items()}


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


def _parse(document: Document, default_name: str) -> Topology:
    from oper.topology_yaml import parse_topology  # which builds a Topology, and so imports us

    return parse_topology(document, default_name)


def _preset(spec: str) -> Topology | None:
    if spec == "dgx-a100":
        bandwidth = {"local": A100_LOCAL, "same_node": A100_NVSWITCH}
        return _uniform(spec, [0] * 8, bandwidth, A100_NVSWITCH_ALLREDUCE, A100_MEMORY_BYTES)
    if spec == "dgx-h100":
        bandwidth = {"local": H100_LOCAL, "same_node": H100_NVSWITCH}
        return _uniform(spec, [0] * 8, bandwidth, H100_NVSWITCH_ALLREDUCE, H100_MEMORY_BYTES)
    if match := re.fullmatch(r"(\d+)x(\d+)-a100", spec):
        nodes, per_node = int(match[1]), int(match[2])
        _check_ranks(spec, nodes * per_node)
        bandwidth = {"local": A100_LOCAL, "same_node": A100_PAIR, "other_node": A100_OTHER_NODE}
        # In one node the ring runs over the pairs' links and meets no network adapter.
        allreduce = A100_CLUSTER_ALLREDUCE if nodes > 1 else A100_PAIR
        node_of = [rank // per_node for rank in range(nodes * per_node)]
        return _uniform(spec, node_of, bandwidth, allreduce, A100_MEMORY_BYTES)
    if match := re.fullmatch(r"cpu:(\d+)", spec):
        ranks = int(match[1])
        _check_ranks(spec, ranks)
        bandwidth = {"local": CPU_LOCAL, "same_node": CPU_LOCAL}
        memory_bytes = host_memory_bytes() // ranks
        return _uniform(spec, [0] * ranks, bandwidth, CPU_ALLREDUCE, memory_bytes)
    return None


def _uniform(
    name: str,
    node_of: Sequence[int],
    bandwidth: dict[str, float],
    allreduce_bandwidth: float,
    device_memory_bytes: int,
) -> Topology:
    """A topology whose links of one kind (KINDS) have one bandwidth, in bytes/s."""
    return Topology(
        name,
        tuple(node_of),
        link_matrix(node_of, {kind: 1 / value for kind, value in bandwidth.items()}),
        allreduce_bandwidth,
        latency_seconds(node_of),
        device_memory_bytes=(device_memory_bytes,) * len(node_of),
    )


def _check_ranks(name: str, ranks: int) -> None:
    if not 1 <= ranks <= MAX_RANKS:
        raise OperError(f"topology {name}: {ranks} ranks, and 1 to {MAX_RANKS:,} were needed")
