"""The fetch path that an engine chooses for its tables, by plan and nodes."""

from dataclasses import replace
from typing import Any

import pytest

from oper.plan.plan import Plan
from oper.runtime.fetch_paths.fetch_path import FetchPath, PathOver
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.training.cached_rows import source_of
from tests.support.runtime.engine_cases import Case, start, tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.runtime.worlds import Worlds

CASE = Case(seed=3, ranks=2, rows=(60, 80, 40))
ONE_NODE, TWO_NODES = (0, 0), (0, 1)


def names_of(path: FetchPath) -> list[str]:
    """The classes of a path and of the paths below it, from the top."""
    below = names_of(path.below) if isinstance(path, PathOver) else []
    return [type(path).__name__, *below]


# By fetch, nodes, pooled tables, and whether the tier is cached: the path, from the top.
CHOICES = {
    ("raw", ONE_NODE, 0, False): ["Pointers"],
    ("raw", ONE_NODE, 1, False): ["Pointers"],
    ("distinct", ONE_NODE, 0, False): ["CopiedRows"],
    ("distinct", ONE_NODE, 3, False): ["Pointers"],
    ("raw", TWO_NODES, 0, False): ["RowsByAccess"],
    ("distinct", TWO_NODES, 0, False): ["RelayedRows"],
    ("raw", TWO_NODES, 1, False): ["PooledBags", "RowsByAccess"],
    ("distinct", TWO_NODES, 1, False): ["PooledBags", "RelayedRows"],
    ("distinct", TWO_NODES, 3, False): ["PooledBags", "Pointers"],
    ("raw", ONE_NODE, 0, True): ["CachedTier", "Pointers"],
    ("distinct", TWO_NODES, 1, True): ["PooledBags", "CachedTier", "RelayedRows"],
}


def plan_of(fetch: str, pooled: int, cached: bool) -> Plan:
    """A random plan that pools the first tables, with the last one in the tier if it is cached."""
    tables = tables_of(CASE)
    tier = (len(tables) - 1,) if cached else ()
    plan = random_plan(CASE.seed, tables, CASE.ranks, fetch=fetch, tier=tier)
    return replace(plan, pooled_tables=tuple(table.name for table in tables[:pooled]))


def chosen(rank: int, group: Any) -> dict[Any, list[str]]:
    paths = {}
    for fetch, nodes, pooled, cached in CHOICES:
        make_source = source_of(CacheSettings("50%")) if cached else None
        plan = plan_of(fetch, pooled, cached)
        engine = start(CASE, plan, group, nodes=nodes, make_source=make_source)
        paths[fetch, nodes, pooled, cached] = names_of(engine.path)
        engine.close()
    return paths


def test_each_plan_has_its_path(ranks: Worlds) -> None:
    for paths in ranks.run(CASE.ranks, chosen):
        assert paths == CHOICES


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
def test_a_rank_alone_reads_its_rows_where_they_lie(fetch: str) -> None:
    case = replace(CASE, ranks=1)
    engine = start(case, random_plan(1, tables_of(case), 1, fetch=fetch), None)
    assert names_of(engine.path) == ["Pointers"]


def test_frozen_and_pooled_tables_send_no_rows_gradients(ranks: Worlds) -> None:
    """Only gradients of trained tables that are not pooled go to owners on other nodes."""
    case = replace(CASE, optimizers=("sgd", "none", "sgd"))
    plan = random_plan(case.seed, tables_of(case), case.ranks, fetch="distinct")
    plan = replace(plan, pooled_tables=("t0",))
    for sent in ranks.run(case.ranks, sent_tables, case, plan):
        assert sent == [2]


def sent_tables(rank: int, group: Any, case: Case, plan: Plan) -> list[int]:
    engine = start(case, plan, group, nodes=TWO_NODES)
    path: Any = engine.path
    sent = [table for b in path.below._exchange._sent for table in engine.buckets[b].tables]
    engine.close()
    return sent
