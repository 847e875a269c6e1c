"""Replan: exact placements, complete moves, true costs, and no moves that do not pay."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from oper.base.arrays import as_int64
from oper.base.errors import OperError
from oper.checker.check import check
from oper.cli import replan as cli
from oper.cost.workload import Workload
from oper.plan.address_map import AddressMap
from oper.plan.plan import Plan
from oper.plan.row_locator import RowLocator
from oper.plan.row_moves import ENTRY, RowMoves
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.planner.make_plan import make_plan
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.classes import classify
from oper.planner.replan.migration.flows import net_flows
from oper.planner.replan.migration.migration_cost import MigrationCost
from oper.planner.replan.replan import replan
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.topology import Topology
from tests.support.examples import at_least, examples
from tests.support.planner.drifting import (
    assert_exact,
    cost_row_by_row,
    drifted,
    make_profile,
    moved_by,
    planned,
    seeds,
    slots_of,
    sources_of,
)
from tests.support.planner.instances import zipf_counts

pytestmark = pytest.mark.usefixtures("small_programmes")

TOPOLOGIES = ("dgx-a100", "2x4-a100")
MODES = ("training", "inference")


def plan_for(profile, topology="2x4-a100", mode="inference", extra=0.02, batch_size=512):
    workload, asked = Workload(mode, "raw", batch_size), PlanSettings(extra_memory=extra)
    return assemble(make_placement(profile, Topology.load(topology), workload, asked))


@at_least(12)
@given(seeds, st.sampled_from([1, 100, 10**6]))
@examples(12)
def test_replans_are_exact_cost_what_they_say_and_pay(seed, horizon):
    plan, profiles = planned(seed, 3)
    for profile in profiles[1:]:
        found = replan(plan, profile, horizon)
        assert_exact(found.plan)
        assert_moves_are_complete(plan, found)
        assert_figures_are_true(plan, found, profile)
        if len(found.moves.entries):
            gained = (found.old_seconds - found.new_seconds) * horizon
            copied = found.migration.bytes_by_link  # between slots of a rank on the diagonal
            assert gained > (copied * plan.topology.link_cost).sum() / plan.ranks
        else:
            assert found.new_seconds == found.old_seconds
        plan = found.plan


@pytest.mark.parametrize("seed", [80, 82])
def test_copies_between_slots_of_a_rank_count_against_the_gain(seed):
    # What the moves gain is more than the copies over links cost, and less than all copies do.
    plan, (_, newer) = planned(seed)
    found = replan(plan, newer, 1)
    gained = (found.old_seconds - found.new_seconds) * found.horizon
    assert not len(found.moves.entries) or gained > found.migration.seconds(plan.topology)


def assert_moves_are_complete(plan, found):
    """The moves lead from the old slots to the new ones; rows that are not in them are read, by
    all ranks, as they were."""
    before, after = slots_of(plan), slots_of(found.plan)
    assert (moved_by(found.moves, before) == after).all()
    still = np.ones(len(before), dtype=bool)
    still[found.moves.entries["row"]] = False
    assert (before[still] == after[still]).all()
    assert (sources_of(plan)[still] == sources_of(found.plan)[still]).all()


def assert_figures_are_true(plan, found, profile):
    """The figures are those of the placement priced row by row."""
    cost = cost_row_by_row(found.plan, profile)
    for name in ("rank_seconds", "link_bytes", "memory_bytes", "lookups", "lookup_seconds"):
        assert np.allclose(
            getattr(found.plan.cost, name), getattr(cost, name), rtol=1e-9, atol=1e-30
        ), name
    assert np.isclose(found.old_seconds, cost_row_by_row(plan, profile).objective_seconds)
    holders = (slots_of(found.plan) >= 0).sum(axis=1)
    accesses = profile.accesses.astype(np.int64)
    assert found.plan.replica_accesses == accesses[holders > 1].sum()
    assert found.plan.owner_accesses.sum() == accesses[holders == 1].sum()


@at_least(6)
@given(seeds)
@examples(6)
def test_unchanged_counts_move_nothing(seed):
    plan, (profile,) = planned(seed, 1)
    found = replan(plan, profile, 10**9)
    assert len(found.moves.entries) == 0
    assert found.plan.layout is plan.layout
    assert np.isclose(found.new_seconds, plan.cost.objective_seconds, rtol=1e-9)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("capacity", [None, "2"])
def test_copies_are_kept_if_memory_is_free(topology, capacity):
    """In inference, whatever rows later counts leave unread."""
    cold = np.where(np.arange(600) < 300, zipf_counts(600, 40_000, 1.1), 0)
    table = (Table("t", 600, dim=16),)
    first, later = make_profile(table, [cold]), make_profile(table, [np.roll(cold, 150)])
    ranks = Topology.load(topology)
    ranks = ranks if capacity is None else ranks.with_capacity(capacity)
    plan = make_plan(first, ranks, Workload("inference", None, 4096))
    again = replan(plan, later).plan
    used, kept = plan.cost.extra_memory_ratio, again.cost.extra_memory_ratio
    assert used == 7 if capacity is None else used > 0.9
    assert kept == pytest.approx(used, rel=0.02)
    assert again.limits == plan.limits


def test_a_longer_horizon_moves_more_and_gains_more():
    first, second = drifted()
    plan = plan_for(first)
    short, long = (replan(plan, second, horizon) for horizon in (1, 10**6))
    assert 0 < short.migration.link_bytes < long.migration.link_bytes
    assert long.new_seconds < short.new_seconds < short.old_seconds


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_most_of_the_gain_for_few_of_the_bytes(mode, topology):
    first, second = drifted()
    found = replan(plan_for(first, topology, mode), second, 10_000)
    assert found.old_seconds > 1.001 * found.fresh_seconds
    assert found.gain_share is not None
    assert found.gain_share >= 0.9
    assert found.bytes_share is not None
    assert found.bytes_share <= 0.5


def random_links(ranks=4, seed=1):
    """One node, whose links take one to four times as long as the fastest."""
    cost = np.random.default_rng(seed).uniform(1, 4, (ranks, ranks)) / 80e9
    np.fill_diagonal(cost, 1 / 1_244e9)
    return Topology("random", (0,) * ranks, cost, 72e9, Latency.of_hops(2e-7))


@pytest.mark.parametrize("balance", ["time", "link"])
@pytest.mark.parametrize("mode", MODES)
def test_most_of_the_gain_on_unequal_links(mode, balance):
    """In what the plan makes small: the slowest rank, or the slowest link."""
    first, second = drifted(rows=(3000, 400, 1))
    workload, asked = Workload(mode, "raw", 512), PlanSettings(0.02, balance=balance)
    plan = assemble(make_placement(first, random_links(), workload, asked))
    found = replan(plan, second, 10_000)
    assert_exact(found.plan)
    assert_moves_are_complete(plan, found)
    assert_figures_are_true(plan, found, second)
    aimed = "link_seconds" if balance == "link" else "rank_seconds"
    assert found.aimed.new == getattr(found.plan.cost, aimed).max()
    assert found.aimed.fresh == getattr(found.fresh.cost, aimed).max()
    assert found.gain_share is not None
    assert found.gain_share >= 0.93
    assert found.bytes_share is not None
    assert found.bytes_share <= 0.5


@pytest.mark.parametrize("mode", MODES)
def test_even_links_stay_even_between_equal_nodes(mode):
    first, second = drifted()
    workload, asked = Workload(mode, "raw", 512), PlanSettings(0.02, balance="link")
    plan = assemble(make_placement(first, Topology.load("2x4-a100"), workload, asked))
    found = replan(plan, second, 10_000)
    assert found.gain_share is not None
    assert found.gain_share >= 0.9
    assert found.bytes_share is not None
    assert found.bytes_share <= 0.5


def test_two_widths_that_drift_keep_arenas_dense_and_most_of_the_gain():
    first, second = drifted(rows=(9000, 9000, 300), dims=(16, 64, 64), moved=0.3)
    found = replan(plan_for(first), second, 10_000)
    assert_exact(found.plan)
    assert found.gain_share is not None
    assert found.gain_share >= 0.9


@pytest.mark.parametrize("mode", MODES)
def test_replicas_that_no_longer_pay_or_newly_do_resize_all_arenas(mode):
    """From flat counts to steep ones and back: from no replicas to many, and to few."""
    tables = (Table("a", 800, dim=16), Table("b", 300, dim=32))
    steep = [np.random.default_rng(0).permutation(zipf_counts(n, 90 * n, 1.2)) for n in (800, 300)]
    flat = [np.full(n, 2) for n in (800, 300)]
    profiles = [make_profile(tables, counts) for counts in (flat, steep, flat)]
    plan = plan_for(profiles[0], "2x4-a100", mode, 0.2, 1 << 16)
    copies = []
    for profile in profiles[1:]:
        before = slots_of(plan)
        found = replan(plan, profile, 10**7)
        assert_exact(found.plan)
        assert (moved_by(found.moves, before) == slots_of(found.plan)).all()
        plan = found.plan
        copies.append(int(((slots_of(plan) >= 0).sum(axis=1) - 1).sum()))
    assert copies[0] > 0
    if mode == "training":
        assert copies[1] < copies[0]


@pytest.mark.parametrize("mode", MODES)
def test_folders_of_replanned_plans_pass_all_checks(tmp_path: Path, mode):
    profiles = drifted(windows=3, rows=(9000, 6000, 1), dims=(16, 8, 16))
    workload = Workload(mode, "distinct", 512)
    make_plan(
        profiles[0], Topology.load("2x2-a100"), workload, PlanSettings(extra_memory=0.02)
    ).save(tmp_path / "0")
    for step, profile in enumerate(profiles[1:], start=1):
        made = replan(tmp_path / str(step - 1), profile, 10_000)
        made.plan.save(tmp_path / str(step))
        assert made.plan.record is not None
        assert made.plan.record.replan is not None
        marker = (tmp_path / str(step - 1) / "plan.json").read_bytes()
        assert made.plan.record.replan.old_plan == hashlib.sha256(marker).hexdigest()
        assert [f for f in check(tmp_path / str(step)) if not f.ok] == []
    plan, moves = Plan.load(tmp_path / "2"), RowMoves.load(tmp_path / "2")
    assert len(moves.entries)
    before = slots_of(Plan.load(tmp_path / "1"))
    assert (moved_by(moves, before) == slots_of(plan)).all()
    for rank in range(plan.ranks):
        compact = AddressMap.load(tmp_path / "2", rank)
        for t, table in enumerate(plan.tables):
            ids = np.arange(table.rows)
            addresses = compact.translate(t, as_int64(ids)).numpy()
            assert (addresses == plan.layout.addresses(t, ids, rank)).all()
    with pytest.raises(OperError, match="only plans made by `oper replan`"):
        RowMoves.load(tmp_path / "0")


def test_the_same_input_gives_the_same_bytes(tmp_path: Path):
    first, second = drifted()
    plan_for(first).save(tmp_path / "old")
    for name in ("a", "b"):
        replan(tmp_path / "old", second, 10_000).plan.save(tmp_path / name)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name


@at_least(8)
@given(seeds)
@examples(8)
def test_counts_by_holder_set_are_those_of_single_rows(seed):
    plan, (profile,) = planned(seed, 1)
    classes = classify(profile, plan.workload, plan.ranks)
    locator = RowLocator(plan)
    finder = ClassFinder(profile, classes)
    counts = locator.by_holder_set(locator.count(finder))
    assert (counts.sum(axis=1) == classes.rows).all()
    holders = slots_of(plan) >= 0
    for k, holds in enumerate(locator.holder_sets.holds):
        mine = (holders == holds).all(axis=1)
        assert counts[:, k].sum() == mine.sum()
        assert counts[:, k] @ classes.accesses == profile.accesses[mine].sum(dtype=np.int64)


def test_net_flows_keep_rows_and_take_cheap_ways_first():
    cost = MigrationCost(np.zeros((3, 2), np.int64), np.array([[0, 5, 9], [5, 0, 9], [0, 0, 0.0]]))
    old, new = np.array([[4, 2, 0], [1, 0, 3]]), np.array([[1, 4, 1], [2, 1, 1]])
    flows = net_flows(old, new, cost)
    moved = dict(
        zip(
            zip(flows.row_class.tolist(), flows.before.tolist(), flows.after.tolist(), strict=True),
            flows.rows.tolist(),
            strict=True,
        )
    )
    assert moved == {(0, 0, 1): 2, (0, 0, 2): 1, (1, 2, 0): 1, (1, 2, 1): 1}


def test_other_tables_and_horizons_are_refused():
    first, second = drifted()
    plan = plan_for(first)
    other = make_profile((Table("other", 5),), [np.ones(5)])
    with pytest.raises(OperError, match="table 'other'"):
        replan(plan, other, 10)
    for horizon in (0, 10**12 + 1):
        said = f"horizon: expected 1 to 1,000,000,000,000 iterations, got {horizon:,}"
        with pytest.raises(OperError, match=said):
            replan(plan, second, horizon)
    with pytest.raises(OperError, match=r"horizon: expected a whole number, got '1\.5'"):
        replan(plan, second, 1.5)  # type: ignore[arg-type]
    with pytest.raises(OperError, match="replan: plan: expected Plan or Path or str, got Profile"):
        replan(first, second)
    with pytest.raises(
        OperError, match="replan: profile: expected Profile or Path or str, got Plan"
    ):
        replan(plan, plan)


def test_moves_of_another_kind_are_refused(tmp_path: Path):
    np.save(tmp_path / "moves.npy", np.zeros(3))
    with pytest.raises(OperError, match="instead of moves"):
        RowMoves.load(tmp_path)
    assert RowMoves.none().entries.dtype == ENTRY


@pytest.fixture
def app():
    made = typer.Typer()
    cli.register(made)
    return made


def test_the_command_prints_one_object_or_a_table(tmp_path: Path, app):
    first, second = drifted()
    plan_for(first).save(tmp_path / "old")
    second.save(tmp_path / "profile")
    arguments = [str(tmp_path / "old"), str(tmp_path / "profile"), "-o", str(tmp_path / "new")]
    told = CliRunner().invoke(app, [*arguments, "--json"])
    content = json.loads(told.stdout)
    assert content["transfer_seconds"]["new"] < content["transfer_seconds"]["old"]
    keep, again, *_ = content["judgement"]["candidates"]
    assert again["step_seconds"] == content["step_seconds"] < keep["step_seconds"]
    assert content["moved_bytes"] < content["fresh"]["moved_bytes"]
    moves = RowMoves.load(tmp_path / "new")
    matrix = np.array(content["bytes_by_link"])
    assert (matrix == moves.bytes_by_link(8)).all()
    assert content["moved_bytes"] == matrix.sum() - np.trace(matrix)
    assert content["moved_rows"] == moves.travelling_rows
    shown = CliRunner().invoke(app, [*arguments, "--force"])
    assert shown.exit_code == 0
    assert "as it was" in shown.stdout
    assert max(len(line) for line in shown.stdout.splitlines()) <= 100


def test_sessions_of_a_shop_gain_nearly_all_for_few_bytes(shared_data: Path, tmp_path: Path):
    """The real log with the strongest drift: the window most like next week's."""
    log = np.load(shared_data / "sessions5" / "yoochoose1_64.npz", allow_pickle=False)
    items, lengths = log["item"], log["lengths"]
    rows = int(items.max()) + 1
    windows = []
    for part in (slice(0, len(lengths) // 4), slice(3 * len(lengths) // 4, len(lengths))):
        of_sample = np.repeat(np.arange(len(lengths)), lengths)
        start, stop, _ = part.indices(len(lengths))
        mine = (of_sample >= start) & (of_sample < stop)
        windows.append(
            make_profile((Table("item", rows),), [np.bincount(items[mine], minlength=rows)])
        )
    for mode in MODES:
        found = replan(plan_for(windows[0], "2x4-a100", mode), windows[1], 10_000)
        assert found.gain_share is not None
        assert found.gain_share >= 0.9
        assert found.bytes_share is not None
        assert found.bytes_share <= 0.5
