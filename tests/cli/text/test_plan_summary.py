"""Output of `oper plan`: at most 15 lines, one predicted time, and commands that run."""

import json
import math
import re
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.analysis.plan_facts import PlanFigures
from oper.base.formatting import format_duration
from oper.cli.plan_commands.plan_summary import summary
from oper.plan.plan import Plan
from oper.plan.reference_figures import HeldOut, HeldOutSource, SimpleMethod, SimplePlan
from tests.support.commands import fine, oper

MOST_LINES = 15

OPTIONS = {
    "links": "--topology 2x2-a100",
    "one rank": "--topology cpu:1",
    "shared memory": "--topology cpu:3 --mode inference",
    "no copies": "--topology 1x2-a100 --extra-memory 0",
    "tables that do not fit": "--topology 2x2-a100 --capacity 1.05",
    "pooled": "--topology 2x2-a100 --fetch pooled",
    "some tables pooled": "--topology 2x2-a100 --fetch auto",
    "one table in the tier": "--topology 2x2-a100 --tier C1",
    "all tables in the tier": "--topology 2x2-a100 --tier all",
    "many ranks": "--topology 8x8-h100 --mode inference",
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("profile", ["p", "w@0"])
def test_a_plan_takes_at_most_15_lines(here: Path, options: str, profile: str) -> None:
    said = oper("plan", profile, "-o", "some folder/made", *options.split())
    assert said.status == 0, said
    lines = said.out.splitlines()
    assert len(lines) <= MOST_LINES, said.out
    assert max(map(len, lines[:-3])) <= 100  # commands are on one line, to be copied
    labels = [line[:16].strip() for line in lines]
    use = "serve with it" if "inference" in options else "train with it"
    for label in ("certificate", "held out", "memory", "explain it", use):
        assert label in labels
    assert ("cache=oper.CacheSettings" in lines[-1]) == ("--tier" in options)
    content = json.loads(fine("plan", "show", "some folder/made", "--json"))
    assert "predicted step" in labels
    assert content["step_time"]["seconds"] > 0
    # The only other time is that of the transfers, which is said once.
    assert len(re.findall(r"transfer time [\d.]+ [mµn]?s\b", said.out)) == 1
    assert "iteration" not in said.out


def test_the_commands_that_follow_a_plan_run(here: Path) -> None:
    lines = fine(*shlex.split("plan w@1 --topology cpu:2 -o 'my plan'")).splitlines()
    after = {line[:16].strip(): line[16:] for line in lines}
    for label in ("explain it", "see each rank"):
        fine(*shlex.split(after[label])[1:])
    assert Path("my plan.html").exists()
    assert after["train with it"] == "model = oper.shard(model, oper.Plan.load('my plan'))"


@pytest.fixture
def planned(here: Path) -> Plan:
    fine("plan", "p", "-o", "made", "--topology", "2x2-a100", "--mode", "inference")
    return Plan.load("made")


def told(figures: PlanFigures) -> dict[str, str]:
    return dict(summary(figures))


def test_steps_of_simple_plans_are_compared(planned: Plan) -> None:
    assert planned.step_time is not None
    step = planned.step_time.seconds
    simple = (
        SimplePlan(SimpleMethod.TABLE_WISE, 3 * step, 1.0, 1.0, fits=True),
        SimplePlan(SimpleMethod.ROW_WISE, 0.8 * step, 1.0, 1.0, fits=True),
    )
    said = told(PlanFigures.of(replace(planned, simple_plans=simple)))
    assert said["compared"] == "table-wise takes 3.00 times as long, row-wise 0.80 times"
    assert "compared" not in told(PlanFigures.of(replace(planned, step_time=None)))


@pytest.mark.parametrize("mode", ["training", "inference"])
def test_the_step_of_a_simple_plan_is_that_of_an_equal_plan(here: Path, mode: str) -> None:
    """Equal slices are the best plan without copies if all rows are read equally often."""
    pq.write_table(pa.table({"C1": np.arange(640) % 64, "C2": np.arange(640) % 32}), "even.parquet")
    fine("profile", "even.parquet", "-o", "even")
    options = f"--topology 1x2-a100 --mode {mode} --extra-memory 0 --batch-size 64 --json"
    content = json.loads(fine("plan", "even", "-o", "made", *options.split()))
    (row_wise,) = (s for s in content["simple_plans"] if s["method"] == "row_wise")
    assert row_wise["step_seconds"] == pytest.approx(content["step_time"]["seconds"], rel=1e-9)


def test_plans_that_do_not_fit_are_named(planned: Plan) -> None:
    assert planned.step_time is not None
    step = planned.step_time.seconds
    simple = (
        SimplePlan(SimpleMethod.TABLE_WISE, 1.0, 1.0, 2.38, fits=False),
        SimplePlan(SimpleMethod.ROW_WISE, 1.4 * step, 1.0, 1.0, fits=True),
    )
    said = told(PlanFigures.of(replace(planned, simple_plans=simple)))["compared"]
    assert said.startswith(
        "row-wise takes 1.40 times as long; table-wise does not fit: it takes 2.38 times the "
        "memory that devices leave for rows, "
    )
    none = told(PlanFigures.of(replace(planned, simple_plans=simple[:1])))["compared"]
    assert none.startswith("table-wise does not fit: it takes 2.38 times ")


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (1.0, ", as predicted; its transfers at most"),
        (1.2, ", 20% longer; its transfers at most"),
        (0.5, ", 50% shorter; its transfers at most"),
        (12.2, ", 12.2 times the predicted one; its transfers at most"),
    ],
)
def test_held_out_data_are_compared_with_the_prediction(
    planned: Plan, factor: float, words: str
) -> None:
    assert planned.step_time is not None
    held_out = HeldOut(
        HeldOutSource.LAST_PART, 600, factor * planned.step_time.seconds, 1.03e-6, 1e-6
    )
    said = told(PlanFigures.of(replace(planned, held_out=held_out)))["held out"]
    assert said.startswith("last part of the log (600 samples): step ")
    assert f"s{words} 3% above the lower bound" in said
    assert "is faster" not in said


def test_a_large_gap_on_held_out_data_is_a_factor(planned: Plan) -> None:
    held_out = HeldOut(HeldOutSource.LAST_PART, 600, 1.0, 16.7e-6, 1e-6)
    said = told(PlanFigures.of(replace(planned, held_out=held_out)))["held out"]
    assert said.endswith("its transfers at most 16.7 times the lower bound for these data")


def test_a_bound_of_zero_proves_nothing(planned: Plan) -> None:
    assert planned.certificate is not None
    unproved = replace(planned.certificate, lower_bound_seconds=0.0)
    held_out = HeldOut(HeldOutSource.LAST_PART, 600, 1.0, 16.7e-6, 0.0)
    said = told(PlanFigures.of(replace(planned, held_out=held_out, whole_certificate=unproved)))
    assert said["certificate"].endswith("s; no lower bound is known")
    assert said["held out"].endswith("; no lower bound is known for these data")
    nothing_read = replace(unproved, objective_seconds=0.0)
    assert (unproved.certified_gap, nothing_read.certified_gap) == (None, 0.0)
    assert not unproved.is_within(math.inf)


def test_a_simple_plan_that_is_faster_on_held_out_data_is_named(planned: Plan) -> None:
    held_out = HeldOut(HeldOutSource.NEXT_WINDOW, 600, 2.0, 2.0, 1.0)
    simple = (
        SimplePlan(SimpleMethod.TABLE_WISE, 1.0, 1.0, 0.5, True, held_out_step_seconds=1.9),
        SimplePlan(SimpleMethod.ROW_WISE, 1.0, 1.0, 2.0, False, held_out_step_seconds=1.0),
    )
    plan = replace(planned, held_out=held_out, simple_plans=simple)
    said = told(PlanFigures.of(plan))["held out"]
    assert said.endswith("; there table-wise is faster")
    assert "row-wise" not in said


def test_a_plan_without_held_out_data_says_how_to_get_them(planned: Plan) -> None:
    """The text also has the step with reads of rows that the log never read."""
    said = told(PlanFigures.of(replace(planned, held_out=None, unread_step_seconds=None)))
    missing = "not measured on data the plan has not seen: `oper profile --hold-out 20%` would"
    assert said["held out"] == missing
    assert planned.step_time is not None
    twice = 2 * planned.step_time.seconds
    said = told(PlanFigures.of(replace(planned, held_out=None, unread_step_seconds=twice)))
    assert said["held out"] == (
        f"{missing}. If 10% of the reads go to rows that this sample never read, the step takes "
        f"{format_duration(twice)} (predicted: {format_duration(planned.step_time.seconds)})"
    )
    for times in (0.5, 1.0, 1 + 1e-9):
        seconds = times * planned.step_time.seconds
        said = told(PlanFigures.of(replace(planned, held_out=None, unread_step_seconds=seconds)))
        assert said["held out"].endswith(" that this sample never read, the step takes no longer")
