"""Products of matrices, exponentials and logarithms with the same bits on every processor.

BLAS, NumPy and the C library choose a version of these by the processor at run time, and the
versions differ in the last bits. A planner that compares such numbers makes other plans on other
machines. Everything that decides about a plan, including its figures, is therefore computed here
(docs/design/one-plan-everywhere.md); tests/project/test_portable_arithmetic.py finds exceptions.

Sums of NumPy (`sum`, `cumsum`, `add.at`, `bincount`) and single operations (`+`, `*`, `/`, `sqrt`)
have the same bits everywhere and are used directly.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oper.base import native
from oper.base.arrays import Floats, Ints, as_tensor


def dot(a: ArrayLike, b: ArrayLike) -> Floats:
    """Return a @ b of float64: the last axis of `a` [..., K] against the first of `b` [K, ...].

    The terms of a sum are added in the order of K, from 0 on. Zeros of `a` add nothing, even if `b`
    is infinite there. Raises ValueError if the two have different K.
    """
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    terms = left.shape[-1]
    if right.shape[0] != terms:
        raise ValueError(f"expected arrays that share an axis, got {left.shape} and {right.shape}")
    shape = (*left.shape[:-1], *right.shape[1:])
    rows, columns = left.size // max(terms, 1), right.size // max(terms, 1)
    if not terms:
        return np.zeros(shape)
    matrices = as_tensor(left.reshape(rows, terms)), as_tensor(right.reshape(terms, columns))
    product: Floats = native.ops().ordered_product(*matrices).numpy().reshape(shape)
    return product[()]  # a number, of two vectors


def whole_dot(a: NDArray[np.generic], b: NDArray[np.generic]) -> Ints:
    """Return a @ b of whole numbers, whose sums are exact in any order."""
    assert not {a.dtype.kind, b.dtype.kind} - set("iub"), "fractions would be cut off"
    product: Ints = a.astype(np.int64) @ b.astype(np.int64)
    return product


def exp(x: ArrayLike) -> Floats:
    """Return e^x of each element."""
    return _each("exp", x)


def expm1(x: ArrayLike) -> Floats:
    """Return e^x - 1 of each element."""
    return _each("expm1", x)


def log(x: ArrayLike) -> Floats:
    """Return the natural logarithm of each element: -inf of 0, NaN below."""
    return _each("log", x)


def log1p(x: ArrayLike) -> Floats:
    """Return the natural logarithm of 1 + x of each element: -inf of -1, NaN below."""
    return _each("log1p", x)


def log_gamma(x: ArrayLike) -> Floats:
    """Return the logarithm of the gamma function of each element above 0."""
    return _each("log_gamma", x)


def power(base: ArrayLike, exponent: float) -> Floats:
    """Return base^exponent of each element of at least 0, to some units in the last place."""
    values = np.asarray(base, dtype=np.float64)
    of_positive = exp(exponent * log(np.where(values > 0, values, 1.0)))
    return np.where(values > 0, of_positive, float(exponent == 0))


def whole_power(base: Floats, exponent: int) -> Floats:
    """Return base^exponent of each element, for a whole exponent of at least 0."""
    powers, square = np.ones_like(base), base
    while exponent:
        if exponent & 1:
            powers = powers * square
        exponent >>= 1
        if exponent:
            square = square * square
    return powers


def geometric_steps(first: float, last: float, number: int) -> Floats:
    """Return `number` values from `first` to `last`, both above 0, each the same times the one
    before."""
    steps = exp(np.linspace(float(log(first)), float(log(last)), number))
    steps[0], steps[-1] = first, last
    return steps


def _each(function: str, x: ArrayLike) -> Floats:
    values = np.asarray(x, dtype=np.float64)
    results: Floats = getattr(native.ops(), function)(as_tensor(values)).numpy()
    return results.reshape(values.shape)[()]
