"""Numbers and durations as text: rounded, without exponents, and never a sign before zero."""

import math

# Far below the time of a byte, and above what differences of sums of up to minutes leave.
ROUNDING_SECONDS = 1e-13
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def format_digits(value: float, digits: int) -> str:
    """A number rounded to so many significant digits: 0.00012345 -> '0.0001234', 1e20 in full."""
    rounded = float(f"{value:.{digits}g}")
    if not rounded:
        return "0"
    after_point = max(digits - 1 - math.floor(math.log10(abs(rounded))), 0)
    text = f"{rounded:,.{after_point}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_duration(seconds: float) -> str:
    """Seconds as ns, µs, ms or s with four digits; 0 where only the rounding of sums is left."""
    if abs(seconds) < ROUNDING_SECONDS:
        return "0 µs"
    for limit, suffix in _UNITS:
        if abs(seconds) >= 0.99995 * limit:  # rounds up to the limit
            return f"{format_digits(seconds / limit, 4)} {suffix}"
    return f"{format_digits(seconds * 1e9, 4)} ns"
