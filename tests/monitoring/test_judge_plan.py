"""The verdict: noise gains nothing, a drift is found, and too few accesses tell nothing."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from benchmarks.planning import drift_verdict
from benchmarks.planning.drift_verdict import Samples, judged
from benchmarks.planning.held_out import MODES, Case
from oper.cost.workload import Workload
from oper.monitoring.judge_plan import why_not_judged
from oper.planner.enough_accesses import ENOUGH_ACCESSES
from oper.planner.replan.judgement import Choice
from oper.profiling.profile import Profile, in_order
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.planner.drifting import make_profile

Mode = Literal["inference", "training"]


@pytest.fixture(scope="module")
def zipf() -> Samples:
    (made_up,) = drift_verdict.logs("zipf")
    return made_up


def verdicts(log: Samples, mode: Mode, moved: float) -> set[str]:
    """Return the advice on three shuffles of a log, each as a window and as a monitor's periods."""
    random = np.random.default_rng(5)
    case = Case(Topology.load("dgx-h100").with_capacity("1.2"), Workload(mode))
    found = [judged(log, case, moved, random) for _ in range(3)]
    return {judgement.advice for each in found for judgement in each.values()}


@pytest.mark.parametrize("mode", MODES)
def test_chance_is_not_drift(zipf: Samples, mode: Mode) -> None:
    assert verdicts(zipf, mode, 0.0) == {Choice.KEEP}


def test_a_drift_is_found(zipf: Samples) -> None:
    assert Choice.KEEP not in verdicts(zipf, "inference", 0.3)


def test_chance_in_a_real_log_is_not_drift(shared_data: Path) -> None:
    assert (shared_data / "sessions5").is_dir()
    (log,) = drift_verdict.logs("retailrocket")
    assert verdicts(log, "inference", 0.0) == {Choice.KEEP}


def profile_of(accesses: int) -> Profile:
    counts = np.array([accesses - 1, 1], dtype=np.uint32)
    return make_profile((Table("t", 2),), [counts])


def test_too_few_accesses_are_not_judged() -> None:
    enough, few = 2 * ENOUGH_ACCESSES, 2 * ENOUGH_ACCESSES - 2
    assert "no period before it" in why_not_judged(profile_of(enough), 2)

    def said(before: int, window: int) -> str:
        both = [profile_of(before), profile_of(window)]
        in_order(both)
        return why_not_judged(both[1], 2)

    needed = "4,095 counted accesses a rank, and 4,096 are needed"
    assert said(enough, few).startswith(f"this period has {needed}")
    assert said(few, enough).startswith(f"those before it have {needed}")
    assert said(enough, enough) == ""
