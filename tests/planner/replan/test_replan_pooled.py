"""Replans of plans with pooled tables: exact, priced as written out; moves pay."""

from pathlib import Path

import numpy as np
import pytest

from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_plan import make_plan
from oper.planner.place_pooled import place_pooled
from oper.planner.price_plan import costs_under, problem_of
from oper.planner.replan.drift import drift
from oper.planner.replan.replan import replan
from oper.planner.replan.replan_one_memory import Replanned
from oper.profiling.profile import Profile
from oper.topology.topology import Topology
from tests.planner.replan.test_replan import assert_moves_are_complete
from tests.planner.test_place_pooled import (
    NODES,
    PER_NODE,
    owners,
    profiled,
    reads_written_out,
    seconds_written_out,
    topology,
)
from tests.support.commands import fine
from tests.support.planner.drifting import assert_exact
from tests.support.planner.gaps import known_gap

pytestmark = pytest.mark.usefixtures("small_programmes")

ROWS = (900, 70, 400)


def drifted(profile: Profile, share: float, seed: int = 0) -> Profile:
    """Counts in which so many of each table's rows have changed places."""
    random = np.random.default_rng(seed)
    accesses, with_row = profile.accesses.copy(), profile.samples_with_row.copy()
    for t, table in enumerate(profile.tables):
        moved = np.flatnonzero(random.random(table.rows) < share)
        to = random.permutation(moved)
        accesses[profile.offsets[t] + moved] = accesses[profile.offsets[t] + to]
        if profile.bagged[t]:
            first = profile.samples_with_row_offsets[t]
            with_row[first + moved] = with_row[first + to]
    return Profile(
        profile.tables,
        profile.samples,
        accesses,
        with_row,
        profile.bagged,
        bag_lengths=profile.bag_lengths,
    )


def settled(profile: Profile, mode: str, fetch: str, ranks: Topology, extra: float = 0.3) -> Plan:
    workload = Workload(mode, fetch, 512)  # type: ignore[arg-type]
    return make_plan(profile, ranks, workload, PlanSettings(extra_memory=extra))


def assert_holds(plan: Plan, found: Replanned, newer: Profile) -> None:
    """What holds of every replan."""
    assert_exact(found.plan)
    assert_moves_are_complete(plan, found)
    assert found.plan.pooled_tables == plan.pooled_tables
    assert found.plan.certificate is not None
    assert known_gap(found.plan.certificate) >= 0
    (old,) = costs_under([plan], [problem_of(plan, newer)])
    assert found.old_seconds == pytest.approx(old.objective_seconds)
    (new,) = costs_under([found.plan], [problem_of(found.plan, newer)])
    np.testing.assert_allclose(found.plan.cost.rank_seconds, new.rank_seconds, rtol=1e-9)
    gained = (found.old_seconds - found.new_seconds) * found.horizon
    moved = bool(len(found.moves.entries))
    assert gained > found.migration_seconds if moved else gained == 0


@pytest.mark.parametrize("memory", ["linked", "shared"])
@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("pooled", [None, ["t0", "t2"]])
def test_replans_are_exact_cost_what_they_say_and_pay(
    tmp_path: Path, pooled: list[str] | None, mode: str, memory: str
) -> None:
    profile, ranks = profiled(tmp_path, 1, ROWS, 300), topology(memory)
    if pooled is None:
        plan = settled(profile, mode, "pooled", ranks)
    else:
        workload, asked = Workload(mode, "distinct", 512), PlanSettings(extra_memory=0.3)  # type: ignore[arg-type]
        plan = assemble(place_pooled(profile, ranks, workload, asked, tables=frozenset(pooled)))
        assert plan.pooled_tables == tuple(pooled)
    for number, horizon in enumerate((1, 10**6)):
        newer = drifted(profile, 0.3, number)
        found = replan(plan, newer, horizon)
        assert_holds(plan, found, newer)
        plan = found.plan


@pytest.mark.parametrize("memory", ["linked", "shared"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_new_plan_states_what_its_rows_cost(tmp_path: Path, mode: str, memory: str) -> None:
    """Written out row by row; batches are not smaller than the log."""
    profile, ranks = profiled(tmp_path, 2, ROWS, 300), topology(memory)
    newer = drifted(profile, 0.5)
    found = replan(settled(profile, mode, "pooled", ranks), newer, 10**6)
    assert len(found.moves.entries)
    if mode == "training":
        stated = found.plan.cost.rank_seconds - found.plan.cost.allreduce_seconds
        written = seconds_written_out(newer, 512, owners(found.plan), True, ranks)
    else:  # plans are for further samples; here the log's own are read
        (cost,) = costs_under([found.plan], [problem_of(found.plan, newer, as_counted=True)])
        stated, written = cost.rank_seconds, reads_written_out(newer, 512, found.plan)
    np.testing.assert_allclose(stated, written, rtol=1e-6)


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("ranks", ["2x4-h100", "2x4-h100:1", "unequal"])
def test_most_of_the_gain_for_few_of_the_bytes(tmp_path: Path, ranks: str, mode: str) -> None:
    profile = profiled(tmp_path, 3, (9000, 700, 4000), 3000)
    if ranks == "unequal":
        cost = topology().link_cost * np.random.default_rng(0).uniform(0.7, 1.4, (4, 4))
        given = Topology("u", (0, 0, 1, 1), cost, 2e7, topology().latency)
    else:
        given = Topology.load(ranks)
    plan = settled(profile, mode, "pooled", given, 0.05)
    newer = drifted(profile, 0.1)
    found = replan(plan, newer, 10**6)
    assert_holds(plan, found, newer)
    assert found.gain_share is not None
    assert found.gain_share >= 0.95
    assert found.bytes_share is not None
    assert found.bytes_share <= 0.5


def test_tables_stay_on_their_nodes(tmp_path: Path) -> None:
    """Where counts change within tables, and not between them."""
    profile = profiled(tmp_path, 7, (600, 500, 400, 550), 400)
    plan = settled(profile, "training", "pooled", topology(), 0.1)
    found = replan(plan, drifted(profile, 0.2), 10**6)
    assert len(found.moves.entries)
    node_of = np.append(np.array(plan.topology.node_of), [-1] * (1 + PER_NODE))
    for before, after in zip(owners(plan), owners(found.plan), strict=True):
        both = (node_of[before] >= 0) & (node_of[after] >= 0)
        assert both.any()
        stays = node_of[before][both] == node_of[after][both]
        assert stays.mean() > 0.9


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_unchanged_counts_move_nothing(tmp_path: Path, mode: str) -> None:
    profile = profiled(tmp_path, 4, ROWS, 300)
    plan = settled(profile, mode, "pooled", topology())
    found = replan(plan, profile, 10**6)
    assert not len(found.moves.entries)
    assert found.new_seconds == pytest.approx(plan.cost.objective_seconds)
    assert found.plan.vector_ratio == pytest.approx(plan.vector_ratio)


def test_the_commands_work_on_plans_with_pooled_tables(tmp_path: Path) -> None:
    profile = profiled(tmp_path, 5, ROWS, 300)
    drifted(profile, 0.3).save(tmp_path / "newer")
    made = "--topology", "2x4-h100", "--batch-size", "512", "--fetch", "pooled"
    fine("plan", tmp_path / "p", *made, "-o", tmp_path / "q")
    fine("replan", tmp_path / "q", tmp_path / "newer", "-o", tmp_path / "r")
    fine("plan", "check", tmp_path / "r")
    again = Plan.load(tmp_path / "r")
    assert again.pooled_tables == tuple(table.name for table in again.tables)
    assert again.vector_ratio is not None
    assert len(again.vector_ratio) == NODES
    fine("drift", tmp_path / "r", tmp_path / "newer")
    assert drift(again, Profile.load(tmp_path / "newer")).worse <= 0.05
