"""Plans of the planner's with some tables pooled, trained on ranks that are several nodes: against
the unsharded model."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import oper
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.place_pooled import place_pooled
from oper.planner.replan.replan import replan
from oper.runtime.memory.runtime_plan import copied_to_nodes
from oper.topology.latency import Latency
from oper.topology.links import SHARED
from oper.topology.topology import Topology
from tests.runtime.test_engine import assert_equals_unsharded
from tests.support.examples import examples
from tests.support.planner.drifting import slots_of
from tests.support.runtime.engine_cases import Case, batch_of, tables_of

NODES = [(0, 1), (0, 0, 1, 1), (0, 1, 2), (0, 0, 1)]


def planned(case: Case, nodes: tuple[int, ...], pooled: list[bool], extra_memory: float) -> Plan:
    """The planner's plan for the case's batches, some tables pooled."""

    def batches() -> Iterator[object]:
        for step in range(case.steps):
            for rank in range(case.ranks):
                yield batch_of(case, step, rank)

    tables = tables_of(case)
    profile = oper.profile(batches(), list(tables))
    cost = np.where(np.equal.outer(nodes, nodes), 1e-9, 1e-8)
    ranks = Topology(
        "nodes", nodes, cost, 1e8, Latency.of_hops(0.0), memory=(SHARED,) * len(set(nodes))
    )
    names = frozenset(table.name for table, of in zip(tables, pooled, strict=False) if of)
    workload = Workload("training", "distinct", 16 * case.ranks)
    settings = PlanSettings(extra_memory=extra_memory)
    return assemble(place_pooled(profile, ranks, workload, settings, tables=names))


@examples(8)
@given(
    seed=st.integers(0, 50),
    nodes=st.sampled_from(NODES),
    pooled=st.lists(st.booleans(), min_size=3, max_size=3).filter(lambda of: 0 < sum(of) < 3),
    extra=st.sampled_from([0.2, 2.0]),
    pooling=st.sampled_from(["sum", "mean"]),
)
def test_a_plan_with_some_pooled_tables_trains_as_the_unsharded_model(
    ranks, seed, nodes, pooled, extra, pooling
) -> None:
    case = Case(
        seed=seed, ranks=len(nodes), pooling=pooling, bags="many", rows=(150, 40, 90), dims=(8, 4)
    )
    plan = planned(case, nodes, pooled, extra)
    assert 0 < len(plan.pooled_tables) < 3
    assert plan.workload.fetch == "distinct"
    assert_equals_unsharded(ranks, case, plan, nodes)


def test_the_first_tables_travel_as_sums(ranks) -> None:
    """What `planned` gives is what was asked: a plan that pools nothing would train as well."""
    case = Case(seed=1, ranks=2, bags="many", rows=(150, 40, 90), dims=(8, 4))
    plan = planned(case, (0, 1), [True, False, True], 0.2)
    assert plan.pooled_tables == tuple(tables_of(case)[n].name for n in (0, 2))
    assert plan.vector_ratio is not None
    assert all(ratio > 0 for ratio in plan.vector_ratio)


def test_copies_on_nodes_train_as_the_unsharded_model_and_after_a_replan(ranks) -> None:
    case = Case(seed=3, ranks=4, bags="many", rows=(150, 40, 90), dims=(8, 4), steps=4)
    plan = planned(case, (0, 0, 1, 1), [True, True, True], 0.02)
    assert copied_to_nodes(plan.layout).any()
    assert_equals_unsharded(ranks, case, plan, plan.topology.node_of)
    tables = list(tables_of(case))
    later = replace(case, seed=4)
    newer = oper.profile(
        (batch_of(later, step, rank) for step in range(4) for rank in range(4)), tables
    )
    found = replan(plan, newer, 10**9)
    before, after = slots_of(plan), slots_of(found.plan)
    moved = (before >= 0).sum(axis=1) != (after >= 0).sum(axis=1)
    assert (moved & ((after >= 0).sum(axis=1) == 2)).any()
    assert_equals_unsharded(ranks, case, found.plan, plan.topology.node_of)
