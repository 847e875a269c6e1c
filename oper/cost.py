"""The objective: the largest time of a rank in one iteration, and everything it is made of.

With M ranks, row bytes S, expected reads R and touches D by one rank per iteration, U the chance
that any rank touches the row, and L[i][j] the seconds per byte for rank i to read from rank j
(paper §3.2, equations 1-5, with the link in equation 3 read as L[i][j]):

    E[r]    = L[r][r] · Σ_k S_k R_k · (ranks that read row k from r)                (equation 2)
    C[r][j] = L[r][j] · Σ_k S_k R_k · [r reads row k from j]                        (equation 3)
    T[r]    = E[r] + Σ_{j≠r} C[r][j]                                    inference
    T[r]    = the same + E'[r] + Σ_{j≠r} C'[r][j] + G[r]                training
    E', C'  = the same two sums over rows with one owner, D_k in the place of R_k
    G[r]    = AllReduce of the replicas + L[r][r] · Σ_replicas S_k U_k (their optimizer step)

and a plan is the better, the smaller max_r T[r]. A plan enters only through `Sums`: rows with
the same holders and the same fetch paths form a group, and all terms are linear in a group's
sums. Planner, bound, comparison and drift check all call this module; nothing else prices rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oper.errors import OperError
from oper.topology import Topology

Floats = NDArray[np.float64]
Method = Literal["none", "dense", "bitmap", "allgather"]
METHODS: tuple[Method, ...] = ("none", "dense", "bitmap", "allgather")


@dataclass(frozen=True)
class Workload:
    """What one iteration is: mode, how rows are fetched, and the global batch in samples."""

    mode: Literal["training", "inference"]
    fetch: Literal["raw", "distinct"]
    batch_size: int

    def __post_init__(self) -> None:
        if self.mode not in ("training", "inference"):
            raise OperError(f"mode {self.mode!r}: 'training' or 'inference' was needed")
        if self.fetch not in ("raw", "distinct"):
            raise OperError(f"fetch {self.fetch!r}: 'raw' or 'distinct' was needed")
        if self.batch_size < 1:
            raise OperError(f"batch size {self.batch_size}: at least 1 sample was needed")

    @property
    def training(self) -> bool:
        return self.mode == "training"


@dataclass(frozen=True)
class Groups:
    """Where the rows of G groups are: `path[g, i]` is the rank that rank i reads them from,
    `holds[g, i]` whether rank i stores a copy. Shapes [G, M]."""

    path: NDArray[np.uint16]
    holds: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.path)

    @property
    def copies(self) -> NDArray[np.int64]:
        return self.holds.sum(axis=1)

    @property
    def owner(self) -> NDArray[np.int64]:
        """The only holder of each group, -1 where there are several."""
        return np.where(self.copies == 1, self.holds.argmax(axis=1), -1)

    def __add__(self, other: "Groups") -> "Groups":
        return Groups(
            np.concatenate([self.path, other.path]), np.concatenate([self.holds, other.holds])
        )

    def take(self, index: Any) -> "Groups":
        return Groups(self.path[index], self.holds[index])


def single_groups(ranks: int) -> Groups:
    """One group a rank: rows it alone holds and all read from it."""
    path = np.repeat(np.arange(ranks, dtype=np.uint16)[:, None], ranks, axis=1)
    return Groups(path, np.eye(ranks, dtype=bool))


def everywhere_group(ranks: int) -> Groups:
    """One group: rows on all ranks, each reading its own."""
    return Groups(np.arange(ranks, dtype=np.uint16)[None], np.ones((1, ranks), dtype=bool))


def holder_groups(holds: NDArray[np.bool_], topology: Topology) -> Groups:
    """Groups of given holders, every rank reading from the cheapest (the lowest rank in ties)."""
    price = np.where(holds[:, None, :], topology.link_cost[None], np.inf)
    own = np.eye(topology.ranks, dtype=bool)[None] & holds[:, None, :]
    price = np.where(own, -1.0, price)
    return Groups(price.argmin(axis=2).astype(np.uint16), holds)


def node_groups(topology: Topology) -> Groups:
    """Groups with one copy a node: the t-th rank of every node holds and serves its node."""
    node_of = np.asarray(topology.node_of)
    position = np.array([int((node_of[:r] == node_of[r]).sum()) for r in range(topology.ranks)])
    holds = np.stack([position == t for t in range(int(position.max()) + 1)])
    return holder_groups(holds, topology)


@dataclass
class Sums:
    """Sums over the rows of each group, shapes [G]: all that cost depends on."""

    rows: Floats
    memory_bytes: Floats  # Σ m
    row_bytes: Floats  # Σ S
    accesses: Floats  # Σ accesses in the log
    read_rows: Floats  # Σ R
    read_bytes: Floats  # Σ S·R
    gradient_bytes: Floats  # Σ S·D
    union_bytes: Floats  # Σ S·U
    gather_bytes: Floats  # Σ (S + 4)·D, what an allgather of (id, row) carries

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Sums)))

    def append(self, other: "Sums") -> "Sums":
        """The groups of `other` after one's own."""
        return Sums(
            *(np.concatenate([getattr(self, f.name), getattr(other, f.name)]) for f in fields(Sums))
        )

    @staticmethod
    def zeros(groups: int) -> "Sums":
        return Sums(*(np.zeros(groups) for _ in fields(Sums)))


def expected(
    accesses: NDArray[Any],
    containing: NDArray[Any],
    samples: int,
    workload: Workload,
    ranks: int,
    rank_ratio: Floats | float = 1.0,
    union_ratio: Floats | float = 1.0,
) -> tuple[Floats, Floats, Floats]:
    """Reads R and touches D by one rank, and U by any, per iteration, from a log's counts.

    A = f·b accesses; D = 1 - (1 - s)^b and U = 1 - (1 - s)^(bM), b = batch / ranks, without
    replacement (hypergeometric) where the batch is below the log's samples, with it (binomial)
    elsewhere; both times the measured ratios of the log, where it was profiled for them.
    R is A where every access reads (`raw`), D where a rank fetches a row once (`distinct`).
    """
    samples = max(samples, 1)
    per_rank = workload.batch_size / ranks
    reads = accesses.astype(np.float64) / samples * per_rank
    touched = _touched(containing, samples, per_rank, workload.batch_size)
    union = _touched(containing, samples, workload.batch_size, workload.batch_size)
    touched = np.minimum(touched * rank_ratio, 1.0)
    union = np.clip(union * union_ratio, touched, np.minimum(1.0, touched * ranks))
    return (reads if workload.fetch == "raw" else touched), touched, union


def _touched(containing: NDArray[Any], samples: int, drawn: float, batch: int) -> Floats:
    """The chance that one of `drawn` samples is among the `containing` of `samples`."""
    s = np.minimum(containing.astype(np.float64), samples)
    if batch >= samples:
        with np.errstate(divide="ignore"):
            return -np.expm1(drawn * np.log1p(-s / samples))
    from scipy.special import gammaln

    # C(n - s, b) / C(n, b) by log-gamma; where fewer than b samples lack the row it is certain.
    rest = samples - s
    missed = np.zeros_like(s)
    some = rest >= drawn
    # log C(n-s, b)/C(n, b) = Σ_{i<s} log(1 - b/(n-i)). For s far below n - b the middle term times
    # s is exact to 1e-5; differences of log-gammas, used elsewhere, lose digits there.
    n, few_s = float(samples), s[some]
    middle = n - (few_s - 1) / 2
    product = few_s * np.log1p(-np.minimum(drawn / middle, 1 - 1e-16))
    gammas = gammaln(n - few_s + 1) - gammaln(n - few_s - drawn + 1)
    gammas += gammaln(n - drawn + 1) - gammaln(n + 1)
    log_missed = np.where(few_s < 0.01 * (n - drawn), product, gammas)
    missed[some] = np.exp(np.minimum(log_missed, 0.0))
    return 1.0 - missed


@dataclass(frozen=True)
class Collective:
    """What the replicas' AllReduce by one method costs a rank: linear in sums, plus a constant.

    Seconds = latency (once, if there is any replica) + row·ΣS + union·ΣSU + gather·Σ(S+4)D +
    count·(replicas). Ring and bitmap as in §5.3.
    """

    method: Method
    latency: float
    row: float = 0.0
    union: float = 0.0
    gather: float = 0.0
    count: float = 0.0

    def seconds(self, sums: Sums, which: NDArray[np.bool_]) -> float:
        if not sums.rows[which].sum():
            return 0.0
        return self.latency + self.bytes_rate(sums, which)

    def bytes_rate(self, sums: Sums, which: NDArray[np.bool_]) -> float:
        return float(
            self.row * sums.row_bytes[which].sum()
            + self.union * sums.union_bytes[which].sum()
            + self.gather * sums.gather_bytes[which].sum()
            + self.count * sums.rows[which].sum()
        )

    def memory_bytes(self, sums: Sums, which: NDArray[np.bool_], ranks: int) -> float:
        """What the gradients of a step take of a rank's memory on their way: its own buffer, and
        its part of the sums that all ranks of one node share. Gradients are counted with the bytes
        of their rows, as in all of the cost; the runtime's are float32, of narrower rows too."""
        both = 1 + 1 / ranks
        parts = {
            "none": 0.0,
            "dense": both * sums.row_bytes[which].sum(),
            "bitmap": both * sums.union_bytes[which].sum() + sums.rows[which].sum() / 8,
            "allgather": sums.gather_bytes[which].sum(),
        }
        return float(parts[self.method])


def collective(topology: Topology, method: Method) -> Collective:
    """The AllReduce coefficients of `method` on a topology."""
    ranks, bandwidth = topology.ranks, topology.allreduce_bandwidth
    ring = 2 * (ranks - 1) / ranks / bandwidth
    hop = topology.latency_seconds
    if method == "dense":
        return Collective(method, 2 * (ranks - 1) * hop, row=ring)
    if method == "bitmap":
        # The bitmaps of all ranks are gathered (M·R/8 bytes), then the union is reduced.
        return Collective(method, 3 * (ranks - 1) * hop, union=ring, count=ranks / 8 / bandwidth)
    if method == "allgather":
        return Collective(method, (ranks - 1) * hop, gather=(ranks - 1) / bandwidth)
    return Collective("none", 0.0)


@dataclass
class Cost:
    """Predicted figures of a plan, per iteration. Vectors over ranks; matrices [reader, source]."""

    memory_bytes: Floats
    lookups: Floats  # rows served
    lookup_seconds: Floats  # E
    link_bytes: Floats
    link_seconds: Floats  # C
    gradient_lookup_seconds: Floats  # E'
    gradient_link_seconds: Floats  # C'
    allreduce_seconds: Floats  # G
    allreduce_method: Method
    allreduce_memory_bytes: float  # of a rank
    rank_seconds: Floats  # T
    communication_bytes: dict[str, float]
    extra_bytes: float
    total_bytes: float
    capacity_bytes: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def objective_seconds(self) -> float:
        return float(self.rank_seconds.max())

    @property
    def extra_memory_ratio(self) -> float:
        return self.extra_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def feasible(self) -> bool:
        return bool((self.memory_bytes <= self.capacity_bytes).all())

    @property
    def dob(self) -> dict[str, float | None]:
        """Degrees of balance, min/max: memory over capacity, E over ranks, C over ordered pairs."""
        ranks = len(self.memory_bytes)
        pairs = self.link_seconds[~np.eye(ranks, dtype=bool)]
        return {
            "memory": degree_of_balance(self.memory_bytes / np.maximum(self.capacity_bytes, 1)),
            "lookups": degree_of_balance(self.lookup_seconds),
            "link_cost": degree_of_balance(pairs) if len(pairs) else None,
        }

    def to_json(self) -> dict[str, Any]:
        """The cost's fields under the names that `oper plan --json` promises."""
        return {
            "extra_memory_ratio": self.extra_memory_ratio,
            "memory_bytes": [int(v) for v in self.memory_bytes],
            "capacity_bytes": [int(v) for v in self.capacity_bytes],
            "lookups": self.lookups.tolist(),
            "lookup_seconds": self.lookup_seconds.tolist(),
            "link_bytes": self.link_bytes.tolist(),
            "link_seconds": self.link_seconds.tolist(),
            "gradient_lookup_seconds": self.gradient_lookup_seconds.tolist(),
            "gradient_link_seconds": self.gradient_link_seconds.tolist(),
            "allreduce_seconds": self.allreduce_seconds.tolist(),
            "allreduce_method": self.allreduce_method,
            "allreduce_memory_bytes": round(self.allreduce_memory_bytes),
            "rank_seconds": self.rank_seconds.tolist(),
            "communication_bytes": self.communication_bytes,
            "dob": self.dob,
            "objective_seconds": self.objective_seconds,
            "feasible": self.feasible,
        }


def degree_of_balance(values: Floats) -> float:
    """min/max of non-negative values; 1 where the largest is 0."""
    largest = float(np.max(values))
    return float(np.min(values)) / largest if largest > 0 else 1.0


def evaluate(
    topology: Topology,
    workload: Workload,
    groups: Groups,
    sums: Sums,
    capacity_bytes: Sequence[int] | Floats,
    method: Method | None = None,
) -> Cost:
    """Price a plan given by its groups and their sums; `method` None takes the least AllReduce."""
    ranks = topology.ranks
    reader = np.broadcast_to(np.arange(ranks), groups.path.shape)
    single = groups.copies == 1

    def traffic(values: Floats) -> Floats:
        matrix = np.zeros((ranks, ranks))
        np.add.at(
            matrix, (reader, groups.path), np.broadcast_to(values[:, None], groups.path.shape)
        )
        return matrix

    local = np.diag(topology.link_cost)
    away = ~np.eye(ranks, dtype=bool)
    read = traffic(sums.read_bytes)
    lookup_seconds = local * read.sum(axis=0)
    link_bytes = np.where(away, read, 0.0)
    link_seconds = link_bytes * topology.link_cost

    gradient_lookup_seconds = np.zeros(ranks)
    gradient_bytes = np.zeros((ranks, ranks))
    allreduce_seconds = np.zeros(ranks)
    allreduce_bytes, allreduce_memory = 0.0, 0.0
    chosen = collective(topology, "none")
    if workload.training:
        gradient = traffic(np.where(single, sums.gradient_bytes, 0.0))
        gradient_lookup_seconds = local * gradient.sum(axis=0)
        gradient_bytes = np.where(away, gradient, 0.0)
        shared = ~single
        if sums.rows[shared].sum():
            methods = (method,) if method else METHODS[1:]
            choices = [collective(topology, m) for m in methods]
            chosen = min(choices, key=lambda c: c.seconds(sums, shared))
            step_seconds = local * sums.union_bytes[shared].sum()
            allreduce_seconds = chosen.seconds(sums, shared) + step_seconds
            allreduce_memory = chosen.memory_bytes(sums, shared, ranks)
            allreduce_bytes = ranks * chosen.bytes_rate(sums, shared) * topology.allreduce_bandwidth
    gradient_link_seconds = gradient_bytes * topology.link_cost

    rank_seconds = (
        lookup_seconds
        + link_seconds.sum(axis=1)
        + gradient_lookup_seconds
        + gradient_link_seconds.sum(axis=1)
        + allreduce_seconds
    )
    fetch, gradients = float(link_bytes.sum()), float(gradient_bytes.sum())
    return Cost(
        memory_bytes=groups.holds.T.astype(np.float64) @ sums.memory_bytes,
        lookups=traffic(sums.read_rows).sum(axis=0),
        lookup_seconds=lookup_seconds,
        link_bytes=link_bytes,
        link_seconds=link_seconds,
        gradient_lookup_seconds=gradient_lookup_seconds,
        gradient_link_seconds=gradient_link_seconds,
        allreduce_seconds=allreduce_seconds,
        allreduce_method=chosen.method,
        allreduce_memory_bytes=allreduce_memory,
        rank_seconds=rank_seconds,
        communication_bytes={
            "fetch": fetch,
            "gradient": gradients,
            "allreduce": allreduce_bytes,
            "total": fetch + gradients + allreduce_bytes,
        },
        extra_bytes=float(((groups.copies - 1) * sums.memory_bytes).sum()),
        total_bytes=float(sums.memory_bytes.sum()),
        capacity_bytes=np.asarray(capacity_bytes, dtype=np.float64),
    )
