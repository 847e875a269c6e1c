"""Separator of a text file's columns: found in its first lines, or given.

A separator of columns is in every line, names included, equally often. Commas and tabs count
anywhere; `::`, `;`, `|` and the control character that Hive writes count only outside of quotes.
Spaces and other characters may be within values, so they are never chosen automatically.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from oper.base.errors import OperError
from oper.base.spoken import option

_CERTAIN = ("::", "\x01")  # hardly ever within values
_POSSIBLE = (";", "|")
_ASKED = (" ", ":", "~", "^", "#", "\x02", "\x1c", "\x1d", "\x1e", "\x1f", "¦")
ANY = re.compile("[,\t" + re.escape("".join((*_CERTAIN, *_POSSIBLE, *_ASKED))) + "]")
_QUOTED = re.compile(r'"(?:[^"]|"")*"')
_WIDE = re.compile(r"\S {2,}\S")  # spaces that fill a column up
_MOST_LINES = 1000
_STAND_IN = "\x1f"  # Arrow takes single bytes only


def find_delimiter(path: Path, lines: Sequence[str], list_separator: str | None) -> str:
    """Return the separator of columns in a file that begins with `lines`.

    Raise OperError if there may be several, or if only one column would be read although another
    character is equally often in every line.
    """
    header = lines[0]
    plain = [_QUOTED.sub("", line.strip()) for line in lines[:_MOST_LINES]]
    usual = "\t" if header.count("\t") > header.count(",") else ","
    other = "," if usual == "\t" else "\t"

    def separates(mark: str) -> bool:
        numbers = {_count(line, mark) for line in plain}
        return mark != list_separator and len(numbers) == 1 and numbers != {0}

    for mark in _CERTAIN:
        if separates(mark):
            return mark
    possible = [mark for mark in _POSSIBLE if separates(mark)]
    certain = next((mark for mark in (usual, other) if separates(mark)), None)
    if certain is None and usual not in header and len(possible) == 1:
        return possible[0]
    if possible and len(plain) > 1:
        marks = ([certain] if certain else [usual] if usual in header else []) + possible
        raise OperError(
            f"{path}: its columns may be separated by {' or '.join(map(repr, marks))}; pass "
            f"{option('--delimiter', marks[0])} or {option('--delimiter', marks[1])}"
        )
    if certain is not None or usual in header:
        return certain or usual
    asked = next((mark for mark in _ASKED if separates(mark)), None)
    if asked is not None and len(plain) > 1:
        raise OperError(
            f"{path}: every line has {asked!r} equally often, and no other separator of columns; "
            f"pass {option('--delimiter', asked)} if it separates columns, "
            f"{option('--list-separator', asked)} if a line is one bag of ids, or "
            f"{option('--delimiter', ',')} if a line is one value"
        )
    wide = sum(_WIDE.search(line) is not None for line in plain)
    if list_separator != " " and _WIDE.search(plain[0]) and 2 * wide > len(plain) > 1:
        raise OperError(
            f"{path}: expected a separator of columns, got columns of fixed width; pass "
            f"{option('--delimiter', 'space')} if no value is empty or has a space, or convert it: "
            "pandas.read_fwf, then DataFrame.to_parquet"
        )
    return usual


def single_byte(delimiter: str) -> str:
    """Return the delimiter that Arrow gets for one that may be longer."""
    return delimiter if delimiter.isascii() and _is_single(delimiter) else _STAND_IN


def with_single_bytes(delimiter: str, text: bytes) -> bytes:
    """Return a file's text with the delimiter of `single_byte`, except within quotes.

    A space stands for a run of spaces; spaces around a line do not count.
    """
    stand_in = single_byte(delimiter).encode()
    if stand_in == delimiter.encode():
        return text
    mark = re.escape(delimiter).encode()
    if delimiter == " ":
        text = re.sub(rb"(?m)^ +| +(?=\r*$)", b"", text)
        mark = b" +"
    if b'"' not in text:
        return re.sub(mark, stand_in, text)
    # A quote opens a field at its beginning only.
    return re.sub(
        rb'(?m)(^|%b)("(?:[^"\n]|"")*")|%b' % (mark, mark),
        lambda m: m[2] if m[1] == b"" else stand_in + (m[2] or b""),
        text,
    )


def _is_single(delimiter: str) -> bool:
    return len(delimiter) == 1 and delimiter != " "


def _count(line: str, mark: str) -> int:
    return len(re.findall(" +", line)) if mark == " " else line.count(mark)
