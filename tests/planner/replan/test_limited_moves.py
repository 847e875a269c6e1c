"""Replans that may move so many bytes: never more, and never worse than a new plan cut to them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.planner.place_with_tier import plan_with_tier
from oper.planner.replan.replan import replan
from oper.topology.topology import Topology
from tests.support.commands import fine, oper
from tests.support.examples import at_least, examples
from tests.support.planner.drifting import (
    assert_exact,
    cost_of_rows,
    cost_row_by_row,
    drifted,
    drifting,
    planned,
    seeds,
    slots_of,
    sources_of,
)
from tests.support.planner.tiers import drawn

pytestmark = pytest.mark.usefixtures("small_programmes")

HORIZON = 10**6


@at_least(10)
@given(seeds, st.sampled_from([0.0, 0.02, 0.2, 0.7]))
@examples(10)
def test_limits_hold_and_moves_pay(seed, share):
    plan, (_, newer) = planned(seed)
    free = replan(plan, newer, HORIZON)
    most = int(share * free.migration.link_bytes)
    found = replan(plan, newer, HORIZON, max_move=most)
    assert found.migration.link_bytes <= most
    assert found.max_move_bytes == most
    gained = found.old_seconds - found.new_seconds
    assert not len(found.moves.entries) or gained * HORIZON > found.migration_seconds
    assert_exact(found.plan)
    cost = cost_row_by_row(found.plan, newer)
    assert np.isclose(found.new_seconds, cost.objective_seconds, rtol=1e-9)


@at_least(6)
@given(seeds)
@examples(6)
def test_a_limit_above_what_pays_leaves_all_of_the_gain(seed):
    plan, (_, newer) = planned(seed)
    free = replan(plan, newer, HORIZON)
    found = replan(plan, newer, HORIZON, max_move=int(free.migration.link_bytes) + 1)
    assert found.aimed.new <= free.aimed.new * (1 + 1e-9)


def row_bytes(plan):
    rows, mode = [t.rows for t in plan.tables], plan.workload.mode
    return np.repeat([t.memory_bytes(mode) for t in plan.tables], rows)


def cut_by_rows(plan, fresh, profile, most):
    """T after the hottest rows of the difference between two plans, as far as the bytes go; None
    where that exceeds a capacity, or the memory for copies."""
    before, after, size = slots_of(plan) >= 0, slots_of(fresh) >= 0, row_bytes(plan)
    differs = np.flatnonzero((after != before).any(axis=1))
    accesses = profile.accesses.astype(np.int64)
    order = differs[np.argsort(-accesses[differs], kind="stable")]
    moved = (after & ~before).sum(axis=1) * size
    taken = order[np.cumsum(moved[order]) <= most]
    holds, sources = before.copy(), sources_of(plan)
    holds[taken], sources[taken] = after[taken], sources_of(fresh)[taken]
    copies = ((holds.sum(axis=1) - 1) * size).sum()
    capacity = plan.cost.capacity_bytes
    if (holds.T @ size > capacity).any() or copies > plan.asked.extra_memory * size.sum():
        return None
    return cost_of_rows(fresh, profile, holds, sources).objective_seconds


@pytest.mark.parametrize("topology", ["dgx-a100", "2x2-a100"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_never_worse_than_a_new_plan_as_far_as_the_bytes_go(mode, topology):
    compared = 0
    for seed in range(3):
        profiles = drifted(seed, moved=0.3)
        plan = plan_for(profiles[0], topology, mode)
        made = replan(plan, profiles[1], HORIZON, curve=True)
        for point in made.curve:
            assert point.moved_bytes <= point.most_bytes
            assert point.cut_aimed_seconds is None or point.aimed_seconds <= point.cut_aimed_seconds
            cut = cut_by_rows(plan, assemble(made.fresh), profiles[1], point.most_bytes)
            if cut is not None:
                compared += 1
                assert point.aimed_seconds <= cut * (1 + 1e-9)
    assert compared >= 2


def plan_for(profile, topology, mode):
    workload = Workload(mode, "raw", 512)
    asked = PlanSettings(extra_memory=0.02)
    return assemble(make_placement(profile, Topology.load(topology), workload, asked))


def test_a_curve_says_what_its_limits_leave():
    profiles = drifting(np.random.default_rng(1), 2)
    plan = plan_for(profiles[0], "dgx-a100", "inference")
    curve = replan(plan, profiles[1], HORIZON, curve=True).curve
    assert len(curve) == 7
    falling = [point.aimed_seconds for point in curve]
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > falling[-1]
    for point in curve[::3]:
        found = replan(plan, profiles[1], HORIZON, max_move=int(point.most_bytes))
        assert found.new_seconds == pytest.approx(point.aimed_seconds, rel=1e-6)
        assert found.migration.link_bytes <= point.most_bytes
    assert replan(plan, profiles[1], HORIZON).curve == ()


@pytest.mark.parametrize("seed", range(4))
def test_of_both_memories(seed):
    profiles, topology, workload, asked = drawn(seed, 2)
    plan, _ = plan_with_tier(profiles[0], topology, workload, asked)
    free = replan(plan, profiles[1], HORIZON, curve=True)
    most = int(free.migration.link_bytes / 3)
    found = replan(plan, profiles[1], HORIZON, max_move=most)
    assert found.migration.link_bytes <= most
    assert free.aimed.new <= found.aimed.new * (1 + 1e-9)
    assert found.aimed.new <= found.aimed.old
    for point in free.curve:
        assert point.moved_bytes <= point.most_bytes


def test_where_rows_must_move_less_is_refused():
    profiles = drifting(np.random.default_rng(1), 2)
    plan = plan_for(profiles[0], "dgx-a100", "inference")
    fewer = Topology.load("2x2-a100")
    carried = replan(plan, profiles[1], HORIZON, topology=fewer).carried_over
    assert carried is not None
    least = carried.migration.link_bytes
    with pytest.raises(OperError, match=r"max_move='10 B': .* must move, as their ranks are gone"):
        replan(plan, profiles[1], HORIZON, topology=fewer, max_move=10)
    most = int(least * 1.2)
    found = replan(plan, profiles[1], HORIZON, topology=fewer, max_move=most, curve=True)
    assert least <= found.migration.link_bytes <= most
    assert_exact(found.plan)
    for point in found.curve:
        assert least <= point.moved_bytes <= point.most_bytes


def test_the_command_takes_bytes_and_shares(tmp_path: Path):
    profiles = drifting(np.random.default_rng(1), 2)
    plan = plan_for(profiles[0], "dgx-a100", "inference")
    plan.save(tmp_path / "old")
    profiles[1].save(tmp_path / "new")
    words = ["replan", tmp_path / "old", tmp_path / "new", "-o", tmp_path / "made", "--force"]
    told = json.loads(fine(*words, "--max-move", "0.1%", "--curve", "--json"))
    assert told["max_move_bytes"] == pytest.approx(0.001 * row_bytes(plan).sum())
    assert told["moved_bytes"] <= told["max_move_bytes"]
    assert [point["moved_bytes"] <= point["most_bytes"] for point in told["curve"]] == [True] * 7
    shown = fine(*words, "--max-move", "2kB", "--curve")
    assert "at most 2 kB move (--max-move)" in " ".join(shown.split())
    assert "new plan, cut" in shown
    assert max(len(line) for line in shown.splitlines()) <= 100
    for wrong in ("much", "-3%", "1e999", "0.05", "101%", "1%%", ""):
        said = oper(*words, "--max-move", wrong)
        assert said.status == 2
        assert "a share of the tables' bytes, such as 1%" in said.errors
    still = fine(*words, "--max-move", "0")
    assert "nothing moves, as no move pays off within" in " ".join(still.split())
    assert "and takes at most 0 B (--max-move)" in " ".join(still.split())
    with pytest.raises(OperError, match="max_move: expected at least 0 bytes, got -1"):
        replan(plan, profiles[1], max_move=-1)
