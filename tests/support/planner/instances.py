"""Small problems for tests: classes of rows made directly, without a profile."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from oper.cost.expected_reads import expected_reads, node_touches
from oper.cost.workload import Workload
from oper.plan.settings import Limits, PlanSettings
from oper.planner.problem.classes import Classes, Width
from oper.planner.problem.problem import ClassProblem
from oper.topology.latency import Latency
from oper.topology.links import NodeMemory
from oper.topology.relays import relayed, relayed_sizes
from oper.topology.topology import Topology


def make_classes(
    accesses: list[int],
    rows: list[int],
    workload: Workload,
    ranks: int,
    samples: int = 1000,
    widths: tuple[tuple[int, int], ...] = ((64, 68),),
    width: list[int] | None = None,
) -> Classes:
    """Classes of one table, one id a bag: class c has `rows[c]` rows accessed `accesses[c]` times.

    Classes equal in accesses and width are put together, as `classify` does.
    """
    of_width = np.zeros(len(rows), dtype=np.int64) if width is None else np.array(width)
    keys, inverse = np.unique(
        np.stack([-np.array(accesses), of_width]), axis=1, return_inverse=True
    )
    counts = np.bincount(inverse.ravel(), weights=rows).astype(np.int64)
    f, w = -keys[0], keys[1]
    S = np.array([s for s, _ in widths], dtype=np.float64)[w]
    m = np.array([m for _, m in widths], dtype=np.float64)[w]
    R, D, U = expected_reads(f, f, samples, workload, ranks)
    index = np.arange(len(counts))
    return Classes(
        tuple(Width(*pair) for pair in widths),
        w,
        f,
        f,
        counts,
        S,
        m,
        f.astype(np.float64),
        R,
        D,
        U,
        samples,
        np.zeros((len(counts), 0)),
        w.copy(),
        index,
        counts.copy(),
    )


def make_problem(
    classes: Classes,
    topology: Topology,
    workload: Workload,
    extra_memory: float = 0.05,
    **settings: Any,
) -> ClassProblem:
    """A problem with the paper's capacities, and with relays where the workload has them."""
    topology = relayed(topology, workload.fetch == "distinct")
    of_nodes = node_touches(
        classes.samples_with_row,
        classes.samples,
        workload,
        topology.ranks,
        relayed_sizes(topology),
    )
    classes = replace(classes, D_of_node=of_nodes)
    total = classes.total_bytes
    capacity = topology.capacities(total, extra_memory, classes.width_memory).astype(np.float64)
    budget = max(min(extra_memory * total, float(capacity.sum()) - total), 0.0)
    asked = PlanSettings(extra_memory, **settings)
    return ClassProblem(asked, Limits(extra_memory), classes, topology, workload, capacity, budget)


def zipf_counts(rows: int, accesses: int, exponent: float = 1.05) -> np.ndarray:
    """Accesses of each row, most accessed first."""
    share = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    return np.maximum(np.round(share / share.sum() * accesses), 0).astype(np.int64)


def zipf_problem(
    topology: Topology,
    workload: Workload,
    extra_memory: float = 0.05,
    rows: int = 20_000,
    exponent: float = 1.05,
    **settings: Any,
) -> ClassProblem:
    """A problem of one Zipf table."""
    counts, of = np.unique(zipf_counts(rows, 40 * rows, exponent), return_counts=True)
    classes = make_classes(
        counts.tolist(), of.tolist(), workload, topology.ranks, samples=20 * rows
    )
    return make_problem(classes, topology, workload, extra_memory, **settings)


workloads = st.builds(
    Workload,
    st.sampled_from(["training", "inference"]),
    st.sampled_from(["raw", "distinct"]),
    st.sampled_from([8, 64, 4096]),
)


@st.composite
def topologies(draw: st.DrawFn, most_ranks: int = 4, homogeneous: bool = False) -> Topology:
    """Ranks on one node or several, of linked or shared memory; links of equal or of any cost, and
    nodes of unlike sizes where ranks need not be alike."""
    ranks = draw(st.integers(2, most_ranks))
    nodes = 2 if ranks % 2 == 0 and draw(st.booleans()) else 1
    node_of = tuple(r * nodes // ranks for r in range(ranks))
    if not homogeneous and draw(st.booleans()):
        of_ranks = draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks))
        node_of = tuple(sorted(set(of_ranks)).index(node) for node in of_ranks)
        nodes = len(set(node_of))
    same = np.equal.outer(node_of, node_of)
    cost = np.where(same, 1 / 240e9, 1 / 19e9)
    np.fill_diagonal(cost, 1 / 1244e9)
    kinds: list[NodeMemory] = ["linked", "shared"]
    memory = [draw(st.sampled_from(kinds))] * nodes
    if memory[0] == "shared" and draw(st.booleans()):  # as one host is measured
        cost[same] = 1 / 110e9
    own = draw(st.sampled_from([1244e9, 1244e9, 200e9, 15e9]))  # slower memories than links
    if own < 1244e9:
        np.fill_diagonal(cost, 1 / own)
    if draw(st.booleans()) and draw(st.booleans()):  # slower links inside nodes than between them
        cost[same & ~np.eye(ranks, dtype=bool)] = 1 / 12e9
    capacity = None
    if not homogeneous:
        factors = draw(st.lists(st.floats(0.5, 2.0), min_size=ranks**2, max_size=ranks**2))
        cost = cost * np.array(factors).reshape(ranks, ranks)
        if draw(st.booleans()):
            capacity = tuple(draw(st.lists(st.floats(1.6, 2.5), min_size=ranks, max_size=ranks)))
        memory = [draw(st.sampled_from(kinds)) for _ in range(nodes)]
    return Topology(
        "drawn", node_of, cost, 72e9, Latency.of_hops(2e-6), capacity=capacity, memory=tuple(memory)
    )
