"""Sentences that the terminal, the report and notebooks share."""

import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import oper
from oper.analysis.wording import memory_limit, simple_plans_sentence
from oper.base.formatting import format_factor
from oper.plan.reference_figures import SimpleMethod, SimplePlan
from tests.support.planner.drifting import make_profile

seconds = st.just(0.0) | st.floats(1e-9, 1.0)
TABLES, ROWS = SimpleMethod.TABLE_WISE, SimpleMethod.ROW_WISE


def simple(method: SimpleMethod, taken: float, factor: float) -> SimplePlan:
    return SimplePlan(method, taken, taken / 2, factor, factor <= 1)


@given(seconds, seconds, seconds, st.floats(0.1, 5), st.floats(0.1, 5))
def test_each_plan_that_fits_takes_its_time_and_others_do_not_fit(
    ours: float, tables: float, rows: float, one: float, two: float
) -> None:
    for taken in (tables, rows):
        assume(taken == ours or abs(taken - ours) > 1e-2 * max(taken, ours))
    said = simple_plans_sentence(
        ours,
        [simple(TABLES, tables, one), simple(ROWS, rows, two)],
        "the limit",
    )
    assert said is not None
    assert ("table-wise does not fit" in said) == (one > 1)
    assert ("row-wise does not fit" in said) == (two > 1)
    fitting = [taken for taken, factor in ((tables, one), (rows, two)) if factor <= 1]
    for taken in fitting:
        times = "many" if not ours and taken else f"{format_factor(taken / ours)}" if ours else "1"
        assert f"{times} times" in said or taken == ours
    assert ("takes as long" in said) == (ours in fitting)


def test_the_sentence_as_a_manager_reads_it() -> None:
    pair = [simple(TABLES, 4.4e-6, 0.5), simple(ROWS, 4.3e-6, 0.5)]
    assert simple_plans_sentence(1e-6, pair, "") == (
        "table-wise takes 4.40 times as long, row-wise 4.30 times"
    )
    pair = [simple(TABLES, 2e-6, 0.5), simple(ROWS, 0.9e-6, 0.5)]
    assert simple_plans_sentence(1e-6, pair, "") == (
        "table-wise takes 2.00 times as long, row-wise 0.90 times"
    )
    pair = [simple(TABLES, 1.49e-6, 0.5), simple(ROWS, 1.001e-6, 0.5)]
    assert simple_plans_sentence(1e-6, pair, "") == (
        "table-wise takes 1.49 times as long, row-wise takes as long"
    )
    assert simple_plans_sentence(1e-6, pair[::-1], "") == (
        "row-wise takes as long, table-wise takes 1.49 times as long"
    )
    assert simple_plans_sentence(1e-6, [], "") is None


def test_a_simple_plan_that_does_not_fit_names_the_limit() -> None:
    over = [simple(TABLES, 2e-6, 1.67)]
    assert simple_plans_sentence(1e-6, over, "the limit of 5% extra memory") == (
        "table-wise does not fit: it takes 1.67 times the limit of 5% extra memory"
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
