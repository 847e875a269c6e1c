"""Ranks on two hosts, which are network namespaces, train as the unsharded model does."""

from typing import Any

import pytest
import torchrec  # noqa: F401  (once, and not by every rank that is forked)

from oper.plan.plan import Plan
from oper.runtime.comm.node import Node
from tests.runtime.test_engine import assert_equals_unsharded
from tests.support.runtime import two_hosts
from tests.support.runtime.engine_cases import Case, run_case, tables_of
from tests.support.runtime.runtime_plans import random_plan


class TwoHosts:
    """Runs ranks as tests.support.runtime.ranks.Ranks does: the first host has all but one."""

    def run(self, ranks: int, *arguments: Any) -> list[Any]:
        """The results by rank."""
        return two_hosts.run((ranks - 1, 1), *arguments)


def _peers_and_case(rank: int, group: Any, case: Case, plan: Plan, nodes: None) -> dict[str, Any]:
    peers = Node.join(group).peers
    return run_case(rank, group, case, plan, nodes) | {"peers": peers}


def test_hosts_are_nodes_and_train_as_the_unsharded_model(monkeypatch):
    if reason := two_hosts.missing():
        pytest.skip(f"no network namespaces here: {reason}")
    case = Case(seed=3, ranks=3, optimizer="rowwise_adagrad")
    plan = random_plan(3, tables_of(case), 3, replicated=0.3, fetch="distinct")
    hosts: Any = TwoHosts()
    monkeypatch.setattr("tests.runtime.test_engine.run_case", _peers_and_case)
    found = assert_equals_unsharded(hosts, case, plan)
    assert [result["peers"] for result in found] == [(0, 1), (0, 1), (2,)]
    assert all(result["counted"]["fetched_rows"] for result in found)
