"""Quantities as people write them: `64GB` is 64·10⁹ bytes, `1d` 86,400 seconds, `5%` 0.05."""

import math
import operator
import re
from decimal import Decimal
from typing import Any

from oper.base.errors import OperError

GB = 1e9
MOST_BYTES = 1 << 60  # of a size: a million terabytes, of which eight are counted in 64 bits

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{0,30})?)\s*([kKmMgGtT]?(?:i?[bB])?)\s*")
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([smhdw]?)\s*")
_SHARE = re.compile(r"\s*([0-9.eE+-]+)\s*(%?)\s*")


def whole_number(given: Any, what: str) -> int:
    """Return a whole number, also NumPy's, as Python's; OperError names its purpose."""
    try:
        if isinstance(given, bool):
            raise TypeError
        return operator.index(given)
    except TypeError as error:
        raise OperError(f"{what}: expected a whole number, got {str(given)[:40]!r}") from error


def finite_number(given: Any, what: str) -> float:
    """Return a finite number, also NumPy's or torch's, as Python's float; OperError names its
    purpose. A text is refused: its meaning depends on its author."""
    try:
        if isinstance(given, bool | str | bytes):
            raise TypeError
        number = float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise OperError(f"{what}: expected a finite number, got {str(given)[:40]!r}")
    return number


def positive_seconds(given: Any, what: str) -> float:
    """Return a finite number of seconds above 0; OperError names its purpose."""
    seconds = finite_number(given, what)
    if seconds <= 0:
        raise OperError(f"{what}: expected a positive number of seconds, got {seconds:g}")
    return seconds


def parse_bytes(text: str, name: str) -> int:
    """Parse `64GB`, `512MiB` or a bare number of bytes; OperError names its purpose."""
    match = _SIZE.fullmatch(text)
    if not match or match[2].upper() not in _UNITS:
        raise OperError(f"{name} {text!r}: expected a size, such as 64GB or 512MiB")
    number, unit = match[1], _UNITS[match[2].upper()]
    # Whole numbers stay integers: a float holds bytes exactly only up to 2^53.
    size = int(number) * unit if number.isdigit() else int(float(number) * unit)
    if size > MOST_BYTES:
        raise OperError(f"{name} {text!r}: at most {MOST_BYTES:,} bytes were expected")
    return size


def parse_seconds(text: str, name: str) -> float:
    """Parse `1d`, `12h`, `30m`, `90s` or a bare number of seconds; OperError names its purpose."""
    match = _DURATION.fullmatch(text)
    if not match or float(match[1]) == 0:
        raise OperError(f"{name} {text!r}: expected a span, such as 1d, 12h or a number")
    return float(match[1]) * _SECONDS[match[2]]


def parse_share(text: str, name: str) -> float:
    """Parse `5%` or `0.05` as 0.05; OperError names its purpose.

    A bare number above 1 is refused: 5 is more likely to mean 5% than 500%.
    """
    match = _SHARE.fullmatch(text)
    try:
        # 99.9 / 100 is 0.9990000000000001 in floats.
        value = float(Decimal(match[1]).scaleb(-2 if match[2] else 0)) if match else float("nan")
    except ArithmeticError:
        value = float("nan")
    if not 0 <= value < float("inf") or (value > 1 and not text.rstrip().endswith("%")):
        raise OperError(
            f"{name} {text!r}: expected a percentage, such as 5%, or a fraction from 0 to 1, such "
            "as 0.05"
        )
    return value
