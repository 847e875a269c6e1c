"""Portable functions against exact or longer arithmetic, and the order of their sums."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base import portable_math
from oper.base.arrays import Floats

# Units in the last place that a function may be off by, over all arguments drawn here.
MOST_ULPS = 2.0


def ulps(found: Floats, exact: np.ndarray) -> float:
    """The largest difference, in units of the last place of the exact value."""
    rounded = exact.astype(np.float64)
    return float(np.max(np.abs(found - exact) / np.spacing(np.abs(rounded))))


def arguments(low: float, high: float) -> Floats:
    random = np.random.default_rng(3)
    return np.concatenate([random.uniform(low, high, 100_000), np.linspace(low, high, 1001)])


@pytest.mark.parametrize("function", ["exp", "expm1"])
@pytest.mark.parametrize("bounds", [(-30, 700), (-1, 1), (-1e-3, 1e-3), (-1e-12, 1e-12)])
def test_exponentials(function: str, bounds: tuple[float, float]) -> None:
    x = arguments(*bounds)
    exact = getattr(np, function)(x.astype(np.longdouble))
    assert ulps(getattr(portable_math, function)(x), exact) <= MOST_ULPS


@pytest.mark.parametrize("exponents", [(-300, 300), (-1, 1), (-1e-3, 1e-3)])
def test_logarithms(exponents: tuple[float, float]) -> None:
    x = 10 ** arguments(*exponents)
    assert ulps(portable_math.log(x), np.log(x.astype(np.longdouble))) <= MOST_ULPS
    for y in (x, -x / (1 + x), x - 1):  # above, between -1 and 0, near and far from 0
        y = y[y != -1]
        exact = np.log1p(y.astype(np.longdouble))
        assert ulps(portable_math.log1p(y), exact) <= MOST_ULPS


def test_log_gamma() -> None:
    whole = np.arange(1, 171)
    exact = np.array([math.log(math.factorial(n - 1)) for n in whole.tolist()])
    found = portable_math.log_gamma(whole)
    assert np.abs(found - exact).max() <= 2e-15 * exact.max()
    large = 10.0 ** arguments(2, 14)
    wanted = np.array([math.lgamma(x) for x in large.tolist()])
    assert (np.abs(portable_math.log_gamma(large) - wanted) <= 1e-15 * wanted).all()
    # Γ(x + 1) = x Γ(x), between whole numbers too.
    x = arguments(0.5, 40)
    step = portable_math.log_gamma(x + 1) - portable_math.log_gamma(x)
    assert np.abs(step - np.log(x)).max() <= 1e-13  # seven units of the last place of log Γ(41)


def test_ends_of_the_ranges() -> None:
    infinite = np.inf
    assert portable_math.exp([-infinite, infinite, 0]).tolist() == [0.0, infinite, 1.0]
    assert portable_math.exp([800, -800]).tolist() == [infinite, 0.0]
    assert portable_math.exp(-744.0) == np.exp(-744.0)  # subnormal
    assert portable_math.expm1([-infinite, infinite, 0]).tolist() == [-1.0, infinite, 0.0]
    assert portable_math.log([0, 1, infinite]).tolist() == [-infinite, 0.0, infinite]
    assert portable_math.log(5e-324) == pytest.approx(math.log(5e-324), rel=1e-15)
    assert portable_math.log1p([-1, 0, infinite]).tolist() == [-infinite, 0.0, infinite]
    assert portable_math.log_gamma([0, infinite]).tolist() == [infinite, infinite]
    assert np.isnan(portable_math.log([-1, np.nan])).all()
    assert np.isnan(portable_math.log1p([-2, np.nan])).all()
    assert np.isnan(portable_math.exp(np.nan))
    assert np.isnan(portable_math.log_gamma([-1, np.nan])).all()


def test_powers() -> None:
    x = np.array([0.0, 0.25, 1.0, 3.0])
    assert portable_math.power(x, 0.5) == pytest.approx(x**0.5, rel=1e-15)
    assert portable_math.power(x, 0.0).tolist() == [1, 1, 1, 1]
    assert portable_math.power(1.0, 0.3) == 1.0
    for exponent in (0, 1, 2, 3, 7, 64):
        exact = [value**exponent for value in (0.0, 0.25, 1.0, 3.0)]
        assert portable_math.whole_power(x, exponent).tolist() == exact
    steps = portable_math.geometric_steps(0.02, 200.0, 5)
    assert steps == pytest.approx([0.02, 0.2, 2.0, 20.0, 200.0], rel=1e-14)
    assert (steps[0], steps[-1]) == (0.02, 200.0)


shapes = st.tuples(st.integers(0, 4), st.integers(0, 5), st.integers(1, 4), st.integers(0, 2**32))


@given(shapes)
def test_sums_of_products_have_one_order(shape: tuple[int, int, int, int]) -> None:
    """To the bit the definition, term after term; numbers that cancel show any other order."""
    rows, terms, columns, seed = shape
    random = np.random.default_rng(seed)
    a = random.normal(size=(rows, terms)) * 10.0 ** random.integers(-9, 9, (rows, terms))
    a[random.random(a.shape) < 0.2] = 0.0
    b = random.normal(size=(terms, columns)) * 10.0 ** random.integers(-9, 9, (terms, columns))
    exact = np.zeros((rows, columns))
    for k in range(terms):
        exact += a[:, k, None] * b[k]
    assert portable_math.dot(a, b).tolist() == exact.tolist()
    assert portable_math.dot(a, b[:, 0]).tolist() == exact[:, 0].tolist()
    for row in range(rows):
        assert portable_math.dot(a[row], b).tolist() == exact[row].tolist()
        assert portable_math.dot(a[row], b[:, 0]) == exact[row, 0]
    assert portable_math.dot(np.stack([a, a]), b).tolist() == [exact.tolist()] * 2


def test_products_of_many_rows_and_of_transposed_arrays() -> None:
    random = np.random.default_rng(0)
    a, b = random.random((500, 300)).T.copy().T, random.random((40, 300)).T
    exact = np.zeros((500, 40))
    for k in range(300):
        exact += a[:, k, None] * b[k]
    assert (portable_math.dot(a, b) == exact).all()


def test_zeros_add_nothing_and_shapes_must_match() -> None:
    assert portable_math.dot([0.0, 2.0], [np.inf, 3.0]) == 6.0
    assert portable_math.dot([[0.0, 2.0]], [[np.inf, 1.0], [3.0, 1.0]]).tolist() == [[6.0, 2.0]]
    assert portable_math.whole_dot(np.array([True, True]), np.array([2, 2**60])) == 2**60 + 2
    with pytest.raises(ValueError, match="expected arrays that share an axis"):
        portable_math.dot(np.zeros((2, 3)), np.zeros((2, 3)))
