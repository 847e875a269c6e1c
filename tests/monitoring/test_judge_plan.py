"""The verdict: noise gains nothing, a drift is found, and too few accesses tell nothing."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.planning import drift_verdict
from benchmarks.planning.drift_verdict import Samples, judged
from oper.monitoring.judge_plan import why_not_judged
from oper.planner.enough_accesses import ENOUGH_ACCESSES
from oper.profiling.profile import Profile, in_order
from oper.tables.table import Table
from tests.support.planner.drifting import make_profile


@pytest.fixture(scope="module")
def zipf() -> Samples:
    (made_up,) = [log for log in drift_verdict.logs() if log.name.startswith("zipf")]
    return made_up


@pytest.mark.parametrize("mode", drift_verdict.MODES)
def test_chance_is_not_drift(zipf: Samples, mode: str) -> None:
    """It flatters a plan that is judged by the counts that it was made from, in every shuffle."""
    random = np.random.default_rng(5)
    found = np.array([judged(zipf, mode, True, 0.0, random) for _ in range(3)])
    assert (found[:, 0] <= drift_verdict.THRESHOLD).all()
    assert (found[:, 1] > found[:, 0]).all()


def test_a_drift_is_found(zipf: Samples) -> None:
    random = np.random.default_rng(6)
    found = [judged(zipf, "inference", True, 0.3, random)[0] for _ in range(3)]
    assert min(found) > drift_verdict.THRESHOLD


def test_chance_in_a_real_log_is_not_drift(shared_data: Path) -> None:
    assert (shared_data / "sessions5").is_dir()
    log = next(log for log in drift_verdict.logs() if log.name == "retailrocket")
    random = np.random.default_rng(7)
    found = [judged(log, "inference", True, 0.0, random)[0] for _ in range(3)]
    assert max(found) <= drift_verdict.THRESHOLD


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
