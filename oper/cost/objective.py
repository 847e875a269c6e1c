"""The objective: the largest time of a rank in one iteration, and everything it is made of.

With M ranks, row bytes S, expected reads R and touches D by one rank per iteration, U the chance
that any rank touches the row, and L[i][j] the seconds per byte for rank i to read from rank j
(paper §3.2, equations 1-5, with the link in equation 3 read as L[i][j]):

    E[r]    = L[r][r] · Σ_k S_k R_k · (ranks to which r serves row k)               (equation 2)
    C[r][j] = L[r][j] · Σ_k S_k R_k · [r reads row k from j]                        (equation 3)
    T[r]    = E[r] + Σ_{j≠r} C[r][j]                                    inference
    T[r]    = the same + E'[r] + Σ_{j≠r} C'[r][j] + G[r]                training
    E', C'  = the gradients of rows with one owner: L[r][r] · Σ_k S_k D_k · M over r's rows, and C
              with D_k in the place of R_k
    G[r]    = AllReduce of the replicas + L[r][r] · Σ_replicas S_k U_k (their optimizer step)

r serves row k to the ranks that read it from r, itself among them, but not to others that share
r's memory: these read it there without r, and pay for C alone. Gradients are added by the owner
everywhere.

A plan with a smaller max_r T[r] is better. A plan enters only through `Sums`: rows with
the same holders and the same sources form a holder set, and all terms are linear in a set's
sums. Who pays how much for a byte that is read is in read_charges.py, the AllReduce in
allreduce.py; whatever else prices rows (placement, bounds, comparison, drift) takes it from those
two.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oper.base.arrays import Floats
from oper.cost.allreduce import METHODS, Method, allreduce_cost
from oper.cost.holder_set_sums import Sums
from oper.cost.holder_sets import HolderSets
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.topology.topology import Topology


@dataclass
class Cost:
    """Predicted figures of a plan, per iteration. Vectors over ranks; matrices [reader, source]."""

    memory_bytes: Floats
    lookups: Floats  # rows that each rank looks up, for itself and for others
    lookup_seconds: Floats  # E
    link_bytes: Floats
    link_seconds: Floats  # C
    gradient_lookup_seconds: Floats  # E'
    gradient_link_seconds: Floats  # C'
    allreduce_seconds: Floats  # G
    allreduce_method: Method
    allreduce_memory_bytes: float  # of a rank
    rank_seconds: Floats  # T
    one_memory: bool  # whether all rows are read without their owners
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
        """Degrees of balance, min/max: memory over capacity, E over ranks, C over ordered pairs.
        Where all ranks share one memory, E is what ranks read of their own, and the rows that they
        serve count instead."""
        ranks = len(self.memory_bytes)
        pairs = self.link_seconds[~np.eye(ranks, dtype=bool)]
        return {
            "memory": degree_of_balance(self.memory_bytes / np.maximum(self.capacity_bytes, 1)),
            "lookups": degree_of_balance(self.lookups if self.one_memory else self.lookup_seconds),
            "link_cost": degree_of_balance(pairs) if len(pairs) else None,
        }


def degree_of_balance(values: Floats) -> float:
    """min/max of non-negative values; 1 where the largest is 0."""
    largest = float(np.max(values))
    return float(np.min(values)) / largest if largest > 0 else 1.0


def evaluate(
    topology: Topology,
    workload: Workload,
    sets: HolderSets,
    sums: Sums,
    capacity_bytes: Sequence[int] | Floats,
    method: Method | None = None,
) -> Cost:
    """Price a plan by its holder sets and their sums; `method` None takes the least AllReduce."""
    ranks = topology.ranks
    reader = np.broadcast_to(np.arange(ranks), sets.source.shape)
    single = sets.copies == 1

    def traffic(values: Floats) -> Floats:
        matrix = np.zeros((ranks, ranks))
        np.add.at(
            matrix, (reader, sets.source), np.broadcast_to(values[:, None], sets.source.shape)
        )
        return matrix

    charges = Charges.of(topology)
    away = ~np.eye(ranks, dtype=bool)
    read = traffic(sums.read_bytes)
    lookup_seconds, link_seconds = charges.lookup_and_link_seconds(read)
    link_bytes = np.where(away, read, 0.0)

    gradient_lookup_seconds = np.zeros(ranks)
    gradient_bytes, gradient_link_seconds = np.zeros((2, ranks, ranks))
    allreduce_seconds = np.zeros(ranks)
    allreduce_bytes, allreduce_memory = 0.0, 0.0
    chosen = allreduce_cost(topology, "none")
    if workload.training:
        gradient = traffic(np.where(single, sums.gradient_bytes, 0.0))
        gradient_charges = Charges.of_gradients(topology)
        gradient_lookup_seconds, gradient_link_seconds = gradient_charges.lookup_and_link_seconds(
            gradient
        )
        gradient_bytes = np.where(away, gradient, 0.0)
        replicas = sums.total(~single)
        if replicas.rows:
            methods = (method,) if method else METHODS[1:]
            choices = [allreduce_cost(topology, m) for m in methods]
            chosen = min(choices, key=lambda c: c.seconds(replicas))
            step_seconds = charges.memory_seconds * replicas.union_bytes
            allreduce_seconds = chosen.seconds(replicas) + step_seconds
            allreduce_memory = chosen.memory_bytes(replicas, ranks)
            moving_seconds = chosen.row_seconds(replicas).item()
            allreduce_bytes = ranks * moving_seconds * topology.allreduce_bandwidth

    rank_seconds = (
        charges.paid_for_memory(lookup_seconds)
        + charges.paid_for_links(link_seconds)
        + charges.paid_for_memory(gradient_lookup_seconds)
        + charges.paid_for_links(gradient_link_seconds)
        + allreduce_seconds
    )
    fetch, gradients = float(link_bytes.sum()), float(gradient_bytes.sum())
    return Cost(
        memory_bytes=sets.holds.T.astype(np.float64) @ sums.memory_bytes,
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
        one_memory=topology.is_one_memory,
        communication_bytes={
            "fetch": fetch,
            "gradient": gradients,
            "allreduce": allreduce_bytes,
            "total": fetch + gradients + allreduce_bytes,
        },
        extra_bytes=float(((sets.copies - 1) * sums.memory_bytes).sum()),
        total_bytes=float(sums.memory_bytes.sum()),
        capacity_bytes=np.asarray(capacity_bytes, dtype=np.float64),
    )
