"""Sentences that the terminal, the report and notebooks share."""

import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import oper
from oper.analysis.wording import memory_limit, simple_plans_sentence
from oper.plan.reference_figures import HeldOut, HeldOutSource, SimpleMethod, SimplePlan
from tests.support.planner.drifting import make_profile

seconds = st.just(0.0) | st.floats(1e-9, 1.0)


def simple(method: SimpleMethod, taken: float, factor: float, later: float | None) -> SimplePlan:
    return SimplePlan(method, taken, taken, factor, factor <= 1, later, later)


@given(seconds, seconds, seconds, st.floats(0.1, 5), st.floats(0.1, 5), st.booleans())
def test_no_slower_plan_is_called_faster(
    ours: float, tables: float, rows: float, one: float, two: float, judged: bool
) -> None:
    for taken in (tables, rows):
        assume(taken == ours or abs(taken - ours) > 1e-2 * max(taken, ours))
    held_out = HeldOut(HeldOutSource.LAST_PART, 9, ours, ours, ours) if judged else None
    later = ours if judged else None
    said = simple_plans_sentence(
        ours,
        held_out,
        [
            simple(SimpleMethod.TABLE_WISE, tables, one, later),
            simple(SimpleMethod.ROW_WISE, rows, two, later),
        ],
        "the limit",
    )
    assert said is not None
    assert ("table-wise does not fit" in said.lower()) == (one > 1)
    assert ("row-wise does not fit" in said.lower()) == (two > 1)
    main, _, held = said.partition("(held out: ")
    fitting = [taken for taken, factor in ((tables, one), (rows, two)) if factor <= 1]
    assert ("faster" in main) == any(taken > ours for taken in fitting)
    assert ("slower" in main) == any(taken < ours for taken in fitting)
    assert bool(held) == (judged and bool(fitting))
    assert "faster" not in held
    assert "slower" not in held


def test_the_sentence_as_a_manager_reads_it() -> None:
    pair = [
        simple(SimpleMethod.TABLE_WISE, 4.4e-6, 0.5, 2.0e-6),
        simple(SimpleMethod.ROW_WISE, 4.3e-6, 0.5, 0.9e-6),
    ]
    later = HeldOut(HeldOutSource.NEXT_WINDOW, 9, 1.0e-6, 1.0e-6, 1.0e-6)
    assert simple_plans_sentence(1e-6, None, pair, "") == (
        "4.4 times faster than table-wise, 4.3 times than row-wise"
    )
    assert simple_plans_sentence(1e-6, later, pair, "") == (
        "4.4 times faster than table-wise, 4.3 times than row-wise (held out: 2 times faster than "
        "table-wise, 11.1% slower than row-wise)"
    )
    assert simple_plans_sentence(1e-6, None, [], "") is None


def test_a_simple_plan_that_does_not_fit_names_the_limit() -> None:
    over = [simple(SimpleMethod.TABLE_WISE, 4.4e-6, 1.67, None)]
    assert simple_plans_sentence(1e-6, None, over, "the limit of 5% extra memory") == (
        "Table-wise does not fit: it takes 1.67 times the limit of 5% extra memory"
    )


@pytest.mark.parametrize(
    ("topology", "extra_memory", "words"),
    [
        ("cpu:2", None, r"the limit of 5% extra memory, [0-9.]+ kB a rank"),
        ("cpu:2", 0.1, r"the limit of 10% extra memory, [0-9.]+ kB a rank"),
        ("dgx-h100", None, r"the memory that devices leave for rows, [0-9.]+ .?B a rank"),
        ("capacity", None, "the capacity of 1 MB to 2 MB a rank"),
    ],
)
def test_the_limit_of_a_plan_is_what_it_was_made_with(
    topology: str, extra_memory: float | None, words: str
) -> None:
    table = oper.Table("t", 3000, 8)
    counts = np.arange(3000, 0, -1).astype(np.uint32)
    profile = make_profile((table,), [counts])
    ranks = oper.Topology.load("cpu:2" if topology == "capacity" else topology)
    if topology == "capacity":
        ranks = ranks.with_capacity("1MB,2MB")
    settings = oper.PlanSettings(extra_memory=extra_memory)
    plan = oper.make_plan(profile, ranks, oper.Workload("training", "raw", 64), settings)
    assert re.fullmatch(words, memory_limit(plan)), memory_limit(plan)
