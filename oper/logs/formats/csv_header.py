"""Kinds of a CSV file's first line: names of columns, values, or a comment.

A first line of values that is taken for names loses a sample.
"""

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LETTER = re.compile(r"[^\W\d]")
# Values with letters: times, UUIDs, hexadecimal digits, and words for a missing or a truth value.
_VALUE = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9:.,]+ ?(Z|UTC|[+-][0-9:]+)?"
    r"|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|0x[0-9a-f]+|(?=([a-f]*[0-9]){2})[0-9a-f]{8,}"
    r"|true|false|null|none|nan|na|n/a",
    re.IGNORECASE,
)
_BASE64 = re.compile(r"(?=[^0-9]*[0-9])(?=[^a-z]*[a-z])(?=[^A-Z]*[A-Z])[A-Za-z0-9+/_-]{16,}={0,2}")
_NAMED = re.compile(r"\s*[^\W\d][\w.-]*[=:](?=.)")
_COMMENT = re.compile(r"(#|//|%|--)\s*(.*)", re.DOTALL)
_SEPARATORS = (",", "\t", ";", "|", "\x01", " ")


def are_values(names: Sequence[str]) -> bool:
    """Return whether the fields of a first line are rather values than names: numbers, dates and
    others without a letter, hashes, and empty ones."""
    fields = [name.strip() for name in names if name.strip()]
    return bool(fields) and all(map(_is_value, fields))


def are_encoded(first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether the fields of the first two lines are bytes in base64."""
    fields = [field.strip() for field in (*first, *second)]
    return bool(second) and all(map(_BASE64.fullmatch, fields))


def named_value(first: Sequence[str], others: Sequence[Sequence[str]]) -> str:
    """Return a field of a file's first line that is a value with its name, such as `user=5` or
    `user:5`; empty unless each field is such a value, with its name in the line below too, or a
    bare value.

    Names of columns with a prefix, such as `ns:id` above `ns:5`, are recognised: they lack digits,
    which the values below have, or several fields have the prefix.
    """
    if not others or len(others[0]) != len(first):
        return ""
    field_of: dict[str, str] = {}
    for place, field in enumerate(first):
        name, below = _NAMED.match(field), _NAMED.match(others[0][place])
        if name and below and name[0] == below[0]:
            rest = [line[place][len(name[0]) :] for line in others if len(line) == len(first)]
            lacks_digit = not _has_digit(field[len(name[0]) :]) and all(map(_has_digit, rest))
            if lacks_digit or name[0].strip() in field_of:
                return ""
            field_of[name[0].strip()] = field
        elif not (_is_value(field.strip()) and _is_value(others[0][place].strip())):
            return ""
    return next(iter(field_of.values()), "")


def comment_above(lines: Sequence[str]) -> str:
    """Return the comment in the first of a file's lines; empty if the line has names or values.

    The mark of a comment may precede names, as numpy.savetxt writes them.
    """
    if (first := _COMMENT.match(lines[0])) is None or len(lines) < 2:
        return ""
    if _COMMENT.match(lines[1]):
        return lines[0]
    counts = [(first[2].count(mark), lines[1].count(mark)) for mark in _SEPARATORS]
    are_columns = any(a == b > 0 for a, b in counts) or not any(a or b for a, b in counts)
    return "" if are_columns else lines[0]


def _is_value(field: str) -> bool:
    return bool(_NUMBER.fullmatch(field) or not _LETTER.search(field) or _VALUE.fullmatch(field))


def _has_digit(text: str) -> bool:
    return re.search("[0-9]", text) is not None
