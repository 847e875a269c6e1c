"""Ranks on two hosts, which are network namespaces, train as the unsharded model does."""

from typing import Any

import pytest

from oper.plan import Plan
from oper.runtime.node import Node
from tests import two_hosts
from tests.embedding_cases import Case, run_case, tables_of
from tests.runtime_plans import random_plan
from tests.test_embedding import assert_equals_unsharded


class TwoHosts:
    """Runs ranks as tests.ranks.Ranks does: the first host has all but one."""

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
    monkeypatch.setattr("tests.test_embedding.run_case", _peers_and_case)
    found = assert_equals_unsharded(hosts, case, plan)
    assert [result["peers"] for result in found] == [(0, 1), (0, 1), (2,)]
    assert all(result["counted"]["fetched_rows"] for result in found)
