"""Facts of plans with figures that are set by hand."""

from dataclasses import replace

import numpy as np
import pytest

from oper.analysis.plan_facts import cache_replay, cache_room_bytes
from oper.plan.plan import Plan
from oper.plan.settings import Limits
from oper.tables.table import Table
from tests.support.runtime.runtime_plans import random_plan


def with_tier(tier: tuple[int, ...], reserve: float | None = 0.2) -> Plan:
    """A plan of two tables on two devices of 1,000 bytes for rows, of which the fuller one has 300
    left; a step's gradients of the tables in the hosts' memory take 100."""
    plan = random_plan(0, (Table("a", 9), Table("b", 9)), 2, tier=tier)
    devices, host = plan.memories
    capacity, held = np.array([1000, 1000]), np.array([700, 500])
    devices = replace(
        devices, cost=replace(devices.cost, capacity_bytes=capacity, memory_bytes=held)
    )
    host = replace(host, cost=replace(host.cost, mailbox_bytes=100))
    return replace(plan, memories=(devices, host), limits=Limits(0.0, reserve))


@pytest.mark.parametrize(
    ("plan", "room"),
    [
        (with_tier((1,)), 200),
        (with_tier((0, 1)), 300),  # the gradients are taken off the capacity already
        (with_tier((1,), reserve=None), None),
    ],
)
def test_caches_may_have_what_rows_and_gradients_leave(plan: Plan, room: int | None) -> None:
    assert cache_room_bytes(plan) == room


def test_the_replay_of_caches_is_of_all_rows_in_the_tier() -> None:
    found = cache_replay(with_tier((0, 1)))
    assert found is not None
    # Two ranks: records, numbers of twice as many places, twice the order of 18 rows in two caches.
    assert found.row_bytes == 64 + 2 * 8
    assert found.total_bytes == 18 * (80 + 4 * 16) + 2 * 18 * 2 * 8
    assert cache_replay(random_plan(0, (Table("a", 9),), 2)) is None
