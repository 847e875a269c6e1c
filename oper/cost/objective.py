"""The objective: the largest time of a rank in one iteration, and everything it is made of.

With M ranks, row bytes S, expected reads R and touches D by one rank per iteration, U the chance
that any rank touches the row, and L[i][j] the seconds per byte for rank i to read from rank j
(paper §3.2, equations 1-5, with the link in equation 3 read as L[i][j]):

    E[r]    = L[r][r] · Σ_k S_k R_k · (ranks to which r serves row k)               (equation 2)
    C[r][j] = L[r][j] · Σ_k S_k R_k · [r reads row k from j]                        (equation 3)
    T[r]    = E[r] + Σ_{j≠r} C[r][j]                                    inference
    T[r]    = the same + E'[r] + Σ_{j≠r} C'[r][j] + G[r]                training
    E', C'  = the gradients of rows with one owner: L[r][r] · Σ_k S_k D_k · M over r's rows, and C
              with D_k in the place of R_k; of rows with a copy on each node those within the nodes
    G[r]    = AllReduce of the replicas + L[r][r] · Σ_replicas S_k U_k (their optimizer step), and
              the same of the copies that r holds for its node, with the other nodes' holders

On several nodes distinct fetches go through relays (oper/topology/relays.py). For row k of rank j
and another node n, p being j's relay there and D̂_k the chance that any rank of n touches the row,
p pays L[p][j]·S_k·D̂_k and j L[j][j]·S_k·D̂_k; the ranks i ≠ p of n read it from p, at S_k·D_k each,
as a row that p owns. Gradients go back the same way: p adds them up and sends one.

r serves row k to the ranks that read it from r, itself among them, except the others that share r's
memory: these read it there without r, and pay for C alone. The owner adds the gradients everywhere.

A plan with a smaller max_r T[r] is better. A plan enters only through `Sums`: rows with the same
holders and the same sources form a holder set, and all terms are linear in a set's sums.
read_charges.py decides which rank pays how much for a byte that is read, and allreduce.py prices
the AllReduce; everything else that prices rows (placement, bounds, comparison, drift) uses these
two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Floats, Ints, PerPair, PerRank, WholePerRank
from oper.base.portable_math import dot
from oper.cost.allreduce import METHODS, AllReduceCost, Method, NodeCopiesCost, allreduce_cost
from oper.cost.holder_sets import HolderSets, Sums
from oper.cost.read_charges import Charges
from oper.cost.step_memory import ProcessorStep, StepMemory
from oper.cost.workload import Workload
from oper.topology.pooled_links import PooledTopology, without_pooling
from oper.topology.topology import Topology


@dataclass(frozen=True)
class Communication:
    """Bytes between ranks in an iteration, summed over the ranks."""

    DERIVED: ClassVar = ("total",)  # in JSON next to the fields

    fetch: float
    gradient: float
    allreduce: float

    @property
    def total(self) -> float:
        return self.fetch + self.gradient + self.allreduce


@dataclass(frozen=True)
class Balance:
    """Degrees of balance, min/max: memory over capacity over ranks, lookup seconds over ranks,
    fetch seconds over ordered pairs of ranks whose links rows pass (None for one rank).

    If all ranks share one memory, `lookup_seconds` cover only the reads of a rank's own rows, and
    the rows that each rank serves are compared instead.
    """

    memory: float
    lookups: float
    link_cost: float | None


@dataclass(frozen=True)
class Cost:
    """Predicted figures of an iteration on M ranks; a plan's file has the same fields. Matrices are
    [reader, source]."""

    DERIVED: ClassVar = ("objective_seconds", "extra_memory_ratio", "feasible")  # in JSON

    memory_bytes: WholePerRank  # of rows and optimizer state
    capacity_bytes: WholePerRank  # for these
    extra_bytes: float  # of all copies beyond one of each row
    total_bytes: float  # of one copy of each row
    lookups: PerRank  # rows that each rank looks up, for itself and for others
    lookup_seconds: PerRank  # E
    link_bytes: PerPair
    link_seconds: PerPair  # C
    gradient_lookup_seconds: PerRank  # E'
    gradient_link_seconds: PerPair  # C'
    allreduce_method: Method  # of the replicas' gradients
    allreduce_seconds: PerRank  # G
    allreduce_memory_bytes: int  # of a rank, for the replicas' gradients (step_memory.py)
    rank_seconds: PerRank  # T
    communication_bytes: Communication
    dob: Balance
    mailbox_bytes: int = 0  # of a rank, for all else of a step (step_memory.py)

    @property
    def ranks(self) -> int:
        return len(self.memory_bytes)

    @property
    def step_bytes(self) -> int:
        """Bytes of a rank's memory that a step takes in addition to the rows."""
        return self.mailbox_bytes + self.allreduce_memory_bytes

    @property
    def objective_seconds(self) -> float:
        """Seconds of the slowest rank."""
        return float(self.rank_seconds.max())

    @property
    def extra_memory_ratio(self) -> float:
        """Bytes of extra copies over bytes of one copy of all rows."""
        return self.extra_bytes / self.total_bytes if self.total_bytes else 0.0

    @property
    def feasible(self) -> bool:
        """True if every rank holds at most its capacity."""
        return bool((self.memory_bytes <= self.capacity_bytes).all())

    @staticmethod
    def of_no_rows(capacity_bytes: Floats) -> "Cost":
        """Return the cost of a memory without tables, of capacity `capacity_bytes` [M]."""
        ranks = len(capacity_bytes)
        vector, matrix = np.zeros(ranks), np.zeros((ranks, ranks))
        return Cost(
            memory_bytes=np.zeros(ranks, dtype=np.int64),
            capacity_bytes=whole_bytes(capacity_bytes),
            extra_bytes=0.0,
            total_bytes=0.0,
            lookups=vector,
            lookup_seconds=vector,
            link_bytes=matrix,
            link_seconds=matrix,
            gradient_lookup_seconds=vector,
            gradient_link_seconds=matrix,
            allreduce_method="none",
            allreduce_seconds=vector,
            allreduce_memory_bytes=0,
            rank_seconds=vector,
            communication_bytes=Communication(0.0, 0.0, 0.0),
            dob=Balance(1.0, 1.0, 1.0 if ranks > 1 else None),
        )

    def beside(self, other: "Cost", one_memory: bool) -> "Cost":
        """Return the cost of an iteration that also reads rows in another memory. Times and traffic
        add up; bytes of memory and the AllReduce stay those of this cost. `one_memory`: all ranks
        share the other memory."""
        added: dict[str, Any] = {
            name: getattr(self, name) + getattr(other, name) for name in _ADDED_UP
        }
        return replace(
            self,
            **added,
            communication_bytes=Communication(
                *(
                    getattr(self.communication_bytes, name)
                    + getattr(other.communication_bytes, name)
                    for name in ("fetch", "gradient", "allreduce")
                )
            ),
            dob=_balance(
                self.dob.memory,
                added["lookups"] if one_memory else added["lookup_seconds"],
                added["link_seconds"],
                ~np.eye(self.ranks, dtype=bool),
            ),
        )


# Figures that add up over rows in two memories.
_ADDED_UP = (
    "lookups",
    "lookup_seconds",
    "link_bytes",
    "link_seconds",
    "gradient_lookup_seconds",
    "gradient_link_seconds",
    "allreduce_seconds",
    "rank_seconds",
    "mailbox_bytes",
)


def whole_bytes(values: Floats) -> Ints:
    """Return bytes of memory, rounded down."""
    return np.asarray(np.trunc(values), dtype=np.int64)


def _balance(
    memory: float, served: Floats, link_seconds: Floats, links: NDArray[np.bool_]
) -> Balance:
    pairs = link_seconds[links]
    return Balance(
        memory, degree_of_balance(served), degree_of_balance(pairs) if len(pairs) else None
    )


def degree_of_balance(values: Floats) -> float:
    """Return min/max of non-negative values; 1 if the largest is 0."""
    largest = float(np.max(values))
    return float(np.min(values)) / largest if largest > 0 else 1.0


def evaluate(
    topology: Topology,
    workload: Workload,
    sets: HolderSets,
    sums: Sums,
    capacity_bytes: Sequence[int] | Floats,
    method: Method | None = None,
    step: StepMemory | None = None,
) -> Cost:
    """Price a plan by its holder sets and their sums. `method` None selects the cheapest AllReduce.
    `step` is the memory of a step in addition to the rows; None: on the processor, without
    mailboxes."""
    ranks = topology.ranks
    step = step or ProcessorStep(0.0, ranks)
    everywhere, on_some = sets.everywhere, sets.on_some

    def through(charges: Charges, of_rank: Floats, of_nodes: Floats) -> Floats:
        """Return the bytes that pass memories and links, [M, M]."""
        passed = charges.through(charges.traffic(sets, of_rank))
        for of, values in zip(charges.of_nodes, of_nodes.T, strict=True):
            passed = passed + of.through(of.traffic(sets, values))
        return passed

    unpooled = without_pooling(topology)
    charges = Charges.of(unpooled)
    away = ~np.eye(ranks, dtype=bool)
    read = through(charges, sums.read_bytes - sums.pooled_read_bytes, sums.node_bytes)
    lookup_seconds, link_seconds = charges.lookup_and_link_seconds(read)
    link_bytes = np.where(away, read, 0.0)
    own_rows = sums.read_rows - sums.pooled_read_rows
    lookups = charges.rows_served(charges.traffic(sets, own_rows))
    for of, values in zip(charges.of_nodes, sums.node_rows.T, strict=True):
        lookups = lookups + of.rows_served(of.traffic(sets, values))

    gradient_lookup_seconds = np.zeros(ranks)
    gradient_bytes, gradient_link_seconds = np.zeros((2, ranks, ranks))
    allreduce_seconds = np.zeros(ranks)
    allreduce_bytes, allreduce_memory = 0.0, 0.0
    chosen = allreduce_cost(topology, "none")
    if workload.training:
        own_bytes = sums.gradient_bytes - sums.pooled_gradient_bytes
        of_nodes = np.where(everywhere[:, None], 0.0, sums.node_bytes)
        gradient_charges = Charges.of_gradients(unpooled)
        gradient = through(gradient_charges, np.where(everywhere, 0.0, own_bytes), of_nodes)
        gradient_lookup_seconds, gradient_link_seconds = gradient_charges.lookup_and_link_seconds(
            gradient
        )
        gradient_bytes = np.where(away, gradient, 0.0)
        replicas = sums.total(everywhere)
        if replicas.rows:
            chosen = cheapest_allreduce(topology, replicas, method)
            step_seconds = charges.memory_seconds * replicas.union_bytes
            allreduce_seconds = chosen.seconds(replicas) + step_seconds
            allreduce_memory = step.allreduce_bytes(chosen, replicas)
            moving_seconds = chosen.row_seconds(replicas).item()
            allreduce_bytes = ranks * moving_seconds * topology.allreduce_bandwidth
        if on_some.any():
            copied = NodeCopiesCost.of(topology)
            held = dot(sets.holds.T.astype(np.float64), np.where(on_some, sums.union_bytes, 0.0))
            latency = copied.latency * bool(sums.rows[on_some].any())
            allreduce_seconds = allreduce_seconds + copied.union * held + latency
            allreduce_bytes += 2 * (topology.nodes - 1) / topology.nodes * float(held.sum())
    if isinstance(topology, PooledTopology):
        owned = np.where(everywhere, 0.0, sums.pooled_gradient_bytes)
        rows, *bytes = (
            Charges.of(topology).traffic(sets, values)
            for values in (
                sums.pooled_read_rows,
                sums.pooled_read_bytes,
                sums.pooled_gradient_bytes,
                owned,
            )
        )
        pooled = _Pooled.of(topology, *bytes)
        lookups = lookups + rows.sum(axis=0)
        lookup_seconds = lookup_seconds + pooled.lookup_seconds
        link_seconds = link_seconds + pooled.link_seconds
        link_bytes = link_bytes + pooled.link_bytes
        if workload.training:
            gradient_lookup_seconds = gradient_lookup_seconds + pooled.gradient_lookup_seconds
            gradient_link_seconds = gradient_link_seconds + pooled.gradient_link_seconds
            gradient_bytes = gradient_bytes + pooled.gradient_bytes

    rank_seconds = (
        charges.paid_for_memory(lookup_seconds)
        + charges.paid_for_links(link_seconds)
        + charges.paid_for_memory(gradient_lookup_seconds)
        + charges.paid_for_links(gradient_link_seconds)
        + allreduce_seconds
    )
    memory_bytes = dot(sets.holds.T.astype(np.float64), sums.memory_bytes)
    capacity = np.asarray(capacity_bytes, dtype=np.float64)
    return Cost(
        memory_bytes=whole_bytes(memory_bytes),
        capacity_bytes=whole_bytes(capacity),
        extra_bytes=float(((sets.copies - 1) * sums.memory_bytes).sum()),
        total_bytes=float(sums.memory_bytes.sum()),
        lookups=lookups,
        lookup_seconds=lookup_seconds,
        link_bytes=link_bytes,
        link_seconds=link_seconds,
        gradient_lookup_seconds=gradient_lookup_seconds,
        gradient_link_seconds=gradient_link_seconds,
        allreduce_method=chosen.method,
        allreduce_seconds=allreduce_seconds,
        allreduce_memory_bytes=round(allreduce_memory),
        rank_seconds=rank_seconds,
        communication_bytes=Communication(
            float(link_bytes.sum()), float(gradient_bytes.sum()), allreduce_bytes
        ),
        dob=_balance(
            degree_of_balance(memory_bytes / np.maximum(capacity, 1)),
            lookups if topology.is_one_memory else lookup_seconds,
            link_seconds,
            Charges.of(topology).links,
        ),
        mailbox_bytes=round(step.batch_bytes),
    )


class _Pooled(NamedTuple):
    """Terms that rows of pooled tables add to the fields of a `Cost` with these names;
    gradient_bytes: bytes that pass each link, [M, M]."""

    lookup_seconds: Floats
    link_seconds: Floats
    link_bytes: Floats
    gradient_lookup_seconds: Floats
    gradient_link_seconds: Floats
    gradient_bytes: Floats

    @staticmethod
    def of(topology: PooledTopology, read: Floats, touched: Floats, owned: Floats) -> "_Pooled":
        """Return the terms of the bytes that ranks `read` from each other, of the rows that they
        have `touched` there, and of those rows with one owner, each [reader, source]."""
        away, other = ~np.eye(topology.ranks, dtype=bool), topology.masks()["other_node"]

        def seconds(charges: Charges, traffic: Floats) -> tuple[Floats, Floats]:
            return charges.lookup_and_link_seconds(charges.through(traffic))

        lookup_seconds, _ = seconds(Charges.of_memory(topology), touched)
        _, link_seconds = seconds(Charges.of(topology), read)
        gradients = seconds(Charges.of_gradients(topology), owned)
        # Between nodes each vector that came has a gradient that goes back.
        ratios = topology.vector_ratio[np.array(topology.node_of)]
        sent = np.where(away, read, 0.0) * np.where(other, ratios, 1.0)
        back = np.where(other, sent, np.where(away, owned, 0.0))
        return _Pooled(lookup_seconds, link_seconds, sent, *gradients, back)


def cheapest_allreduce(
    topology: Topology, replicas: Sums, method: Method | None = None
) -> AllReduceCost:
    """Return the AllReduce that is fastest for all replicas, given their sums as one entry; or that
    of `method`."""
    methods = (method,) if method else METHODS[1:]
    return min(
        (allreduce_cost(topology, name) for name in methods), key=lambda c: c.seconds(replicas)
    )
