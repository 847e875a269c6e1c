"""Replan and drift of plans with a tier: tables stay in their memory, and moves pay for both."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.checker.check import check
from oper.plan.plan import Plan
from oper.plan.plan_parts import plans_of_memories
from oper.planner.place_together import place_memories
from oper.planner.place_with_tier import plan_with_tier
from oper.planner.price_plan import problems_of_memories
from oper.planner.replan.drift import drift
from oper.planner.replan.limited_moves import MoveLimit
from oper.planner.replan.replan import replan
from oper.planner.replan.replan_one_memory import replan_one_memory
from oper.planner.replan.replan_with_tier import ReplannedWithTier
from oper.profiling.profile import Profile
from tests.planner.replan.test_replan import assert_moves_are_complete
from tests.support.examples import at_least, examples
from tests.support.planner.drifting import seeds
from tests.support.planner.tiers import (
    assert_figures_are_true,
    drawn,
    rank_seconds_row_by_row,
)

pytestmark = pytest.mark.usefixtures("small_programmes")


def planned(seed: int, number: int = 2) -> tuple[Plan, list[Profile]]:
    """A plan with a tier for the first of several profiles."""
    profiles, topology, workload, asked = drawn(seed, number)
    try:
        return plan_with_tier(profiles[0], topology, workload, asked)[0], profiles
    except OperError:
        reject()


@at_least(5)
@given(seeds, st.sampled_from([1, 100, 10**6]))
@examples(8)
def test_moves_are_complete_true_and_pay(seed, horizon):
    plan, profiles = planned(seed, 3)
    with TemporaryDirectory() as place:
        folder = Path(place)
        plan.save(folder / "0")
        for step, profile in enumerate(profiles[1:], 1):
            found = replan(folder / str(step - 1), profile, horizon)
            found.plan.save(folder / str(step))
            assert isinstance(found, ReplannedWithTier)
            assert [f.wrong for f in check(folder / str(step)) if not f.ok] == []
            assert found.plan.tier == plan.tier
            assert_moves_are_complete(plan, found)
            assert_figures_are_true(found.plan, profile)
            before = rank_seconds_row_by_row(plan, profile).max()
            assert np.isclose(found.old_seconds, before, rtol=1e-9)
            assert found.plan.certificate is not None
            bound = found.plan.certificate.lower_bound_seconds
            assert bound <= found.new_seconds
            assert bound <= found.fresh_seconds
            assert_moves_of_each_memory_pay(found)
            if len(found.moves.entries):
                gained = (found.old_seconds - found.new_seconds) * horizon
                assert gained > found.migration_seconds > 0
                assert found.to_json()["seconds"] == found.migration_seconds
            else:
                assert found.new_seconds == found.old_seconds
            plan = Plan.load(folder / str(step))


def assert_moves_of_each_memory_pay(found: ReplannedWithTier) -> None:
    """What they gain of the iteration, beside the moves in the other memory, is more than their
    copies take."""
    costs = [part.plan.cost.rank_seconds for part in found.parts]
    for n, part in enumerate(found.parts):
        if len(part.moves.entries):
            without = [*costs[:n], part.unmoved().cost.rank_seconds, *costs[n + 1 :]]
            gained = np.sum(without, axis=0).max() - np.sum(costs, axis=0).max()
            assert gained * found.horizon > part.migration_seconds > 0


def test_moves_that_pay_in_their_own_memory_alone_are_left_out():
    profiles, topology, workload, asked = drawn(28, 2)
    horizon = 1
    plan, _ = plan_with_tier(profiles[0], topology, workload, asked)
    _, host = plans_of_memories(plan)
    counts = profiles[1].select(list(plan.tier))
    alone = replan_one_memory(host, counts, horizon, MoveLimit(), "", lambda _: None)
    assert len(alone.moves.entries)
    assert (alone.old_seconds - alone.new_seconds) * horizon > alone.migration_seconds
    found = replan(plan, profiles[1], horizon)
    assert isinstance(found, ReplannedWithTier)
    assert [len(part.moves.entries) > 0 for part in found.parts] == [True, False]
    assert_moves_of_each_memory_pay(found)


@at_least(5)
@given(seeds)
@examples(6)
def test_unchanged_counts_move_nothing_and_drift_nowhere(seed):
    plan, (profile,) = planned(seed, 1)
    found = replan(plan, profile, 10**9)
    assert len(found.moves.entries) == 0
    assert np.isclose(found.new_seconds, plan.cost.objective_seconds, rtol=1e-9)
    measured = drift(plan, profile, 0.01)
    assert measured.verdict == "keep"
    assert np.allclose(measured.rank_seconds.now, plan.cost.rank_seconds, rtol=1e-9)


def test_some_replans_move_rows_in_both_memories():
    moved = set()
    for seed in range(12):
        profiles, topology, workload, asked = drawn(seed, 2)
        try:
            plan, _ = plan_with_tier(profiles[0], topology, workload, asked)
        except OperError:
            continue
        found = replan(plan, profiles[1], 10**6)
        table = np.searchsorted(np.cumsum(plan.layout.rows), found.moves.entries["row"], "right")
        moved |= set(np.isin(table, plan.tier).tolist())
        if len(moved) == 2:
            break
    assert moved == {True, False}


@at_least(4)
@given(seeds)
@examples(6)
def test_drift_is_of_both_memories(seed):
    plan, (_, newer) = planned(seed)
    found = drift(plan, newer, 0.01)
    seconds = rank_seconds_row_by_row(plan, newer)
    now = found.rank_seconds.now
    assert np.allclose(now, seconds, rtol=1e-9)
    assert found.judgement.keep.transfer_seconds == now.max()
    assert [table.table for table in found.tables] == [table.name for table in plan.tables]
    placed, _ = place_memories(problems_of_memories(plan, newer))
    fresh = np.sum([part.cost.rank_seconds for part in placed], axis=0)
    assert np.allclose(found.rank_seconds.fresh, fresh, rtol=1e-9)
    latency = seconds[now.argmax()] - sum(t.slowest_rank_seconds for t in found.tables)
    assert -1e-12 <= latency <= 1e-3  # of the AllReduce, in no table's part
