"""Numbers as they are printed: no exponents, and what rounding left of a difference is 0."""

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oper.base.formatting import (
    format_bytes,
    format_digits,
    format_duration,
    format_factor,
    format_gap,
    format_number,
    format_percent,
    format_share,
)

EVERY: tuple[Callable[[float], str], ...] = (
    format_bytes,
    format_duration,
    format_factor,
    format_gap,
    format_number,
    format_percent,
    format_share,
    lambda value: format_digits(value, 3),
)
# Beyond it products with 100 or 1e9 overflow.
FLOATS = st.floats(-1e290, 1e290)


@pytest.mark.parametrize("seconds", [0.0, -0.0, 2e-22, -2e-22, 0.1 + 0.2 - 0.3])
def test_rounding_is_no_duration(seconds: float) -> None:
    assert format_duration(seconds) == "0 µs"
    assert format_share(seconds) == "0.00%"
    assert format_share(-seconds) == "0.00%"
    assert format_bytes(seconds) == "0 B"


@given(FLOATS)
@example(1e-9)
@example(-2e-16)
@example(3790e-9)
@example(12345.0)
@example(1e-12)
@example(1.5e18)
def test_no_exponent_and_no_negative_zero(value: float) -> None:
    for form in EVERY:
        text = form(value)
        assert re.fullmatch(r"<?-?[\d,]+(\.\d+)?( ?[a-zA-Zµ%]+)?", text), text
        assert not re.search(r"\d[eE]", text), text
        if text.startswith("-"):
            assert value < 0
            assert re.search(r"[1-9]", text), text


@given(FLOATS, st.integers(1, 6))
def test_digits_are_the_nearest(value: float, digits: int) -> None:
    expected = float(f"{value:.{digits}g}")
    assert float(format_digits(value, digits).replace(",", "")) == pytest.approx(expected, rel=1e-9)


@given(st.floats(1e-12, 1e4), st.booleans())
def test_durations_keep_their_sign_and_four_digits(seconds: float, negative: bool) -> None:
    number, unit = format_duration(-seconds if negative else seconds).split()
    value = float(number.replace(",", ""))
    assert 1 <= abs(value) < 1000 or unit == "s" or (unit == "ns" and abs(value) < 1)
    value *= {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert (value < 0) == negative
    assert abs(value) == pytest.approx(seconds, rel=5.1e-4)


@given(st.floats(-10, 10))
def test_shares_are_rounded_and_have_no_negative_zero(share: float) -> None:
    text = format_share(share)
    assert float(text.removesuffix("%").replace(",", "")) == pytest.approx(100 * share, abs=0.00501)
    assert text != "-0.00%"


@given(st.floats(0, 1e6))
def test_factors_are_within_a_percent(value: float) -> None:
    text = format_factor(value)
    assert float(text.replace(",", "")) == pytest.approx(value, rel=0.0051, abs=0.0051)


@pytest.mark.parametrize(
    ("value", "text"), [(1.0, "1.00"), (1.3512, "1.35"), (12.34, "12.3"), (1234.5, "1,234")]
)
def test_factors(value: float, text: str) -> None:
    assert format_factor(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.001, "0.1%"), (0.00025, "0.025%"), (0.1 / 64 / 100, "0.00156%"), (0.05, "5%"), (0, "0%")],
)
def test_percents(value: float, text: str) -> None:
    assert format_percent(value) == text


def test_a_gap_above_no_bound_is_unknown() -> None:
    assert format_gap(None) == "unknown"
    assert format_gap(0.0) == "<0.0001%"


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1.797e308])
def test_what_only_damaged_files_hold_is_no_crash(value: float) -> None:
    for form in EVERY:
        assert form(value)
