"""Pace: α and K follow the time that training leaves, by words that hold two batches later."""

import pytest

from oper.scheduler.dispatch import Policy
from oper.scheduler.loader.assigners import Pace


def test_slow_dispatch_lowers_alpha_and_time_raises_it_again() -> None:
    pace = Pace(Policy.parse("esd:0.5"), fixed=False)
    for _ in range(40):
        pace.note(training=0.01, dispatching=0.1)
    assert pace.word[0] == 0.0
    for _ in range(80):
        pace.note(training=0.1, dispatching=0.01)
    assert pace.word[0] == 0.5


def test_k_stays_between_one_and_what_was_asked() -> None:
    pace = Pace(Policy.parse("laia:4"), fixed=False)
    for _ in range(40):
        pace.note(training=0.01, dispatching=0.1)
    assert pace.word[1] == 1
    for _ in range(80):
        pace.note(training=0.1, dispatching=0.01)
    assert pace.word[1] == 4


def test_a_word_holds_two_batches_later() -> None:
    pace = Pace(Policy.parse("esd"), fixed=False)
    heard = [pace.hear(alpha, 0).alpha for alpha in (0.9, 0.8, 0.7, 0.6)]
    assert heard == [1.0, 1.0, 0.9, 0.8]


@pytest.mark.parametrize("policy", ["esd", "laia:3", "laia", "grouped"])
def test_nothing_follows_where_it_is_fixed_or_has_nothing_to_follow(policy: str) -> None:
    asked = Policy.parse(policy)
    pace = Pace(asked, fixed=policy in ("esd", "laia:3"))
    pace.note(training=0.01, dispatching=0.1)
    assert [pace.hear(0.0, 1) for _ in range(4)] == [asked] * 4
    assert pace.word == (asked.alpha, asked.tables or 0)
