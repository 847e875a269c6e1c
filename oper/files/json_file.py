"""JSON, read as strictly as it is written: no key twice, no number without end, no endless nesting.

Python's parser keeps the last of two equal keys, takes seconds or fails with its own errors for
numbers of thousands of digits, and ends the recursion of deep documents with a RecursionError. Its
writer takes a second for a million numbers: matrices of a thousand ranks have millions, of which
few differ, and each of these is written out once (`with_matrix_texts`).
"""

import json
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.files.input_files import JSON, Kind, read_text

MOST_DIGITS = 40  # No id, count or number of bytes has more.
_MATRIX_DEPTH = 8  # of a file, in which matrices are looked for


class MatrixText(str):
    """A matrix of floats as its JSON text."""


def with_matrix_texts(content: Any, depth: int = _MATRIX_DEPTH) -> Any:
    """Return `content` with its matrices of floats, arrays or lists of lists, as their text.

    Those that are values of objects, up to so many lists and objects in each other; other arrays
    become lists.
    """
    if isinstance(content, dict) and depth:
        return {key: with_matrix_texts(value, depth - 1) for key, value in content.items()}
    if isinstance(content, np.ndarray):
        is_matrix = content.ndim == 2 and content.dtype == np.float64
        return _matrix_text(content) if is_matrix else content.tolist()
    if isinstance(content, list) and content and depth:
        if isinstance(content[0], dict):
            return [with_matrix_texts(item, depth - 1) for item in content]
        if isinstance(content[0], list):
            equal = all(type(row) is list and len(row) == len(content[0]) for row in content)
            if equal and set(map(type, chain.from_iterable(content))) == {float}:
                return _matrix_text(np.array(content))
    return content


def _matrix_text(matrix: NDArray[np.float64]) -> MatrixText:
    """Return the text that `json.dumps` makes of the matrix as a list of lists."""
    if not matrix.size:
        return MatrixText(json.dumps(matrix.tolist()))
    bits = np.ascontiguousarray(matrix).view(np.int64)  # by which 0.0 and -0.0 differ
    different, place = np.unique(bits, return_inverse=True)
    texts = json.dumps(different.view(np.float64).tolist())[1:-1].split(", ")
    rows = np.array(texts, dtype=object)[place.reshape(matrix.shape)]
    return MatrixText("[" + ", ".join("[" + ", ".join(row) + "]" for row in rows.tolist()) + "]")


def write_json(path: Path | str, content: Any) -> None:
    """Write `content` as indented JSON, keys in the order given; a list of numbers is one line."""
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(_indented(with_matrix_texts(content), "\n"))
        file.write("\n")


def canonical_json(content: Any, depth: int = _MATRIX_DEPTH) -> Iterator[str]:
    """Yield the text of `content`, whose matrices are texts (`with_matrix_texts`), in pieces, with
    sorted keys and no white space."""
    if isinstance(content, dict) and content and depth:
        first = "{"
        for key in sorted(content):
            yield f"{first}{json.dumps(key)}:"
            yield from canonical_json(content[key], depth - 1)
            first = ","
        yield "}"
    elif _has_objects(content) and depth:
        first = "["
        for item in content:
            yield first
            yield from canonical_json(item, depth - 1)
            first = ","
        yield "]"
    elif isinstance(content, MatrixText):
        yield content.replace(" ", "")
    else:
        yield json.dumps(content, sort_keys=True, separators=(",", ":"))


def _has_objects(content: Any) -> bool:
    return isinstance(content, list) and any(isinstance(item, dict) for item in content)


def _indented(content: Any, line: str) -> Iterator[str]:
    """Yield the text of `content` in pieces; `line` begins a line at its depth."""
    if isinstance(content, dict) and content:
        first, last = "{}"
        items: Any = ((f"{json.dumps(str(key))}: ", value) for key, value in content.items())
    elif _has_objects(content):
        first, last = "[]"
        items = (("", item) for item in content)
    else:
        yield content if isinstance(content, MatrixText) else json.dumps(content)
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
    """Return the content of a JSON text; ValueError (JSONDecodeError for its syntax) if it has
    none."""
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
