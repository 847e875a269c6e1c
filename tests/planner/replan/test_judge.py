"""The judge of plans: one time of a plan everywhere, on data that no plan was made from."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.monitoring.judge_plan import judge_period
from oper.plan.reference_figures import HeldOutSource
from oper.plan.settings import PlanSettings
from oper.planner.compare import compare
from oper.planner.make_plan import make_plan
from oper.planner.replan.drift import drift, drift_by_window
from oper.planner.replan.judge import NOT_SPLIT, SAME_DATA, SAME_WINDOW
from oper.planner.replan.judgement import Candidate, Choice, Judgement
from oper.planner.replan.replan import replan
from oper.profiling.make_profile import profile as count_log
from oper.profiling.profile import Profile, in_order, itself, merge, with_held_out
from oper.topology.topology import Topology
from tests.support.commands import write_log
from tests.support.examples import at_least, examples
from tests.support.planner.drifting import cost_row_by_row, drifted, planned, seeds
from tests.support.planner.judgements import a_judgement

pytestmark = pytest.mark.usefixtures("small_programmes")

# Touches of striped rows by several ranks are divided in proportion to those by one.
SAME = pytest.approx
STRIPED = 5e-4


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small counts judge."""
    monkeypatch.setattr("oper.planner.enough_accesses.ENOUGH_ACCESSES", 0)
    monkeypatch.setattr("oper.planner.replan.judge.ENOUGH_OF_PART", 0)


def following(*windows: Profile) -> list[Profile]:
    """Return windows that know which of them follow each other."""
    found = [replace(window) for window in windows]
    in_order(found)
    return found


def in_halves(first: Profile, later: Profile) -> Profile:
    """Return a window of these halves."""
    return replace(merge([first, later]), open_first_part=partial(itself, first))


@pytest.mark.parametrize(
    ("name", "mode"), [("dgx-a100", "inference"), ("2x4-a100", "training"), ("cpu:4", "training")]
)
def test_a_plan_has_one_time_on_one_window(any_size: None, name: str, mode: str) -> None:
    """`plan`, `compare`, `drift`, `replan` and the monitor predict one step."""
    first, second, third = drifted(3, windows=3)
    topology, workload = Topology.load(name), Workload(mode, None, 4096)  # type: ignore[arg-type]
    asked = PlanSettings(extra_memory=0.05)
    plan = make_plan(first, topology, workload, asked)
    assert plan.step_time is not None
    own = plan.step_time.seconds
    run = compare(first, topology, workload, asked, ["oper", "row_wise"])
    compared = run.methods["oper"].step_seconds
    assert compared is not None
    assert compared == SAME(own, rel=1e-12)
    seen = drift(plan, first)
    assert seen.made_step_seconds == own
    assert seen.judgement.keep.step_seconds == SAME(own, rel=STRIPED)
    again = replan(plan, first)
    assert again.judgement == seen.judgement
    assert again.plan.step_time is not None
    assert again.plan.step_time.seconds == seen.judgement.keep.step_seconds

    # On later data it is the time that the plan states of data held out of its profile.
    first, second, third = following(first, second, third)
    held_out = make_plan(first, topology, workload, asked).held_out
    assert held_out is not None
    judged = drift(plan, replace(second, open_preceding=partial(itself, first))).judgement
    assert judged.keep.step_seconds == held_out.step_seconds
    assert judged.keep.transfer_seconds == held_out.objective_seconds
    newest = in_halves(second, third)
    judgement = drift(plan, newest).judgement
    assert judgement.source == HeldOutSource.LATER_PART
    assert replan(plan, newest).judgement == judgement
    after_second = make_plan(with_held_out(second, third), topology, workload, asked)
    assert after_second.held_out is not None
    assert judgement.fresh.step_seconds == SAME(after_second.held_out.step_seconds, rel=1e-9)

    # A monitor's periods follow each other as windows do.
    before = replace(second, open_preceding=None)
    told = judge_period(plan, replace(third, open_preceding=partial(itself, before)), 0.002)
    assert told.candidates == judgement.candidates


@at_least(5)
@given(seeds)
@examples(6)
def test_candidates_cost_what_single_rows_do_on_the_later_part(seed: int) -> None:
    plan, (_, now, later) = planned(seed, 3)
    assume(plan.profile not in (now.digest, later.digest))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oper.planner.replan.judge.ENOUGH_OF_PART", 0)
        made = replan(plan, with_held_out(now, later), 1000)
        found = made.judgement
        assert found is not None
        assert found.source == HeldOutSource.LAST_PART
        assert found.samples == later.samples
        for candidate, of in ((found.keep, plan), (found.replan, made.plan)):
            cost = cost_row_by_row(of, later, True).objective_seconds
            assert np.isclose(candidate.transfer_seconds, cost)
        assert made.plan.held_out is not None
        assert np.isclose(found.replan.step_seconds, made.plan.held_out.step_seconds)
        # The plan is made from a window as a whole, and judged by its later half.
        halved = in_halves(now, later)
        whole = replan(plan, halved, 1000)
        assert whole.judgement is not None
        assert whole.judgement.keep == found.keep
        assert whole.judgement.fresh.step_seconds == found.fresh.step_seconds
        assert whole.plan.profile == halved.digest


def test_it_says_what_the_judgement_rests_on(any_size: None) -> None:
    first, second, third = drifted(5, windows=3)
    topology, workload = Topology.load("2x4-a100"), Workload("training", "raw", 4096)
    plan = make_plan(first, topology, workload, PlanSettings(extra_memory=0.02))

    def said(window: Profile) -> tuple[HeldOutSource | None, str]:
        found = drift(plan, window).judgement
        return found.source, found.reservation

    assert said(second) == (None, NOT_SPLIT)
    assert said(first) == (None, SAME_DATA)
    assert said(with_held_out(second, first)) == (None, SAME_DATA)
    assert said(in_halves(second, third)) == (HeldOutSource.LATER_PART, "")
    assert said(with_held_out(second, third)) == (HeldOutSource.LAST_PART, "")
    first, second, third = following(first, second, third)
    assert said(second) == (HeldOutSource.THIS_WINDOW, SAME_WINDOW)
    assert said(third) == (HeldOutSource.THIS_WINDOW, NOT_SPLIT)
    # A window that does not know the one before it is preceded by the last of those given.
    alone = [replace(each, open_preceding=None) for each in (first, second, third)]
    by_window = drift_by_window(plan, alone).windows
    assert [window.drift.judgement.source for window in by_window] == [
        None,
        HeldOutSource.THIS_WINDOW,
        HeldOutSource.THIS_WINDOW,
    ]
    assert by_window[2].drift.judgement == drift(plan, third).judgement


def test_parts_that_are_too_small_do_not_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = drifted(5, windows=3)
    topology, workload = Topology.load("2x4-a100"), Workload("training", "raw", 4096)
    plan = make_plan(first, topology, workload, PlanSettings(extra_memory=0.02))
    few = replace(
        third,
        accesses=np.minimum(third.accesses, 1),
        samples_with_row=np.minimum(third.samples_with_row, 1),
    )
    enough = int(second.accesses_of_tables.sum()) // plan.ranks
    monkeypatch.setattr("oper.planner.enough_accesses.ENOUGH_ACCESSES", enough)
    monkeypatch.setattr("oper.planner.replan.judge.ENOUGH_OF_PART", enough)
    found = drift(plan, in_halves(second, few)).judgement
    assert found.source is None
    assert found.reservation.startswith("the later part of the newest data has ")
    # One rule for a profile and for each of several windows.
    alone = replace(few, open_preceding=None)
    assert drift(plan, alone).judgement.too_small
    assert drift(plan, alone).verdict == "keep"
    (window,) = drift_by_window(plan, [alone]).windows
    assert window.too_small
    assert window.drift.judgement == drift(plan, alone).judgement
    *_, third = following(first, few, third)
    skipped = drift(plan, third).judgement  # the window before the small one judges
    assert skipped.reservation == SAME_WINDOW


def test_copies_of_all_rows_are_judged_if_they_fit_and_cost_memory_alone(any_size: None) -> None:
    first, second = drifted(3)
    window = in_halves(second, second)

    def choices(name: str, mode: str, capacity: str | None = None) -> list[Choice]:
        topology = Topology.load(name)
        if capacity is not None:
            topology = topology.with_capacity(capacity)
        workload = Workload(mode, None, 4096)  # type: ignore[arg-type]
        found = drift(make_plan(first, topology, workload), window).judgement
        return [each.choice for each in found.candidates[3:]]

    assert choices("dgx-a100", "inference") == [Choice.FULL_COPIES]
    assert choices("dgx-a100", "inference", "1.2") == []
    assert choices("dgx-a100", "training") == []
    assert choices("cpu:4", "inference") == []


times = st.floats(1e-6, 1e-3)


@given(times, times, times, st.floats(0, 0.1))
def test_the_advice_pays(keep: float, again: float, fresh: float, threshold: float) -> None:
    """The gain in the horizon exceeds the time to move, and the gain of a step the threshold; no
    other candidate gains more."""
    found = a_judgement(keep, again, fresh, threshold=threshold)

    def net(candidate: Candidate) -> float:
        gain = keep - candidate.step_seconds
        return gain * found.horizon - candidate.moving_seconds

    most = max(found.candidates[1:], key=net)
    close = [
        each
        for each in found.candidates[1:]
        if each == most
        or (net(each) > 0 and each.step_seconds <= (1 + threshold) * most.step_seconds)
    ]
    best = close[0]  # a replan, if it is about as good
    pays = net(best) > 0 and keep - best.step_seconds > threshold * best.step_seconds
    assert found.advice == (best.choice if pays else Choice.KEEP)
    assert found.verdict == ("replan" if pays else "keep")
    after = found.pays_after_steps(best)
    assert (after is None) == (best.step_seconds >= keep)
    if pays:
        assert after is not None
        assert after <= found.horizon


def test_moves_that_take_longer_than_they_save_do_not_pay() -> None:
    steps = (Choice.KEEP, 2e-5, 0.0), (Choice.REPLAN, 1e-5, 0.2), (Choice.FROM_SCRATCH, 1e-5, 0.05)
    candidates = tuple(Candidate(choice, step, step, 1e9, moving) for choice, step, moving in steps)
    found = Judgement(None, 1, "", 10_000, 0.0, candidates)
    assert not found.pays(found.replan)
    assert found.advice == Choice.FROM_SCRATCH
    assert replace(found, horizon=4_000).advice == Choice.KEEP


def test_windows_on_the_disk_keep_their_parts(tmp_path: Path) -> None:
    write_log(tmp_path / "log.parquet", samples=4_001)
    reading = {"columns": "C*"}
    log = tmp_path / "log.parquet"
    counted = count_log(log, output=tmp_path / "w", windows=2, **reading)  # type: ignore[call-overload]
    thirds = count_log(log, windows=6, **reading)  # type: ignore[call-overload]
    for number, window in enumerate(counted):
        for of in (window, Profile.load(f"{tmp_path}/w@{number}")):
            parts = of.parts
            assert parts is not None
            assert sum(part.samples for part in parts) == window.samples
            assert (merge(parts).accesses == window.accesses).all()
            last = thirds[3 * number + 2]
            assert abs(parts[1].samples - last.samples) <= 1
            assert abs(parts[1].accesses - last.accesses.astype(np.int64)).sum() <= 3 * 2
            assert of.select([0]).parts is not None
    # The sum of windows is split where the last one begins.
    parts = Profile.load(tmp_path / "w").parts
    assert parts is not None
    assert [part.samples for part in parts] == [window.samples for window in counted]
    assert Profile.load(f"{tmp_path}/w@0").digest == counted[0].digest
    damaged = tmp_path / "w" / "window-001" / "first-part" / "profile.json"
    damaged.write_text(damaged.read_text().replace('"samples"', '"sample"'))
    with pytest.raises(OperError, match="first-part"):
        Profile.load(f"{tmp_path}/w@1")


def test_windows_of_a_log_out_of_order_have_no_parts(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)
    times = np.sort(random.integers(0, 4 * 86_400, 4_000))
    ids = random.zipf(1.3, 4_000) % 50
    for name, order in (("sorted", np.arange(4_000)), ("shuffled", random.permutation(4_000))):
        table = pa.table({"C1": ids[order], "ts": pa.array(times[order], pa.timestamp("s"))})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        log = tmp_path / f"{name}.parquet"
        windows = count_log(log, columns="C1", by_column="ts", every="1d")
        assert all((window.parts is not None) == (name == "sorted") for window in windows)


@pytest.mark.parametrize(
    ("replan", "fresh", "advice"),
    [
        (1.04e-5, 1e-5, Choice.REPLAN),  # the difference is below the threshold
        (1.06e-5, 1e-5, Choice.FROM_SCRATCH),
        (1.2e-5, 1.19e-5, Choice.KEEP),
    ],
)
def test_a_replan_is_advised_if_other_plans_are_as_good(
    replan: float, fresh: float, advice: Choice
) -> None:
    assert a_judgement(1.2e-5, replan, fresh).advice == advice


def test_small_data_keep_the_plan_unless_unseen_data_judge_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, now, later = drifted(5, windows=3)
    workload = Workload("inference", "raw", 4096)
    plan = make_plan(first, Topology.load("2x4-a100"), workload, PlanSettings(extra_memory=0.02))
    monkeypatch.setattr("oper.planner.replan.judge.ENOUGH_OF_PART", 0)
    halves = in_halves(now, later)
    assert drift(plan, now).advice != Choice.KEEP
    monkeypatch.setattr("oper.planner.enough_accesses.ENOUGH_ACCESSES", 10**9)
    assert drift(plan, now).judgement.too_small
    assert drift(plan, now).advice == Choice.KEEP
    assert drift(plan, halves).judgement.source == HeldOutSource.LATER_PART
    assert not drift(plan, halves).judgement.too_small
