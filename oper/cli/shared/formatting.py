"""Numbers as the commands print them: sizes, durations, counts, gaps."""

import math

# Far below the time of a byte, and above what differences of sums of up to minutes leave.
_ROUNDING_SECONDS = 1e-13


def format_number(value: float) -> str:
    """1234567 -> '1.23M'."""
    return "".join(_scaled(value))


def format_bytes(value: float) -> str:
    """Bytes in powers of ten: '1.23 MB'."""
    number, suffix = _scaled(value)
    return f"{number} {suffix}B"


def _scaled(value: float) -> tuple[str, str]:
    """A number with three digits, and the suffix of its power of ten."""
    for limit, suffix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * limit:  # rounds up to the limit
            return f"{value / limit:.3g}", suffix
    return f"{value:.3g}", ""


def plural(number: int, noun: str) -> str:
    """2, 'row' -> '2 rows'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_gap(value: float) -> str:
    """A certified gap, a fraction, as a percentage, rounded up: 1.23e-4 -> '0.0123%'."""
    if value > 1e6:  # of no plan, and far beyond it no integer
        return f"{100 * value:.4g}%"
    return "<0.0001%" if value < 1e-6 else f"{math.ceil(1e6 * value) / 1e4:.4g}%"


def format_share(value: float, digits: int = 2) -> str:
    """A fraction as a percentage with so many digits after the point; never -0."""
    return f"{round(100 * value, digits) + 0.0:.{digits}f}%"


def format_duration(seconds: float) -> str:
    """Seconds as µs, ms or s with four digits; 0 where only the rounding of sums is left."""
    if abs(seconds) < _ROUNDING_SECONDS:
        return "0 µs"
    for limit, suffix in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= limit:
            return f"{seconds / limit:.4g} {suffix}"
    return f"{seconds * 1e6:.4g} µs"
