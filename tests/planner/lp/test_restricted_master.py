"""The linear programme: the same holder set is one column, or it stops looking for others."""

import numpy as np
import pytest

from oper.cost.workload import Workload
from oper.planner.lp.pricing import pricing_items
from oper.planner.lp.restricted_master import (
    MemoryItems,
    RestrictedMaster,
    buckets,
    solve_items,
)
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.planner.instances import zipf_problem


@pytest.mark.parametrize("node_of", [(0, 1, 1, 1, 2), (0, 0, 1, 2, 2), (0, 0, 0, 1)])
def test_on_uneven_nodes_holder_sets_are_generated_until_no_one_is_cheaper(
    node_of: tuple[int, ...],
) -> None:
    cost = np.where(np.equal.outer(node_of, node_of), 1.0, 19.0) / 80e9
    cost[0, 1:] *= 2.3
    np.fill_diagonal(cost, 1 / 1244e9)
    topology = Topology("uneven", node_of, cost, 72e9, Latency.of_hops(5e-6))
    workload = Workload("inference", "distinct", 4096)
    problem = zipf_problem(topology, workload, 0.01)
    topology = problem.topology
    items = pricing_items(problem.classes, topology, workload, "none")
    merged = items.merged(buckets(items))
    limits = (topology, problem.capacity_bytes, problem.budget_bytes)
    master = RestrictedMaster(MemoryItems(merged, *limits), "time")
    keys = {
        s.tobytes() + h.tobytes()
        for s, h in zip(master.holder_sets.source, master.holder_sets.holds, strict=True)
    }
    assert len(keys) == len(master.holder_sets) == len(master.known)
    master.solve()
    while master.add_cheaper():
        master.solve()
    # The value is that of the best bound on it: no column is missing.
    assert master.value <= master.best_bound * (1 + 1e-4)
    assert solve_items(items, *limits).seconds == pytest.approx(master.seconds, rel=1e-4)
