"""Sentences that the terminal, the report and notebooks share."""

from hypothesis import assume, given
from hypothesis import strategies as st

from oper.analysis.wording import simple_plans_sentence
from oper.plan.reference_figures import HeldOut, HeldOutSource, SimpleMethod, SimplePlan

seconds = st.just(0.0) | st.floats(1e-9, 1.0)


def simple(method: SimpleMethod, taken: float, factor: float, later: float | None) -> SimplePlan:
    return SimplePlan(method, taken, factor, factor <= 1, later)


@given(seconds, seconds, seconds, st.floats(0.1, 5), st.floats(0.1, 5), st.booleans())
def test_no_slower_plan_is_called_faster(
    ours: float, tables: float, rows: float, one: float, two: float, judged: bool
) -> None:
    for taken in (tables, rows):
        assume(taken == ours or abs(taken - ours) > 1e-2 * max(taken, ours))
    held_out = HeldOut(HeldOutSource.LAST_PART, 9, ours, ours) if judged else None
    later = ours if judged else None
    said = simple_plans_sentence(
        ours,
        held_out,
        [
            simple(SimpleMethod.TABLE_WISE, tables, one, later),
            simple(SimpleMethod.ROW_WISE, rows, two, later),
        ],
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
    later = HeldOut(HeldOutSource.NEXT_WINDOW, 9, 1.0e-6, 1.0e-6)
    assert simple_plans_sentence(1e-6, None, pair) == (
        "4.4 times faster than table-wise, 4.3 times than row-wise"
    )
    assert simple_plans_sentence(1e-6, later, pair) == (
        "4.4 times faster than table-wise, 4.3 times than row-wise (held out: 2 times faster than "
        "table-wise, 11.1% slower than row-wise)"
    )
    assert simple_plans_sentence(1e-6, None, []) is None
