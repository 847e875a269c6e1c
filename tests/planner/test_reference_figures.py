"""Reference figures of a plan: its cost on later data, and the costs of simple plans.

Costs are compared with those of single rows (tests/support/planner/drifting.py).
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oper.plan.plan import Plan
from oper.plan.reference_figures import HeldOutSource, SimpleMethod
from oper.planner.compare import compare
from oper.planner.make_plan import make_plan
from oper.planner.price_plan import time_under
from oper.planner.problem.problem import make_problem
from oper.planner.reference_figures import with_reference_figures
from oper.planner.replan.drift import drift
from oper.profiling.profile import Profile, with_held_out
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
    assert drift(plan, with_held_out(first, later)).judgement.source is None


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
    same = time_under(plan, later, as_counted=True).transfer_seconds
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
    unseen = "samples that no plan was made from"
    assert "last part of the log (12,000 samples): " in one_line("plan", "p", "-o", "q", *MAKE)
    assert "last part of the log (12,000 samples): " in one_line("plan", "show", "q")
    assert missing in one_line("plan", "w@3", "-o", "last", *MAKE)
    assert "the next window (10,000 samples): " in one_line("plan", "w@0", "-o", "first", *MAKE)
    methods = ("--methods", "oper,row_wise,access_greedy")
    told = one_line("compare", "p", *MAKE, *methods)
    assert measured in told
    assert "held out" in told
    assert missing in one_line("compare", "w@3", *MAKE, *methods)
    # The next window is not known when re-planning is judged: the newest one is split.
    for number in (2, 3):
        told = one_line("replan", "first", f"w@{number}", "-o", f"r{number}")
        assert f"Judged on 3,334 {unseen}" in told
        assert f"on the later part of w@{number} a step takes" in told
    assert f"Judged on 3,334 {unseen}" in one_line("drift", "first", "w@3")
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
