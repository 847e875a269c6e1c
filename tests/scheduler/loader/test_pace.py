"""Pace: the effort follows the time that training leaves, by words that hold two batches later."""

import pytest

from oper.scheduler.dispatch import Policy
from oper.scheduler.loader.assigners import Pace


def efforts(pace: Pace, seconds_of_all: float, training: float, batches: int) -> list[float]:
    """The effort of each batch, where dispatch takes `seconds_of_all` at the effort of 1 and less
    in proportion, and every rank hears what this one says."""
    found = []
    for _ in range(batches):
        found.append(pace.hear(pace.effort))
        pace.note(training, found[-1] * seconds_of_all)
    return found


def test_slow_dispatch_lowers_the_effort_and_time_raises_it_again() -> None:
    pace = Pace(fixed=False)
    slowed = efforts(pace, 0.5, 0.05, 60)
    assert slowed[0] == 1
    # It settles below the time of training, within two words and not far below.
    assert all(0.5 * effort <= 0.05 for effort in slowed[12:])
    assert all(0.5 * effort >= 0.02 for effort in slowed[12:])
    assert efforts(pace, 0.02, 0.05, 80)[-1] == 1


def test_the_effort_has_a_floor_and_rises_from_it() -> None:
    pace = Pace(fixed=False)
    assert 0 < efforts(pace, 100.0, 0.001, 60)[-1] < 0.02
    assert efforts(pace, 0.001, 1.0, 100)[-1] == 1


def test_a_word_holds_two_batches_later_and_is_judged_by_what_comes_then() -> None:
    pace = Pace(fixed=False)
    assert [pace.hear(effort) for effort in (0.9, 0.8, 0.7, 0.6)] == [1.0, 1.0, 0.9, 0.8]
    pace = Pace(fixed=False)
    said = []
    for _ in range(8):
        pace.note(training=0.08, dispatching=0.1)
        said.append(pace.effort)
    fallen = pytest.approx(0.64)
    assert said[:3] == [1.0] * 3
    assert said[3:7] == [fallen] * 4


def test_no_training_so_far_says_nothing() -> None:
    pace = Pace(fixed=False)
    for _ in range(10):
        pace.note(training=0.0, dispatching=1.0)
    assert pace.effort == 1


def test_a_fixed_pace_stays() -> None:
    pace = Pace(fixed=True)
    for _ in range(10):
        pace.note(training=0.01, dispatching=1.0)
    assert [pace.hear(0.1) for _ in range(4)] == [1.0] * 4
    assert pace.effort == 1


@pytest.mark.parametrize(
    ("asked", "half", "quarter"),
    [
        ("esd", "esd:0", "esd:0@0.5"),
        ("esd:0.5", "esd:0", "esd:0@0.5"),
        ("laia:8", "laia:1", "laia:1@0.5"),
        ("laia", "laia@0.5", "laia@0.25"),
        ("grouped", "grouped:1", "grouped:1@0.5"),
        ("grouped:4@0.5", "grouped:1@0.5", "grouped:1@0.25"),
        ("random", "random", "random"),
        ("in-order", "in-order", "in-order"),
    ],
)
def test_what_a_policy_does_with_less_effort(asked: str, half: str, quarter: str) -> None:
    policy = Policy.parse(asked)
    assert str(policy.at(1.0)) == asked
    assert str(policy.at(0.5)) == half
    assert str(policy.at(0.25)) == quarter
    assert Policy.parse(half) == policy.at(0.5)


def test_between_all_and_half_the_effort_is_that_of_the_number() -> None:
    assert str(Policy.parse("grouped").at(0.75)) == "grouped:3"
    assert str(Policy.parse("laia:8").at(0.75)) == "laia:4"
    assert str(Policy.parse("esd").at(0.75)) == "esd:0.5"
