"""JSON as strictly as it is written: no key twice, no number without end, no endless nesting.

Python's parser keeps the last of two equal keys, takes seconds or fails with its own errors for
numbers of thousands of digits, and ends the recursion of deep documents with a RecursionError.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from oper.files.input_files import JSON, Kind, read_text

MOST_DIGITS = 40  # No id, count or number of bytes has more.


def write_json(path: Path | str, content: Any) -> None:
    """Write `content` as indented JSON, keys in the order given; a list of numbers is one line."""
    Path(path).write_text("".join(_indented(content, "\n")) + "\n", encoding="utf-8")


def _indented(content: Any, line: str) -> Iterator[str]:
    """The text of `content` in pieces; `line` begins a line at its depth.

    What holds no object goes to the encoder without indentation, which is native: the matrices of
    a thousand ranks have three million numbers.
    """
    if isinstance(content, dict) and content:
        first, last = "{}"
        items: Any = ((f"{json.dumps(str(key))}: ", value) for key, value in content.items())
    elif isinstance(content, list) and any(isinstance(item, dict) for item in content):
        first, last = "[]"
        items = (("", item) for item in content)
    else:
        yield json.dumps(content)
        return
    for name, value in items:
        yield f"{first}{line} {name}"
        yield from _indented(value, line + " ")
        first = ","
    yield line + last


def read_json(path: Path | str, kind: Kind = JSON) -> Any:
    """Read a JSON file; OperError names the file, and line and column of a syntax error."""
    text = read_text(path, kind)
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise OperError(
            f"{path}, line {error.lineno}, column {error.colno}: is not JSON ({error.msg}); "
            "the file is damaged or incomplete: write or copy it again"
        ) from error
    except ValueError as error:
        raise OperError(f"{path}: {error}; the file was changed: write or copy it again") from error


def parse_json(text: str) -> Any:
    """The content of a JSON text; ValueError (JSONDecodeError for its syntax) where it has none."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_int=_integer)
    except RecursionError as error:
        raise ValueError("is nested more deeply than any file of oper") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        [(repeated, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"has the key {repeated[:80]!r} twice in one object")
    return content


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"has a number of {len(digits):,} digits, {digits[:20]}…")
    return int(digits)
