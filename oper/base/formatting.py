"""Printed form of numbers and foreign text: sizes, durations, counts, factors, gaps, and names from
outside of this process.

No number has an exponent or a sign before zero: rounding errors of differences are printed as 0.
"""

import math
import unicodedata

# Far below the time of a byte, and above the rounding errors of differences of sums of up to
# minutes.
_ROUNDING_SECONDS = 1e-13
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_LEAST = 1e-3  # of a row or a byte


def format_digits(value: float, digits: int) -> str:
    """Return a number rounded to `digits` significant digits: 0.00012345 -> '0.0001234', 1e20 in
    full."""
    rounded = float(f"{value:.{digits}g}")
    if not rounded:
        return "0"
    if not math.isfinite(rounded):  # only of damaged files
        return f"{rounded}"
    after_point = max(digits - 1 - math.floor(math.log10(abs(rounded))), 0)
    text = f"{rounded:,.{after_point}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_number(value: float) -> str:
    """Return a number with a suffix: 1234567 -> '1.23M'."""
    return "".join(_scaled(value))


def format_bytes(value: float) -> str:
    """Return bytes in powers of ten: '1.23 MB'."""
    number, suffix = _scaled(value)
    return f"{number} {suffix}B"


def _scaled(value: float) -> tuple[str, str]:
    """Return a number with three digits, and the suffix of its power of ten."""
    for limit, suffix in _SUFFIXES:
        if abs(value) >= 0.9995 * limit:  # rounds up to the limit
            return format_digits(value / limit, 3), suffix
    if abs(value) >= _LEAST:
        return format_digits(value, 3), ""
    return ("0" if abs(value) < _ROUNDING_SECONDS or value < 0 else f"<{_LEAST}"), ""


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: 2, 'row' -> '2 rows'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_factor(value: float) -> str:
    """Return a factor as text: '1.00', '12.3', '1,235'."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{round(value, 2) + 0.0:.2f}" if value < 9.995 else f"{value:.1f}"


def format_gap(value: float | None) -> str:
    """Return a certified gap, a fraction, as a percentage, rounded up: 1.23e-4 -> '0.0123%';
    'unknown' of None."""
    if value is None:
        return "unknown"
    if value < 1e-6:
        return "<0.0001%"
    if not value <= 1e6:  # of no plan, and far beyond it no integer
        return f"{format_digits(100 * value, 4)}%"
    return f"{format_digits(math.ceil(1e6 * value) / 1e4, 4)}%"


def at_most(gap: float) -> str:
    """Return a certified gap as words: 'at most 0.0123%', 'less than 0.0001%'."""
    shown = format_gap(gap)
    return f"less than {shown[1:]}" if shown.startswith("<") else f"at most {shown}"


def format_share(value: float, digits: int = 2) -> str:
    """Return a fraction as a percentage with `digits` digits after the point; never -0."""
    return f"{round(100 * value, digits) + 0.0:,.{digits}f}%"


def format_percent(value: float) -> str:
    """Return a fraction as a percentage with three digits: 0.00025 -> '0.025%'."""
    return f"{format_digits(100 * value, 3)}%"


def format_duration(seconds: float) -> str:
    """Return seconds as ns, µs, ms or s with four digits; 0 if only the rounding of sums is
    left."""
    if abs(seconds) < _ROUNDING_SECONDS:
        return "0 µs"
    for limit, suffix in _UNITS:
        if abs(seconds) >= 0.99995 * limit:  # rounds up to the limit
            return f"{format_digits(seconds / limit, 4)} {suffix}"
    return f"{format_digits(seconds * 1e9, 4)} ns"


def printable(text: str, kept: str = "") -> str:
    """Return text such as a name in a log, made fit to print: control characters, those that
    reverse the direction of writing, and all other invisible characters become `\\x1b` or
    `\\u202e`. Only spaces of any width, joiners and separators of letters, and characters of `kept`
    stay.

    Printed unchanged, they would recolour a terminal or make it carry out a name.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if character.isprintable() or character in kept or _is_spelling(character)
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def _is_spelling(character: str) -> bool:
    return unicodedata.category(character) == "Zs" or character in "\u200c\u200d"
