"""Topology: the ranks, their nodes, capacities and link costs.

`link_cost[i, j]` is L[i][j] of the paper's §3.2: seconds per byte for rank i to read random rows of
rank j; the diagonal is a rank's own rows. Plans are limited by the capacity of each rank
(capacity.py). Unless another limit is requested, plans may use the device memory less the needs of
the rest of the model (oper/planner/device_limits.py); a plan that exceeds it causes a warning.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.base.errors import OperError, check_type
from oper.files.input_files import refuse_url
from oper.files.what_is import what_is
from oper.files.yaml_file import Document
from oper.topology.capacity import (
    Capacity,
    check_host,
    memory_warning,
    parse_capacity,
    rank_capacities,
)
from oper.topology.latency import Latency
from oper.topology.links import LINKED, SHARED, NodeMemory
from oper.topology.number_ranges import BANDWIDTH, LINK_COST
from oper.topology.presets import PRESETS, nearest_preset, preset
from oper.topology.topology_file import parse_topology
from oper.topology.transports import (
    NVSHMEM,
    STAGE_BYTES,
    Transport,
    check_transport,
    default_transport,
)


@dataclass(frozen=True, eq=False)
class Topology:
    """M ranks on nodes, with their link costs; immutable.

    link_cost: s/byte [M, M], reader by source. allreduce_bandwidth: bytes/s, NCCL's bus bandwidth
    (2(M-1)/M times the bytes over the time). latency: fixed seconds of messages and kernels.
    capacity: None is the paper's heap size. device_memory_bytes: per rank. shares_host_memory: the
    device memory is a part of this machine's; exceeding it only causes a warning, because a plan
    must not depend on the machine that made it. memory: per node, "linked" by default; in shared
    memory ranks read each other's rows themselves, otherwise the rows' owners serve them.
    transport: the way in which ranks read each other's rows (transports.py); by default it follows
    from their nodes and memory. host_memory_bytes, host_bandwidth: each rank's share of its host's
    memory, and the link from its device to it, bytes/s; needed for plans with a host tier
    (host_tier.py). cache_bandwidth: of a rank's cache, bytes/s, from which its kernels read
    repeated rows; None: the bandwidth of its memory.
    """

    name: str
    node_of: tuple[int, ...]
    link_cost: NDArray[np.float64]
    allreduce_bandwidth: float
    latency: Latency
    device_memory_bytes: tuple[int, ...] | None = None
    capacity: Capacity = None
    shares_host_memory: bool = False
    memory: tuple[NodeMemory, ...] = ()
    host_memory_bytes: tuple[int, ...] | None = None
    host_bandwidth: tuple[float, ...] | None = None
    transport: Transport | None = None
    cache_bandwidth: float | None = None

    def __post_init__(self) -> None:
        cost = np.array(self.link_cost, dtype=np.float64)
        if cost.shape != (self.ranks, self.ranks):
            raise OperError(
                f"topology {self.name}: link costs of shape {cost.shape}, and {self.ranks} ranks "
                f"need {self.ranks} × {self.ranks}"
            )
        bad = np.argwhere(~((cost >= LINK_COST.least) & (cost <= LINK_COST.most)))
        if len(bad):
            reader, source = bad[0]
            raise OperError(
                f"topology {self.name}: link cost of rank {reader} reading from rank {source}: "
                f"expected {LINK_COST}, got {cost[reader, source]}"
            )
        if not BANDWIDTH.holds(self.allreduce_bandwidth):
            raise OperError(
                f"topology {self.name}: bandwidth of the AllReduce: expected {BANDWIDTH}, got "
                f"{self.allreduce_bandwidth}"
            )
        if self.cache_bandwidth is not None and not BANDWIDTH.holds(self.cache_bandwidth):
            raise OperError(
                f"topology {self.name}: bandwidth of caches: expected {BANDWIDTH}, got "
                f"{self.cache_bandwidth}"
            )
        check_type("Topology", "latency", self.latency, Latency)
        # Nodes are numbered without gaps, whatever their numbers in a file.
        order = sorted(set(self.node_of))
        object.__setattr__(self, "node_of", tuple(order.index(node) for node in self.node_of))
        memory = self.memory or (LINKED,) * self.nodes
        if len(memory) != self.nodes:
            raise OperError(
                f"topology {self.name}: the memory of {len(memory)} nodes, and it has {self.nodes}"
            )
        object.__setattr__(self, "memory", memory)
        if self.transport is not None:
            check_transport(self.name, self.transport, memory, self.node_of)
        check_host(self.name, self.ranks, self.host_memory_bytes, self.host_bandwidth)
        cost.setflags(write=False)
        object.__setattr__(self, "link_cost", cost)

    @property
    def ranks(self) -> int:
        return len(self.node_of)

    @property
    def nodes(self) -> int:
        return len(set(self.node_of))

    @property
    def known_transport(self) -> Transport:
        """Transport of rows between ranks: the given one, or the default for the nodes and their
        memory."""
        return self.transport or default_transport(self.memory)

    @property
    def shared_pairs(self) -> NDArray[np.bool_]:
        """Mask of pairs of different ranks that share memory, bool [M, M]."""
        shared = np.array([self.memory[node] == SHARED for node in self.node_of])
        return self.masks()["same_node"] & shared

    @property
    def shares_memory(self) -> bool:
        return bool(self.shared_pairs.any())

    @property
    def is_one_memory(self) -> bool:
        """True if all ranks share one memory, so that each rank reads all rows itself."""
        return self.shares_memory and self.nodes == 1

    @property
    def cache_seconds(self) -> NDArray[np.float64]:
        """Seconds per byte that a rank's kernels read repeatedly, [M]."""
        own = self.link_cost.diagonal()
        return own if self.cache_bandwidth is None else np.full(len(own), 1 / self.cache_bandwidth)

    @property
    def content(self) -> dict[str, Any]:
        """Fields by name, to make topologies of other kinds."""
        return {each.name: getattr(self, each.name) for each in fields(Topology)}

    @property
    def of_devices(self) -> bool:
        """True if all ranks are devices joined by links: none shares another's memory."""
        return SHARED not in self.memory

    @property
    def memory_for_plans(self) -> tuple[int, ...] | None:
        """Bytes of device memory that limit plans, [M]; None if the tables' bytes do."""
        return None if self.shares_host_memory else self.device_memory_bytes

    @cached_property
    def homogeneous(self) -> bool:
        """True if all ranks are interchangeable: permuting ranks within nodes, and nodes, keeps
        capacities, link costs and the servers of reads."""
        capacities = self.capacity if isinstance(self.capacity, tuple) else ()
        return (
            len(set(capacities)) <= 1
            and len(set(Counter(self.node_of).values())) == 1
            and self._cost_by_kind() is not None
            and (len(set(self.memory)) == 1 or self.nodes == self.ranks)
        )

    def is_homogeneous(self, capacity_bytes: Sequence[float] | NDArray[np.float64]) -> bool:
        """Return whether ranks with these capacities [M] are interchangeable."""
        return self.homogeneous and bool(np.ptp(capacity_bytes) == 0)

    @property
    def near_first(self) -> bool:
        """True if costs never fall with distance, on homogeneous ranks: from a rank's own rows to
        those of its node, to those of other nodes."""
        cost = [self.link_cost[mask].max() for mask in self.masks().values() if mask.any()]
        return sorted(cost) == cost

    def seconds_by_kind(self) -> tuple[float, float, float]:
        """Return the mean seconds per byte of a rank's own rows, of a peer's in its node, and of
        another node's; for a kind without pairs of ranks, those of the next nearer kind."""
        means: list[float] = []
        for mask in self.masks().values():
            cost = self.link_cost[mask]
            # The mean of equal numbers may differ from them in the last digit.
            mean = cost.mean() if len(cost) and np.ptp(cost) else cost[:1].sum()
            means.append(float(mean) if len(cost) else means[-1])
        return means[0], means[1], means[2]

    @classmethod
    def load(cls, spec: Path | str) -> "Topology":
        """Load a preset by name (`dgx-h100`, `2x8-h100`, `cpu:4`) or a YAML file by path."""
        check_type("Topology.load", "spec", spec, Path, str)
        spec = str(spec)
        if made := preset(spec):
            return cls(**made)
        refuse_url(spec)
        path = Path(spec)
        is_other = not path.exists() and path.suffix not in (".yaml", ".yml", ".json")
        if is_other or path.is_dir():  # "" is one of them
            near = None if path.is_dir() else nearest_preset(spec)
            hint = f"did you mean {near}?" if near else "`oper topology measure -o FILE` writes one"
            got = f" ({what_is(path)})" if spec and path.is_dir() else ""
            raise OperError(
                f"topology: expected a preset ({', '.join(PRESETS)}; N nodes of G devices) or a "
                f"file, got {spec!r}{got}; {hint}"
            )
        return cls(**parse_topology(Document.read(spec), path.stem))

    @classmethod
    def from_dict(cls, content: Any, source: str = "topology") -> "Topology":
        """Return the topology with the content of `to_dict`, which errors call `source`."""
        return cls(**parse_topology(Document(content, source), source))

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a topology file, with exact link costs.

        Device memory is left out: `cpu:N` takes it from the machine, and a plan must not depend on
        the machine that made it. Hosts are in `host_to_dict` (host_tier.py), because few plans
        depend on them.
        """
        content: dict[str, Any] = {
            "name": self.name,
            "node_of": list(self.node_of),
            "link_cost": self._cost_by_kind() or self.link_cost.tolist(),
            "allreduce_bandwidth": self.allreduce_bandwidth,
            "latency_seconds": self.latency.content,
        }
        if self.cache_bandwidth is not None:
            content["cache_bandwidth"] = self.cache_bandwidth
        if SHARED in self.memory:  # left out if all are linked, as in files
            same = len(set(self.memory)) == 1
            content["memory"] = self.memory[0] if same else list(self.memory)
        if self.known_transport != default_transport(self.memory):
            content["transport"] = self.transport
        if isinstance(self.capacity, tuple):
            values = [f"{c}B" if isinstance(c, int) else c for c in self.capacity]
            same_bytes = len(set(values)) == 1 and isinstance(self.capacity[0], int)
            content["capacity"] = values[0] if same_bytes else values
        elif self.capacity is not None:
            content["capacity"] = self.capacity
        return content

    def with_capacity(self, text: str) -> "Topology":
        """Return this topology with another capacity, in the syntax of `--capacity`
        (`parse_capacity`)."""
        return replace(self, capacity=parse_capacity(text, self.ranks))

    def with_capacity_bytes(self, capacity_bytes: Sequence[int]) -> "Topology":
        """Return this topology with the capacity of each rank in bytes, [M]."""
        return replace(self, capacity=tuple(capacity_bytes))

    def capacities(
        self, total_bytes: int, extra_memory: float, width_memory_bytes: Sequence[int]
    ) -> NDArray[np.int64]:
        """Return the bytes that each rank may hold, int64 [M], for tables of `total_bytes` in all.

        `width_memory_bytes`: the bytes m of one row of each width. Raise OperError, with the
        missing bytes and a sufficient number of ranks, if not even one copy of every row fits.
        """
        return np.array(
            rank_capacities(
                self.capacity, self.ranks, total_bytes, extra_memory, width_memory_bytes
            ),
            dtype=np.int64,
        )

    def memory_warning(
        self, memory_bytes: Sequence[float] | NDArray[Any], step_bytes: float = 0.0
    ) -> str | None:
        """Return a warning if the rows of a rank (bytes, [M]), on devices with the memory of a
        step, exceed its device's memory; else None."""
        if self.transport == NVSHMEM:
            memory_bytes = [float(max(memory_bytes)) + STAGE_BYTES] * self.ranks
        step_bytes = step_bytes if self.of_devices else 0.0
        return memory_warning(self.name, self.device_memory_bytes, memory_bytes, step_bytes)

    def masks(self) -> dict[str, NDArray[np.bool_]]:
        """Return masks of the pairs (reader, source) of each kind of link (links.KINDS), bool [M,
        M]."""
        node_of = np.array(self.node_of)
        own = np.eye(self.ranks, dtype=bool)
        same = node_of[:, None] == node_of[None]
        return {"local": own, "same_node": same & ~own, "other_node": ~same}

    @property
    def proxy(self) -> Ints:
        """Rank of the source's node at the reader's position modulo that node's size, [reader,
        source]; in its own node the reader itself."""
        node_of = np.array(self.node_of)
        ranks = np.argsort(node_of, kind="stable")
        size = np.bincount(node_of)
        first = np.cumsum(size) - size
        position = np.empty(len(node_of), dtype=np.int64)
        position[ranks] = np.arange(len(node_of)) - first[node_of[ranks]]
        proxy: Ints = ranks[first[node_of] + position[:, None] % size[node_of]]
        return proxy

    def _cost_by_kind(self) -> dict[str, float] | None:
        """Return the cost of each kind of link that exists; None if links of a kind differ."""
        costs = {kind: self.link_cost[mask] for kind, mask in self.masks().items() if mask.any()}
        if any(values.min() < values.max() for values in costs.values()):
            return None
        return {kind: float(values[0]) for kind, values in costs.items()}
