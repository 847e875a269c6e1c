"""Levels of replication against enumeration of all levels on small problems."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cost.allreduce import METHODS, Method
from oper.cost.holder_sets import everywhere_set, per_node_sets, single_owner_sets
from oper.cost.objective import evaluate
from oper.cost.read_charges import Charges
from oper.cost.workload import Workload
from oper.planner.class_placement.homogeneous_replicas import (
    inference_levels,
    link_levels,
    saved_by_copies,
    training_levels,
)
from oper.planner.problem.problem import ClassProblem
from oper.topology.topology import Topology
from tests.support.planner.instances import make_classes, make_problem, zipf_problem


def mean_seconds(
    problem: ClassProblem, node: np.ndarray, everywhere: np.ndarray, method: Method
) -> float:
    """Mean T with single and once-a-node rows spread evenly, by the cost model itself."""
    topology, classes = problem.topology, problem.classes
    M = topology.ranks
    per_node = per_node_sets(topology, Charges.of(topology).read_seconds)
    sets = single_owner_sets(M) + per_node + everywhere_set(M)
    single = classes.rows - node - everywhere
    counts = np.concatenate(
        [
            np.repeat(single[:, None] / M, M, axis=1),
            np.repeat(node[:, None] / len(per_node), len(per_node), axis=1),
            everywhere[:, None],
        ],
        axis=1,
    )
    cost = evaluate(
        topology,
        problem.workload,
        sets,
        classes.sums(counts),
        problem.capacity_bytes,
        None if method == "none" else method,
    )
    return float(cost.rank_seconds.mean())


@given(
    st.lists(st.integers(0, 300), min_size=2, max_size=4, unique=True),
    st.sampled_from(["dgx-a100", "2x4-a100"]),
    st.floats(0, 6),
)
def test_inference_levels_are_within_one_row_of_the_best(
    accesses: list[int], preset: str, extra: float
) -> None:
    topology = Topology.load(preset)
    workload = Workload("inference", "raw", 512)
    classes = make_classes(accesses, [2] * len(accesses), workload, 8)
    problem = make_problem(classes, topology, workload, extra)
    levels = inference_levels(
        problem.classes,
        saved_by_copies(problem.classes, problem.topology),
        problem.topology,
        problem.budget_bytes,
    )
    spent = levels.node @ classes.m * (topology.nodes - 1) + levels.everywhere @ classes.m * 7
    assert spent <= problem.budget_bytes + 1e-6
    ours = mean_seconds(problem, levels.node, levels.everywhere, "none")
    best = np.inf
    choices = [(n, e) for n in range(3) for e in range(3 - n) if topology.nodes > 1 or not n]
    for pick in product(choices, repeat=len(classes)):
        node, everywhere = (np.array(v) for v in zip(*pick, strict=True))
        bytes_used = node @ classes.m * (topology.nodes - 1) + everywhere @ classes.m * 7
        if bytes_used <= problem.budget_bytes:
            best = min(best, mean_seconds(problem, node, everywhere, "none"))
    # A knapsack by density is off by at most the row that did not fit any more.
    row = classes.traffic_bytes(workload).max() * topology.link_cost.max() * 7 / 8
    assert best - 1e-15 <= ours <= best + row + 1e-15


@given(
    st.lists(st.integers(1, 900), min_size=2, max_size=4, unique=True),
    st.sampled_from(["raw", "distinct"]),
    st.sampled_from([64, 4096]),
)
def test_training_replicates_only_what_pays(accesses: list[int], fetch: str, batch: int) -> None:
    topology = Topology.load("2x4-a100")
    workload = Workload("training", fetch, batch)  # type: ignore[arg-type]
    classes = make_classes(accesses, [1] * len(accesses), workload, 8)
    problem = make_problem(classes, topology, workload, extra_memory=10)  # room for all
    classes, topology = problem.classes, problem.topology
    none = np.zeros(len(classes), dtype=np.int64)
    for method in METHODS[1:]:
        levels = training_levels(classes, topology, workload, method, problem.budget_bytes)
        best = min(
            (np.array(pick) for pick in product([0, 1], repeat=len(classes)) if any(pick)),
            key=lambda pick: mean_seconds(problem, none, pick, method),
        )
        if levels.everywhere.any():
            ours = mean_seconds(problem, none, levels.everywhere, method)
            assert ours == pytest.approx(mean_seconds(problem, none, best, method), rel=1e-9)
        else:
            # Without the latency, which is charged once, no row would have paid either.
            alone = mean_seconds(problem, none, best, method)
            assert alone >= mean_seconds(problem, none, none, "none")


def test_balanced_links_cost_the_same_across_and_inside_nodes() -> None:
    topology = Topology.load("2x4-a100")
    workload = Workload("inference", "raw", 65_536)
    problem = zipf_problem(topology, workload)
    classes = problem.classes
    levels = link_levels(classes, topology, workload, problem.budget_bytes)
    weight = classes.traffic_bytes(workload)
    single = weight @ (classes.rows - levels.node - levels.everywhere)
    across = topology.link_cost[0, 7] * single / 8
    inside = topology.link_cost[0, 1] * (single / 8 + weight @ levels.node / 4)
    assert across == pytest.approx(inside, rel=1e-3)
    spent = classes.m @ (levels.node + 7 * levels.everywhere)
    assert spent <= problem.budget_bytes
