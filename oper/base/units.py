"""Sizes as people write them: `64GB` is 64·10⁹ bytes, `512MiB` is 512·2²⁰."""

import re

from oper.base.errors import OperError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kKmMgGtT]?(?:i?[bB])?)\s*")


def parse_bytes(text: str, name: str) -> int:
    """`64GB`, `512MiB` or a bare number of bytes -> bytes; OperError names what it was for."""
    match = _SIZE.fullmatch(text)
    if not match or match[2].upper() not in _UNITS:
        raise OperError(f"{name} {text!r}: a size was needed, such as 64GB or 512MiB")
    number, unit = match[1], _UNITS[match[2].upper()]
    # Whole numbers stay integers: a float holds bytes exactly only up to 2^53.
    return int(number) * unit if number.isdigit() else int(float(number) * unit)
