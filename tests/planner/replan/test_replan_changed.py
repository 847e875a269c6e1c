"""Replan for other tables and ranks: exact placements, rows that stay, moves that are counted."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, reject

from oper.base.errors import OperError
from oper.checker.check import check
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.plan.validate import validate
from oper.planner.make_placement import InfeasibleError
from oper.planner.make_plan import make_plan
from oper.planner.replan.replan import replan
from oper.planner.replan.replan_one_memory import Replanned
from oper.profiling.profile import Profile
from oper.tables.table import IdRule, Table, offsets
from oper.topology.capacity import CapacityError
from oper.topology.topology import Topology
from tests.support.commands import fine, oper
from tests.support.examples import at_least, examples
from tests.support.planner.drifting import (
    assert_exact,
    cost_row_by_row,
    make_profile,
    planned,
    random_topology,
    seeds,
    slots_of,
)
from tests.support.planner.instances import zipf_counts

pytestmark = pytest.mark.usefixtures("small_programmes")


def counts_for(random: np.random.Generator, tables) -> Profile:
    return make_profile(
        tables, [random.permutation(zipf_counts(t.rows, 15 * t.rows, 1.05)) for t in tables]
    )


def changed_tables(random: np.random.Generator, tables) -> tuple[Table, ...]:
    """Some tables with more rows, without some, with new ones, in another order."""
    kept = [t for t in tables if random.random() < 0.7] or [tables[0]]
    grown = [
        replace(t, rows=t.rows + int(random.integers(0, t.rows // 2 + 3)))
        if random.random() < 0.6
        else t
        for t in kept
    ]
    new = [
        Table(f"new{n}", int(random.choice([1, 50, 1200])), dim=int(random.choice([8, 16, 24])))
        for n in range(int(random.integers(0, 3)))
    ]
    tables = [*grown, *new]
    return tuple(tables[n] for n in random.permutation(len(tables)))


def old_ids(old: Plan, new: Plan) -> np.ndarray:
    """The id in the old plan of each row of the new one; -1: it has none."""
    first = dict(zip((t.name for t in old.tables), offsets(old.tables).tolist(), strict=False))
    rows = {t.name: t.rows for t in old.tables}
    ids = []
    for table in new.tables:
        number = np.arange(table.rows)
        known = number < rows.get(table.name, 0)
        ids.append(np.where(known, first.get(table.name, 0) + number, -1))
    return np.concatenate(ids)


def held_before(old: Plan, new: Plan) -> np.ndarray:
    """The slots in the old plan of each row of the new one, on the ranks of both; -1: none."""
    ids, slots = old_ids(old, new), slots_of(old)
    more = max(new.ranks - old.ranks, 0)
    slots = np.pad(slots, ((0, 0), (0, more)), constant_values=-1)
    return np.where(ids[:, None] >= 0, slots[ids], -1)


def assert_counted_right(old: Plan, found) -> None:
    """The moves lead to the new slots, and rows and bytes are those that a row by row look at both
    plans finds."""
    new, moves = found.plan, found.moves.entries
    before, ranks = held_before(old, new), found.plan.ranks
    after = slots_of(new)
    known = old_ids(old, new) >= 0
    memory = np.repeat(
        [t.memory_bytes(new.workload.mode) for t in new.tables], [t.rows for t in new.tables]
    )
    arrives = (after >= 0) & (before[:, :ranks] < 0)
    assert found.migration.rows == (arrives.any(axis=1) & known).sum()
    assert found.migration.link_bytes == (arrives.sum(axis=1) * memory)[known].sum()
    assert found.migration.placed_rows == (~known).sum()
    assert found.migration.placed_bytes == (arrives.sum(axis=1) * memory)[~known].sum()
    # The entries, carried out: what is not in them is where it was, on ranks that are left.
    reached = before[:, :ranks].copy()
    for entry in moves:
        assert before[entry["row"], entry["source_rank"]] == entry["source_slot"]
    reached[moves["row"]] = -1
    reached[moves["row"], moves["rank"]] = moves["slot"]
    assert (reached[known] == after[known]).all()


def assert_no_worse_for_more(found) -> None:
    worse = found.new_seconds > found.fresh_seconds * (1 + 1e-9)
    assert not worse or found.migration.link_bytes <= found.fresh_migration.link_bytes


def assert_right(old: Plan, found, profile: Profile) -> None:
    validate(found.plan)
    assert_exact(found.plan)
    assert_counted_right(old, found)
    assert_no_worse_for_more(found)
    cost = cost_row_by_row(found.plan, profile)
    for name in ("rank_seconds", "link_bytes", "memory_bytes"):
        assert np.allclose(getattr(found.plan.cost, name), getattr(cost, name), rtol=1e-9), name
    assert found.new_seconds <= found.old_seconds * (1 + 1e-9)


@at_least(20)
@given(seeds)
@examples(40)
def test_other_tables(seed):
    random = np.random.default_rng(seed)
    old = some_plan(seed)
    profile = counts_for(random, changed_tables(random, old.tables))
    found = replanned(old, profile, int(random.choice([1, 100, 10**6])))
    assert_right(old, found, profile)


@at_least(20)
@given(seeds)
@examples(40)
def test_other_ranks(seed):
    random = np.random.default_rng(seed)
    old = some_plan(seed)
    tables = changed_tables(random, old.tables) if random.random() < 0.3 else old.tables
    profile, topology = counts_for(random, tables), random_topology(random)
    horizon = int(random.choice([1, 100, 10**6]))
    found = replanned(old, profile, horizon, topology)
    assert found.plan.ranks == topology.ranks
    assert_right(old, found, profile)
    # Then it is a plan for that topology, which the same counts leave as it is.
    again = replan(found.plan, profile, horizon, topology=topology)
    assert again.carried_over is None
    assert len(again.moves.entries) == 0


def some_plan(seed: int) -> Plan:
    """A plan, or one that was made from it, with rows that are not where they were striped."""
    old, (_, newer) = planned(seed, 2)
    return replan(old, newer, 10**6).plan if seed % 2 else old


def replanned(
    old: Plan, profile: Profile, horizon: int, topology: Topology | None = None
) -> Replanned:
    """The plan. Examples are left out whose ranks cannot hold the tables."""
    try:
        return replan(old, profile, horizon, topology=topology)
    except (CapacityError, InfeasibleError):
        reject()


TABLES = (Table("a", 6000, dim=16), Table("b", 900, dim=8), Table("c", 40, dim=16))
GROWN = (replace(TABLES[0], rows=6600), *TABLES[1:])


def profile_of(tables, seed: int = 0) -> Profile:
    return counts_for(np.random.default_rng(seed), tables)


def plan_of(mode: str, topology: str = "cpu:4", fetch: str = "raw") -> Plan:
    workload = Workload(mode, fetch, 512)  # type: ignore[arg-type]
    ranks = Topology.load(topology)
    return make_plan(profile_of(TABLES), ranks, workload, PlanSettings(extra_memory=0.02))


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.parametrize("mode", ["training", "inference"])
def test_folders_pass_the_checker_from_change_to_change(tmp_path: Path, mode: str, fetch: str):
    plan_of(mode, "2x2-a100", fetch).save(tmp_path / "0")
    dropped = (GROWN[0], Table("new", 500, dim=24), GROWN[2])
    steps = [
        (GROWN, None),
        (GROWN, "2x4-a100"),
        (dropped, "2x3-a100"),
        (dropped, "cpu:2"),
        (TABLES[2:], None),
        (TABLES, "dgx-a100"),
    ]
    for n, (tables, topology) in enumerate(steps, start=1):
        before, profile = Plan.load(tmp_path / str(n - 1)), profile_of(tables, n)
        found = replan(tmp_path / str(n - 1), profile, 10_000, topology=topology)
        found.plan.save(tmp_path / str(n))
        assert [f for f in check(tmp_path / str(n)) if not f.ok] == []
        assert Plan.load(tmp_path / str(n)).tables == tables
        assert_right(before, found, profile)


def test_a_table_that_grew_moves_few_rows_and_more_ranks_share_all():
    old = plan_of("training")
    grown = replan(old, profile_of(GROWN), 10_000)
    assert grown.carried_over is not None
    assert grown.carried_over.tables.grown == ("a",)
    assert grown.migration.placed_rows == 600
    wider = replan(old, profile_of(TABLES), 10_000, topology="cpu:8")
    assert wider.carried_over is not None
    assert wider.carried_over.old_ranks == 4
    assert wider.new_seconds == pytest.approx(wider.fresh_seconds, rel=0.01)
    assert wider.migration.link_bytes < wider.fresh_migration.link_bytes


def test_more_extra_memory_is_used():
    old = plan_of("inference", "dgx-a100")
    found = replan(old, profile_of(TABLES), 10**6, extra_memory=0.5)
    assert found.plan.asked.extra_memory == 0.5
    assert found.plan.cost.extra_bytes > old.cost.extra_bytes
    assert found.new_seconds < found.old_seconds
    assert_counted_right(old, found)


def test_the_same_topology_is_no_change():
    old = plan_of("training")
    (same, other) = (
        replan(old, profile_of(TABLES, 1), 10_000, topology=t) for t in (None, "cpu:4")
    )
    assert other.carried_over is None
    assert (same.moves.entries == other.moves.entries).all()


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ((replace(TABLES[0], rows=5000),), "table 'a' has 5,000 .* and not fewer: .* `oper plan`"),
        ((replace(TABLES[0], dim=32),), "table 'a' .* of dim 32.* nothing else may change"),
        ((replace(TABLES[0], dtype="fp16"),), "table 'a' .* fp16"),
        ((Table("z", 9),), "table 'z' and all others of the profile are not in the plan"),
    ],
)
def test_rows_that_became_others_are_refused(tables, words: str):
    with pytest.raises(OperError, match=words):
        replan(plan_of("inference"), profile_of(tables))


@pytest.mark.parametrize("kind", ["hash", "vocab"])
def test_ids_that_number_rows_anew_do_not_grow(kind):
    table = replace(TABLES[0], ids=IdRule(kind))
    ranks, workload = Topology.load("cpu:2"), Workload("inference", "raw", 64)
    old = make_plan(profile_of((table,)), ranks, workload)
    with pytest.raises(OperError, match=f"with more rows {kind} ids number the old ones anew"):
        replan(old, profile_of((replace(table, rows=6600),)))


def test_ranks_that_cannot_hold_the_rows_are_refused():
    small = Topology.load("cpu:2").with_capacity("64kB")
    with pytest.raises(CapacityError):
        replan(plan_of("inference"), profile_of(TABLES), topology=small)


def test_plans_with_a_tier_are_refused_by_name():
    ranks = Topology.load("dgx-a100")
    workload, asked = Workload("training", "raw", 512), PlanSettings(0.05, tier=["b"])
    old = make_plan(profile_of(TABLES), ranks, workload, asked)
    with pytest.raises(OperError, match=r"tables b are in the hosts' memory.*`oper plan --tier`"):
        replan(old, profile_of(GROWN))


def test_the_command_says_what_changed_and_what_it_took(tmp_path: Path):
    plan_of("training").save(tmp_path / "old")
    profile_of(GROWN).save(tmp_path / "p")
    profile_of((replace(TABLES[0], rows=9), *TABLES[1:])).save(tmp_path / "shrank")
    old, p, new = (str(tmp_path / name) for name in ("old", "p", "new"))
    command = ["replan", old, p, "-o", new, "--topology", "cpu:8", "--extra-memory", "3%"]
    content = json.loads(fine(*command, "--json"))
    assert content["carried_over"]["grown_tables"] == ["a"]
    assert content["carried_over"]["old_ranks"] == 4
    assert content["placed_rows"] == 600
    assert content["placed_bytes"] >= 600 * TABLES[0].memory_bytes("training")
    assert np.array(content["bytes_by_link"]).shape == (8, 8)
    text = fine(*command, "--force")
    assert "1 table grew (a); 8 ranks instead of 4" in " ".join(text.split())
    assert "600 new rows" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    fewer = ["replan", new, p, "-o", str(tmp_path / "six"), "--topology", "cpu:6"]
    assert np.array(json.loads(fine(*fewer, "--json"))["bytes_by_link"]).shape == (6, 8)
    for wrong, words in (
        (["replan", old, str(tmp_path / "shrank"), "-o", new, "--force"], "and not fewer"),
        (["replan", old, p, "-o", new, "--force", "--topology", "nowhere"], "nowhere"),
        (["replan", old, p, "-o", new, "--force", "--extra-memory", "x"], "--extra-memory 'x'"),
    ):
        said = oper(*wrong)
        assert said.status == 2
        assert words in said.errors
