"""Reference figures of a plan: its cost on later data, and the costs of simple plans.

Costs are compared with those of single rows (tests/support/planner/drifting.py).
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from oper.plan.plan import Plan
from oper.plan.reference_figures import HeldOutSource, SimpleMethod
from oper.planner.compare import compare
from oper.planner.make_plan import make_plan
from oper.planner.problem.problem import make_problem
from oper.planner.reference_figures import with_reference_figures
from oper.planner.replan.drift import drift, drift_by_window
from oper.planner.replan.replan import replan
from oper.profiling.profile import Profile, in_order, with_held_out
from tests.support.commands import fine, write_log
from tests.support.examples import at_least, examples
from tests.support.planner.drifting import cost_row_by_row, planned, seeds

pytestmark = pytest.mark.usefixtures("small_programmes")

Capture = pytest.CaptureFixture[str]


@at_least(8)
@given(seeds)
@examples(12)
def test_the_held_out_cost_is_that_of_single_rows_under_later_counts(seed: int) -> None:
    plan, (first, later) = planned(seed)
    found = with_reference_figures(plan, with_held_out(first, later))
    assert found.held_out is not None
    assert found.held_out.source == HeldOutSource.LAST_PART
    assert found.held_out.samples == later.samples
    row_by_row = cost_row_by_row(plan, later, True).objective_seconds
    assert np.isclose(found.held_out.objective_seconds, row_by_row, rtol=1e-9)
    assert found.held_out.lower_bound_seconds <= row_by_row * (1 + 1e-9)
    assert with_reference_figures(plan, first).held_out is None


@given(st.just(11))
@examples(1)
def test_data_that_read_no_row_judge_nothing(seed: int) -> None:
    plan, (first, later) = planned(seed)
    later.accesses, later.samples_with_row = 0 * later.accesses, 0 * later.samples_with_row
    assert with_reference_figures(plan, with_held_out(first, later)).held_out is None
    assert drift(plan, with_held_out(first, later)).unseen is None


@at_least(5)
@given(seeds)
@examples(6)
@example(180)  # Ranks that are nearly alike
def test_simple_plans_are_those_of_the_comparison(seed: int) -> None:
    plan, (first, later) = planned(seed)
    assert plan.limits is not None
    asked = replace(plan.asked, extra_memory=plan.limits.extra_memory)
    profile = with_held_out(first, later)
    plan = make_plan(profile, plan.topology, plan.workload, asked)
    found = with_reference_figures(plan, profile)
    methods = ["oper", "table_wise", "row_wise"]
    run = compare(profile, plan.topology, plan.workload, asked, methods)
    assert [each.method for each in found.simple_plans] == list(SimpleMethod)
    for each in found.simple_plans:
        same = run.methods[each.method]
        assert same.cost is not None
        assert each.objective_seconds == same.cost.objective_seconds
        assert each.fits == same.cost.feasible
        assert each.memory_factor == same.capacity_factor
        assert each.held_out_seconds == same.held_out_seconds
    assert run.held_out is not None
    assert found.held_out is not None
    ours = run.methods["oper"].held_out_seconds
    assert ours is not None
    # The comparison's plan is this one: it was made from the same counts within the same limits.
    assert np.isclose(ours, found.held_out.objective_seconds, rtol=1e-9)


@at_least(5)
@given(seeds)
@examples(6)
def test_replanning_is_judged_on_the_data_that_follow(seed: int) -> None:
    plan, (_, now, later) = planned(seed, 3)
    made = replan(plan, with_held_out(now, later), 1000)
    found = made.held_out
    assert found is not None
    assert made.plan.held_out is not None
    assert np.isclose(found.old_seconds, cost_row_by_row(plan, later, True).objective_seconds)
    assert np.isclose(found.new_seconds, cost_row_by_row(made.plan, later, True).objective_seconds)
    assert found.new_seconds == made.plan.held_out.objective_seconds
    assert replan(plan, now, 1000).held_out is None


@at_least(2)
@given(seeds)
@examples(3)
def test_drift_is_judged_by_a_plan_from_the_window_before(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:  # as if these small windows could tell
        patch.setattr("oper.planner.enough_accesses.ENOUGH_ACCESSES", 0)
        _compare_with_single_windows(seed)


def _compare_with_single_windows(seed: int) -> None:
    plan, windows = planned(seed, 3)
    assume(plan.profile not in {window.digest for window in windows[1:]})  # nothing drifted
    in_order(windows)
    found = drift_by_window(plan, windows, 0.05)
    first, second, third = (window.drift for window in found.windows)
    assert first.unseen is None
    assert first.judged_worse == first.worse
    assert second.unseen is not None
    assert third.unseen is not None
    # From scratch for the first window is the plan itself, made anew: nothing is gained by it.
    anew = cost_row_by_row(plan, windows[1], True).objective_seconds
    assert np.isclose(second.unseen.now_seconds, anew)
    alone = drift(plan, windows[2], 0.05)
    assert alone.unseen is not None
    assert alone.unseen == third.unseen
    assert alone.unseen.source == HeldOutSource.THIS_WINDOW
    assert third.judged_worse == third.unseen.worse
    lost = [w.drift.judged_seconds.now - w.drift.judged_seconds.fresh for w in found.windows]
    iterations = [window.iterations for window in found.windows]
    assert found.cost_seconds == pytest.approx(np.dot(iterations, lost))


@given(st.just(11))
@examples(1)
def test_a_plan_from_too_small_a_window_judges_nothing(seed: int) -> None:
    plan, windows = planned(seed, 3)
    in_order(windows)
    small = windows[1]
    small.accesses = np.minimum(small.accesses, 1)
    small.samples_with_row = np.minimum(small.samples_with_row, 1)
    with pytest.MonkeyPatch.context() as patch:
        enough = int(windows[0].accesses_of_tables.sum()) // plan.ranks
        patch.setattr("oper.planner.enough_accesses.ENOUGH_ACCESSES", enough)
        alone = drift(plan, windows[2], 0.05)
        together = drift_by_window(plan, windows, 0.05)
    assert together.windows[1].too_small
    assert not together.windows[0].too_small
    assert alone.unseen == together.windows[2].drift.unseen
    from_first = drift(plan, replace(windows[2], open_preceding=lambda: windows[0]), 0.05)
    assert alone.unseen == from_first.unseen


@given(st.just(11))
@examples(1)
def test_a_plan_is_not_judged_on_the_window_it_was_made_from(seed: int) -> None:
    plan, windows = planned(seed, 3)
    in_order(windows)
    made_from_second = replace(plan, profile=windows[1].digest)
    found = drift(made_from_second, windows[1], 0.05).unseen
    assert found is not None
    assert found.source == HeldOutSource.NEXT_WINDOW
    _, (_, second, third) = planned(seed, 3)
    later = drift(plan, with_held_out(second, third), 0.05).unseen
    assert later is not None
    assert later.source == HeldOutSource.LAST_PART
    alone = drift_by_window(plan, [with_held_out(second, third)], 0.05)
    assert alone.windows[0].drift.unseen == later
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oper.planner.enough_accesses.ENOUGH_ACCESSES", 1 << 40)
        assert drift(plan, with_held_out(second, third), 0.05).unseen is None  # it is too small
    seen = drift(replace(plan, profile=windows[2].digest), windows[2], 0.05)
    assert seen.unseen is None


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_log(Path("log.parquet"), samples=40_000)
    fine("profile", "log.parquet", "-o", "p", "--columns", "C*", "--hold-out", "30%")
    fine("profile", "log.parquet", "-o", "w", "--columns", "C*", "--windows", "4")
    return tmp_path


MAKE = ("--topology", "2x2-a100", "--batch-size", "256", "--extra-memory", "5%")


@pytest.mark.parametrize("tier", [(), ("--tier", "C1"), ("--tier", "all")])
def test_plans_in_two_memories_have_these_figures_too(held: Path, tier: tuple[str, ...]) -> None:
    made = json.loads(fine("plan", "p", "-o", "q", *MAKE, *tier, "--json"))
    plan, later = Plan.load("q"), Profile.load("p").following
    assert later is not None
    assert plan.held_out is not None
    same = drift(plan, later).objective_seconds.now  # priced where the rows are, under later counts
    assert plan.held_out.objective_seconds == pytest.approx(same)
    assert made["held_out"]["objective_seconds"] == plan.held_out.objective_seconds
    assert plan.held_out.lower_bound_seconds <= same * (1 + 1e-9)
    assert [each.method for each in plan.simple_plans] == ["table_wise", "row_wise"]
    for each in plan.simple_plans:
        assert each.held_out_seconds is not None
        assert each.held_out_seconds > 0
        assert each.held_out_step_seconds is not None
        assert each.held_out_step_seconds > 0
    again = json.loads(fine("plan", "show", "q", "--json"))
    with_profile = json.loads(fine("plan", "show", "q", "--profile", "p", "--json"))
    assert (with_profile["held_out"], with_profile["simple_plans"]) == (
        made["held_out"],
        made["simple_plans"],
    )
    assert all(each["step_seconds"] > 0 for each in made["simple_plans"])
    assert (again["held_out"], again["simple_plans"]) == (made["held_out"], made["simple_plans"])


def test_the_commands_say_it_or_that_it_was_not_measured(held: Path) -> None:
    def one_line(*arguments: object) -> str:
        return " ".join(fine(*arguments).split())

    measured = "On the held-out last part of the log (12,000 samples)"
    missing = "ot measured on data the plan has not seen"
    assert "last part of the log (12,000 samples): " in one_line("plan", "p", "-o", "q", *MAKE)
    assert "last part of the log (12,000 samples): " in one_line("plan", "show", "q")
    assert missing in one_line("plan", "w@3", "-o", "last", *MAKE)
    assert "the next window (10,000 samples): " in one_line("plan", "w@0", "-o", "first", *MAKE)
    methods = ("--methods", "oper,row_wise,access_greedy")
    told = one_line("compare", "p", *MAKE, *methods)
    assert measured in told
    assert "held out" in told
    assert missing in one_line("compare", "w@3", *MAKE, *methods)
    assert "On the next window (10,000 samples)" in one_line("replan", "first", "w@2", "-o", "r2")
    assert missing in one_line("replan", "first", "w@3", "-o", "r3")
    judged = "with a plan made from scratch for the window before"
    assert judged in one_line("drift", "first", "w@3")
    assert missing in one_line("drift", "last", "w@3")
    assert "held out" in Path(_report("q")).read_text("utf-8")


def _report(plan: str) -> str:
    fine("report", plan, "-o", f"{plan}.html")
    return f"{plan}.html"


def test_rows_of_classes_are_not_priced_on_later_data(held: Path) -> None:
    run = json.loads(fine("compare", "p", *MAKE, "--methods", "oper,access_greedy", "--json"))
    methods = run["runs"][0]["methods"]
    assert methods["access_greedy"]["held_out_seconds"] is None
    assert methods["oper"]["held_out_seconds"] > 0


def test_a_plan_in_memory_has_them(held: Path) -> None:
    from oper.cost.workload import Workload

    profile = Profile.load("p")
    plan = make_plan(profile, "cpu:2", Workload("inference", "raw", 64))
    assert plan.held_out is not None
    assert len(plan.simple_plans) == 2
    assert profile.following is not None
    problem = make_problem(profile.following, plan.topology, plan.workload, plan.asked, plan.limits)
    assert problem.classes.samples == 12_000
