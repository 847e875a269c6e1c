"""Numbers as they are printed: what rounding left of a difference is 0."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.cli.shared.formatting import format_duration, format_share


@pytest.mark.parametrize("seconds", [0.0, -0.0, 2e-22, -2e-22, 0.1 + 0.2 - 0.3])
def test_rounding_is_no_duration(seconds: float) -> None:
    assert format_duration(seconds) == "0 µs"
    assert format_share(seconds) == "0.00%"
    assert format_share(-seconds) == "0.00%"


@given(st.floats(1e-12, 1e4), st.booleans())
def test_durations_keep_their_sign_and_four_digits(seconds: float, negative: bool) -> None:
    number, unit = format_duration(-seconds if negative else seconds).split()
    value = float(number) * {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    assert (value < 0) == negative
    assert abs(value) == pytest.approx(seconds, rel=5.1e-4)


@given(st.floats(-10, 10))
def test_shares_are_rounded_and_have_no_negative_zero(share: float) -> None:
    text = format_share(share)
    assert float(text.removesuffix("%")) == pytest.approx(100 * share, abs=0.00501)
    assert text != "-0.00%"
