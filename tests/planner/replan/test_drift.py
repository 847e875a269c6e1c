"""Drift: what a plan costs under newer counts, whose fault it is, and when to plan again."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from hypothesis import given
from typer.testing import CliRunner

from oper.base.errors import OperError
from oper.cli import drift as cli
from oper.cli.drift_text import windows_verdict
from oper.cost.allreduce import allreduce_cost
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.planner.make_plan import make_plan
from oper.planner.price_plan import time_under
from oper.planner.replan.drift import Drift, WindowDrift, drift, drift_by_window
from oper.planner.replan.replan import replan
from oper.profiling.make_profile import profile
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.commands import fine, oper, write_log
from tests.support.examples import at_least, examples
from tests.support.planner.drifting import cost_row_by_row, make_profile, planned, seeds, slots_of
from tests.support.planner.instances import zipf_counts

pytestmark = pytest.mark.usefixtures("small_programmes")


def plan_and_newer(moved, mode="inference", seed=0, balance="time"):
    """A plan for two tables, and a profile in which `moved` of the first one's rows have taken
    other rows' counts."""
    random = np.random.default_rng(seed)
    tables = (Table("drifts", 6000), Table("stays", 6000))
    counts = [random.permutation(zipf_counts(6000, 120_000, 1.05)) for _ in tables]
    profile = make_profile(tables, counts)
    plan = assemble(
        make_placement(
            profile,
            Topology.load("2x4-a100"),
            Workload(mode, "raw", 65_536),
            PlanSettings(extra_memory=0.02, balance=balance),
        )
    )
    which = np.flatnonzero(random.random(6000) < moved)
    counts[0][which] = counts[0][random.permutation(which)]
    return plan, make_profile(tables, counts)


@at_least(8)
@given(seeds)
@examples(8)
def test_costs_are_those_of_single_rows_and_tables_add_up(seed):
    plan, (_, profile) = planned(seed)
    found = drift(plan, profile, 0.05)
    cost = cost_row_by_row(plan, profile)
    assert np.allclose(found.rank_seconds.now, cost.rank_seconds, rtol=1e-9)
    assert np.isclose(found.judgement.keep.transfer_seconds, cost.objective_seconds)
    assert found.rank_seconds.then.max() == plan.cost.objective_seconds
    parts = sum(table.slowest_rank_seconds for table in found.tables)
    latency = allreduce_cost(plan.topology, cost.allreduce_method).latency
    used = latency if cost.allreduce_method != "none" else 0.0
    assert np.isclose(parts + used, found.rank_seconds.now.max(), rtol=1e-9)
    assert np.isclose(
        sum(table.mean_seconds for table in found.tables) + used,
        found.rank_seconds.now.mean(),
        rtol=1e-9,
    )


@at_least(10)
@given(seeds)
@examples(10)
def test_the_hot_set_is_what_the_plan_lists_and_replicates(seed):
    plan, (_, profile) = planned(seed)
    found = drift(plan, profile, 0.05)
    accesses = profile.accesses.astype(np.int64)
    copied = (slots_of(plan) >= 0).sum(axis=1) > 1
    assert found.hot_set.replicated.rows == copied.sum()
    total = max(int(accesses.sum()), 1)
    assert np.isclose(found.hot_set.replicated.now, accesses[copied].sum() / total)
    hottest = np.sort(accesses)[::-1][: int(copied.sum())].sum()
    assert np.isclose(found.hot_set.replicated.hottest_now, hottest / total)
    for hot in (found.hot_set.listed, found.hot_set.replicated):
        assert 0 <= hot.now <= hot.hottest_now <= 1 + 1e-12
    assert found.hot_set.listed.rows == plan.layout.listed


def test_unchanged_counts_keep_the_plan():
    plan, profile = plan_and_newer(0.0)
    found = drift(plan, profile, 0.0001)
    assert found.judgement.keep.step_seconds == pytest.approx(found.made_step_seconds, rel=1e-6)
    assert np.allclose(found.rank_seconds.now, found.rank_seconds.then, rtol=1e-9)
    assert np.isclose(found.hot_set.listed.then, found.hot_set.listed.now)
    assert np.isclose(found.hot_set.replicated.then, found.hot_set.replicated.now)
    assert found.verdict == "keep"


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_verdict_is_by_the_threshold_and_names_the_table_that_drifted(mode):
    plan, profile = plan_and_newer(0.3, mode)
    found = drift(plan, profile, 0.001)
    assert found.verdict == "replan"
    assert found.judgement.worse > 0.001
    drifted, stayed = found.tables
    assert drifted.worse_seconds > 2 * abs(stayed.worse_seconds)
    best = found.judgement.best.step_seconds
    assert found.judgement.worse == found.judgement.keep.step_seconds / best - 1
    assert drift(plan, profile, found.judgement.worse + 1e-6).verdict == "keep"


def test_a_plan_that_balances_links_is_judged_by_its_step():
    plan, newer = plan_and_newer(0.3, balance="link")
    found = drift(plan, newer, 0.05).judgement
    step = time_under(plan, newer).step_seconds
    assert found.keep.step_seconds == pytest.approx(step, rel=1e-9)
    fresh = make_placement(newer, plan.topology, plan.workload, plan.asked)
    step_time = assemble(fresh).step_time
    assert step_time is not None
    assert found.fresh.step_seconds == pytest.approx(step_time.seconds, rel=1e-6)


def test_replanning_makes_a_plan_that_is_kept():
    plan, profile = plan_and_newer(0.3)
    again = drift(replan(plan, profile, 10_000).plan, profile, 0.01)
    assert again.verdict == "keep"
    assert again.judgement.keep.step_seconds == pytest.approx(again.made_step_seconds)


def test_what_is_printed_is_read_back_as_it_was():
    plan, profile = plan_and_newer(0.3)
    for found in (drift(plan, profile), drift_by_window(plan, [profile, profile])):
        printed = found.to_json()
        again = type(found).from_json(json.loads(json.dumps(printed, allow_nan=False)))
        assert again.to_json() == printed
        assert again.verdict == found.verdict


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("verdict", "replan"),
        ("judgement", {"candidates": []}),
        ("tables", [{}]),
        ("rank_seconds", {"now": [1.0]}),
    ],
)
def test_a_changed_field_is_an_error(field, value):
    plan, profile = plan_and_newer(0.0)
    printed = drift(plan, profile).to_json()
    printed[field] = value
    with pytest.raises(ValueError, match=field):
        Drift.from_json(printed)


def test_other_tables_are_refused():
    plan, _ = plan_and_newer(0.0)
    fewer = make_profile((Table("drifts", 6000),), [np.ones(6000)])
    with pytest.raises(OperError, match="1 tables, and the plan 2"):
        drift(plan, fewer, 0.05)
    longer = make_profile(
        (Table("drifts", 6001), Table("stays", 6000)), [np.ones(6001), np.ones(6000)]
    )
    with pytest.raises(OperError, match="'drifts' has 6,001 rows"):
        drift(plan, longer, 0.05)
    with pytest.raises(OperError, match="drift: plan: expected Plan or Path or str, got Profile"):
        drift(longer, longer)  # type: ignore[arg-type]
    with pytest.raises(OperError, match="threshold"):
        drift(plan, longer, "5%")  # type: ignore[arg-type]


def test_the_command_prints_one_object_or_tables(tmp_path: Path):
    plan, profile = plan_and_newer(0.3)
    plan.save(tmp_path / "plan")
    profile.save(tmp_path / "profile")
    app = typer.Typer()
    cli.register(app)
    arguments = [str(tmp_path / "plan"), str(tmp_path / "profile"), "--worse", "0.1%"]
    told = CliRunner().invoke(app, [*arguments, "--json"])
    content = json.loads(told.stdout)
    assert content["verdict"] == "replan"
    assert content["judgement"]["threshold"] == 0.001
    keep, again, fresh, *_ = content["judgement"]["candidates"]
    assert keep["transfer_seconds"] == max(content["rank_seconds"]["now"])
    assert max(again["step_seconds"], fresh["step_seconds"]) < keep["step_seconds"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0
    assert shown.stdout.startswith(("Replan: ", "Plan from scratch: "))
    assert "tolerates 0.1%. Moving" in " ".join(shown.stdout.split())
    lines = [line for line in shown.stdout.splitlines() if not line.startswith("Run")]
    assert max(map(len, lines)) <= 100  # commands are on one line, to be copied


def test_windows_are_priced_one_by_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan, newer = plan_and_newer(1.0)
    _, same = plan_and_newer(0.0)
    same.samples //= 2
    _, again = plan_and_newer(1.0)
    found = drift_by_window(plan, [same, newer, again], 0.05)
    content = found.to_json()
    # A plan from the window before the second would be no better there: what changed came with it.
    assert [window["verdict"] for window in content["windows"]] == ["keep", "keep", "replan"]
    assert content["verdict"] == "replan"
    second, third = (window.drift.judgement for window in found.windows[1:])
    assert third.keep == second.keep
    iterations = newer.samples / plan.workload.batch_size
    cost = iterations * (third.keep.step_seconds - third.best.step_seconds)
    assert content["windows"][2]["cost_seconds"] == pytest.approx(cost)
    assert cost > 0
    assert content["cost_seconds"] == pytest.approx(sum(w.cost_seconds for w in found.windows))
    best = sum(w.iterations * w.drift.judgement.best.step_seconds for w in found.windows)
    assert content["cost_share"] == pytest.approx(content["cost_seconds"] / best)

    for number, window in enumerate((same, newer)):
        window.save(tmp_path / f"p{number}")
    plan.save("q")
    assert oper("drift", "q", "p0", "--exit-code").status == 0
    assert oper("drift", "q", "p1").status == 0
    assert oper("drift", "q", "p1", "--exit-code").status == 1
    assert oper("drift", "q", "p1", "--exit-code", "--worse", "500%").status == 0


def test_a_line_for_each_window(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log.parquet", samples=27_000)
    fine("profile", "log.parquet", "-o", "w", "--columns", "C*", "--windows", 3)
    fine("plan", "w@0", "-o", "q", "--topology", "cpu:2", "--batch-size", 64)
    text = fine("drift", "q", "w", "--all-windows")
    rows = text.split("\n\n")[1].splitlines()[1:4]
    assert [line.split()[:2] for line in rows] == [[f"@{number}", "9,000"] for number in range(3)]
    assert text.startswith(("Keep q: in no window", "Replan: with q"))
    assert max(map(len, text.splitlines())) <= 100
    said = json.loads(fine("drift", "q", "w", "--all-windows", "--json"))
    assert [window["samples"] for window in said["windows"]] == [9000] * 3
    in_python = drift_by_window("q", "w")
    assert [window.samples for window in in_python.windows] == [9000] * 3
    assert in_python.cost_seconds == pytest.approx(said["cost_seconds"])
    judged = [window["judgement"] for window in said["windows"]]
    assert judged[0]["worse"] == pytest.approx(0, abs=1e-9)
    assert ("Not re-planning costs" in text) == any(each["worse"] > 0 for each in judged)
    # The plan has seen the first window; the others keep the counts of their first parts.
    assert [each["source"] for each in judged] == [None, *2 * ["later part of the newest data"]]
    onto_itself = oper("replan", "q", "w@1", "-o", "./q", "--force")
    assert onto_itself.status == 2
    assert "expected another folder than that of the old plan" in onto_itself.errors
    stale = oper("drift", "q", "w", "--all-windows", "--exit-code", "--worse", "0%")
    assert stale.status == any(each["worse"] > 0 for each in judged[1:])


def test_windows_without_a_loss_have_no_negative_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log.parquet", samples=18_000)
    windows = profile("log.parquet", columns="C*", windows=2)
    found = drift_by_window(make_plan(windows[0], "cpu:2", Workload("training", None, 64)), windows)
    steps = iter((1.0, 1.1, 1.2, 1.0, 1.05, 1.3))
    cases = []
    for window in found.windows:
        judgement = window.drift.judgement
        candidates = tuple(replace(c, step_seconds=next(steps)) for c in judgement.candidates[:3])
        judged = replace(window.drift, judgement=replace(judgement, candidates=candidates))
        cases.append(replace(window, drift=judged))
    said = windows_verdict(WindowDrift(tuple(cases)), "q", "w")
    assert said == "Keep q: in no window of w does another plan have a shorter step"


def test_windows_keep_few_files_open(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log.parquet", samples=900)
    fine("profile", "log.parquet", "-o", "w", "--columns", "C*", "--windows", 30)
    fine("plan", "w@0", "-o", "q", "--topology", "cpu:2", "--batch-size", 64)
    windows = Profile.load_windows("w")
    opened = len(os.listdir("/proc/self/fd"))
    drift_by_window("q", windows)
    assert len(os.listdir("/proc/self/fd")) < opened + 30


def test_windows_too_small_to_tell_are_named_and_left_out(tmp_path, monkeypatch):
    """The last two windows have a few samples each, by which any plan is far from a fresh one."""
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "log.parquet", samples=15_000)
    log = pq.read_table("log.parquet")
    step = np.minimum(np.arange(15_000) * 2, 30_000 - 8)
    step[-5:] = [30_000, 30_000, 40_000, 40_000, 40_001]
    pq.write_table(log.append_column("step", pa.array(step)), "log.parquet")
    columns = ("--columns", "C*", "--by-column", "step", "--every", "10000")
    fine("profile", "log.parquet", "-o", "w", *columns)
    fine("plan", "w@0", "-o", "q", "--topology", "cpu:2", "--batch-size", 64)
    said = json.loads(fine("drift", "q", "w", "--all-windows", "--json"))
    assert [window["too_small"] for window in said["windows"]] == [False] * 3 + [True] * 2
    assert said["windows"][3]["accesses"] == 4
    of_large = sum(window["cost_seconds"] for window in said["windows"][:3])
    assert said["cost_seconds"] == pytest.approx(of_large)
    found = WindowDrift.from_json(said)
    assert list(found.judged) == [0, 1, 2]
    # Windows between are judged by the last one before them that is large enough.
    text = fine("drift", "q", "w", "--all-windows")
    assert "Left out as too small: 2 windows (@3, @4)" in " ".join(text.split())
    assert text.count(" too small\n") == 2
    worst = max(window["judgement"]["worse"] for window in said["windows"][:3])
    loss = f"{100 * worst:.2f}% longer" if worst > 0 else "does another plan have a shorter step."
    assert loss in " ".join(text.split())
    # Of none that can tell there is nothing to say.
    fine("profile", "log.parquet", "-o", "small", *columns, "--rows", "14995:")
    text = fine("drift", "q", "small", "--all-windows", "--exit-code")
    assert "no window of small is large enough to tell" in " ".join(text.split())
    said = oper("drift", "q", "w@4")
    assert said.out.startswith("Keep q: w@4 has fewer than 4,096 accesses a rank")
    assert said.errors == ""
    assert oper("drift", "q", "w@2").errors == ""
