"""What a plan says a step does between nodes, and the AllReduce of its replicas, however few their
bytes: counted in steps of the runtime."""

import dataclasses
from typing import Any, get_args
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

from oper.cost.allreduce import METHODS, NodeSum, allreduce_cost, node_sum
from oper.plan.plan import Plan
from oper.runtime.comm.group import Group
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.runtime.engine_cases import Case, batch_of, gradient_of, start, tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds

# A hop costs as much as a thousand further messages; and the other way round.
LATENCIES: dict[NodeSum, Latency] = {
    "at_once": Latency(0.0, 1.0, message=1e-3),
    "in_rounds": Latency(0.0, 1e-3, message=1.0),
}


def exchanges(rank: int, group: Any, case: Case, plan: Plan, nodes: tuple[int, ...]) -> int:
    """Collectives of a rank's second step, from its prepared batch on."""
    engine = start(case, plan, group, nodes=nodes)
    counted: list[int] = []
    begin = Group.start

    def counting(self: Group, collective: Any, *arguments: Any, **options: Any) -> Any:
        counted[-1] += collective is dist.all_to_all_single
        return begin(self, collective, *arguments, **options)

    for step in range(2):
        batch = engine.prepare(batch_of(case, step, rank))
        counted.append(0)
        with mock.patch.object(Group, "start", counting):
            out = engine.lookup(batch)
            if engine.training:
                out.backward(gradient_of(case, step, rank, out))
    engine.close()
    return counted[-1]


def said_exchanges(plan: Plan, without: tuple[str, ...] = ()) -> int:
    """Exchanges of a step but those of some phases, as the plan has them."""
    latencies = plan.phase_latencies.items()
    return sum(latency.exchanges for name, latency in latencies if name not in without)


def planned(case: Case, nodes: tuple[int, ...], latency: Latency, **options: Any) -> Plan:
    """A plan for CPU ranks on devices' terms: no empty messages are priced."""
    plan = random_plan(3, tables_of(case), len(nodes), **options)
    cost = np.ones((len(nodes), len(nodes)))
    return dataclasses.replace(plan, topology=Topology("nodes", nodes, cost, 1.0, latency))


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1), (0, 0, 1, 1), (0, 0)])
def test_a_step_makes_the_exchanges_that_a_plan_says(
    ranks: Worlds, nodes: tuple[int, ...], mode: str, fetch: str
) -> None:
    case = Case(seed=3, ranks=len(nodes))
    shares = {"replicated": 0.0} if mode == "training" else {}
    plan = planned(case, nodes, LATENCIES["at_once"], mode=mode, fetch=fetch, **shares)
    said = said_exchanges(plan)
    assert said == (len(set(nodes)) > 1) * (3 + 2 * (mode == "training"))
    if nodes == (0, 0):
        return
    if len({nodes.count(n) for n in nodes}) == 1:  # an owner at each position, in each other node
        assert plan.phase_latencies["ids"].peers == (1 if fetch == "distinct" else nodes.count(1))
    counted = ranks.run(len(nodes), exchanges, case, plan, nodes)
    assert counted == [said] * len(nodes)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1)])
def test_a_step_of_pooled_tables_exchanges_sums_alone(
    ranks: Worlds, nodes: tuple[int, ...], mode: str
) -> None:
    case = Case(seed=3, ranks=len(nodes))
    shares = {"replicated": 0.0} if mode == "training" else {}
    plan = planned(case, nodes, LATENCIES["at_once"], mode=mode, fetch="pooled", **shares)
    plan = dataclasses.replace(plan, pooled_tables=tuple(table.name for table in plan.tables))
    counted = ranks.run(len(nodes), exchanges, case, plan, nodes)
    # Bags are forwarded when the batch is prepared.
    assert counted == [said_exchanges(plan, without=("ids",))] * len(nodes)


@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("way", get_args(NodeSum))
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1, 1), (0, 1, 2), (0, 1, 2, 3)])
def test_the_allreduce_makes_the_exchanges_that_it_is_priced_by(
    ranks: Worlds, nodes: tuple[int, ...], way: NodeSum, method: Any
) -> None:
    case, N = Case(seed=3, ranks=len(nodes)), len(set(nodes))
    plan = planned(case, nodes, LATENCIES[way], fetch="distinct", method=method)
    assert node_sum(plan.topology) == (way if N > 2 else "at_once")
    rounds = int(np.ceil(np.log2(N)))
    of_sum = 2 * rounds if node_sum(plan.topology) == "in_rounds" else 2
    of_method = {"dense": of_sum, "bitmap": 1 + of_sum, "allgather": 2}[method]
    counted = ranks.run(len(nodes), exchanges, case, plan, nodes)
    assert counted == [said_exchanges(plan) + of_method] * len(nodes)
    # Each is priced as a hop and the further messages of its peers.
    hops = dataclasses.replace(LATENCIES[way], message=0.0)
    only_hops = dataclasses.replace(plan.topology, latency=hops)
    if node_sum(only_hops) == node_sum(plan.topology):
        priced = allreduce_cost(only_hops, method).latency
        assert priced == pytest.approx(of_method * hops.other_node)
