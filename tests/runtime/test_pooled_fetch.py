"""Pooled fetch between nodes against the unsharded model, on ranks that are processes."""

from dataclasses import replace

import pytest

from oper.plan.plan import Plan
from tests.runtime.test_engine import assert_equals_unsharded
from tests.support.runtime.engine_cases import Case, tables_of
from tests.support.runtime.runtime_plans import random_plan


def pooling_plan(case: Case, *, share: float = 1.0, **options) -> Plan:
    """A random plan that pools the first tables."""
    tables = tables_of(case)
    plan = random_plan(case.seed, tables, case.ranks, **options)
    names = [table.name for table in tables]
    return replace(plan, pooled_tables=tuple(names[: round(share * len(names))]))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 0, 1), (0, 1, 2), (0, 0, 1, 1)])
def test_bags_between_nodes(ranks, nodes, pooling):
    for seed, bags in ((5, "many"), (6, "one"), (7, "none")):
        case = Case(seed=seed, ranks=len(nodes), pooling=pooling, bags=bags)
        assert_equals_unsharded(ranks, case, pooling_plan(case), nodes)
