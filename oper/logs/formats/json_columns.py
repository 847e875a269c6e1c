"""Columns of JSON lines, found in all lines: any line may add a column or another kind of value.

Arrow checks most lines, many at a time: it accepts objects that have only the columns and types of
the lines before. Python's parser reads the lines that Arrow refuses, and names the line and the
kinds of its values. It also reads lines that Arrow could read as other samples or not survive:
objects that go over several lines, are nested too deeply, or are not UTF-8.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from oper.base.errors import OperError, one_line
from oper.logs.formats.text_lines import BOM, Chunk, chunks

_PIECE_BYTES = 1 << 20  # for Python's parser, if a line has a new kind of value
_MOST_BRACKETS = 1000  # per line that Arrow parses: more could end the process in its recursion
_MOST_CELLS = 1 << 24  # that Arrow fills per piece, with values or nulls
# Lines without such bytes have integers from 0 to 10^18.
_EXTREME = re.compile(rb"[0-9]{19}|-")
_TYPES = {
    frozenset[type](): pa.null(),
    frozenset({bool}): pa.bool_(),
    frozenset({int}): pa.int64(),
    frozenset({float}): pa.float64(),
    frozenset({int, float}): pa.float64(),
    frozenset({str}): pa.string(),
}
_NAMES = {
    bool: "a truth value",
    int: "an integer",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "an object",
}


class JsonColumns:
    """The columns of a file of JSON lines.

    samples: the number of its lines. longest: an upper bound of the bytes of a line.
    """

    def __init__(self, path: Path) -> None:
        self.samples = self.longest = 0
        self._path = path
        self._found: dict[str, _Values] = {}
        for piece in (part for chunk in chunks(path) for part in _pieces(chunk)):
            if not self._check(piece):
                self._read(piece)

    def kinds(self) -> dict[str, tuple[Any, str]]:
        """Return the Arrow type of each column, or None and the reason."""
        return {name: values.kind() for name, values in self._found.items()}

    def _check(self, piece: Chunk) -> bool:
        """Note a piece if it has only known columns and types; otherwise return False."""
        kinds = {name: kind for name, (kind, _) in self.kinds().items()}
        longest = _longest_object(piece.text)
        if not kinds or None in kinds.values() or longest is None:
            return False
        if len(kinds) * piece.ends > _MOST_CELLS:
            return False
        form = pajson.ParseOptions(
            explicit_schema=pa.schema(list(kinds.items())), unexpected_field_behavior="error"
        )
        # Other threads would still parse if one of them fails and the process ends.
        blocks = pajson.ReadOptions(use_threads=False, block_size=len(piece.text) + 1)
        try:
            piece.text.decode()
            table = pajson.read_json(pa.BufferReader(piece.text), blocks, form)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return False
        if table.num_rows != piece.samples():
            return False
        for name, column in zip(table.column_names, table.columns, strict=True):
            values = pc.list_flatten(column) if pa.types.is_list(column.type) else column
            if pa.types.is_integer(values.type) and len(values) > values.null_count:
                bounds = pc.min_max(values).as_py()
                self._found[name].widen(bounds["min"], bounds["max"])
        self.samples += table.num_rows
        self.longest = max(self.longest, longest)
        return True

    def _read(self, piece: Chunk) -> None:
        """Note a piece by its objects; raise OperError if a line is not an object."""
        for number, line in piece.lines():
            self.longest = max(self.longest, len(line))
            self.samples += 1
            extreme = _EXTREME.search(line) is not None
            for name, value in _object(self._path, number, line, self.samples == 1).items():
                if (values := self._found.get(name)) is None:
                    values = self._found[name] = _Values()
                values.add(value, number, extreme)


def _pieces(chunk: Chunk) -> Iterator[Chunk]:
    """Yield the lines of a chunk, fewer at a time, with line ends of one byte."""
    text = chunk.text.replace(b"\r\n", b"\n") if b"\r" in chunk.text else chunk.text
    start, line = 0, chunk.first_line
    while start < len(text):
        end = text.find(b"\n", start + _PIECE_BYTES) + 1 or len(text)
        part = text[start:end]
        piece = replace(chunk, text=part, first_line=line, ends=part.count(b"\n"))
        yield piece
        start, line = end, line + piece.ends


def _longest_object(text: bytes) -> int | None:
    """Return the length of the longest line; None unless each line that is not empty begins and
    ends as an object, and has few brackets."""
    content = np.frombuffer(b"\n" + text.rstrip(b"\n") + b"\n", np.uint8)
    ends = np.flatnonzero(content == ord("\n"))
    lengths = np.diff(ends) - 1
    filled = lengths > 0
    first, last = content[ends[:-1] + 1][filled], content[ends[1:] - 1][filled]
    brackets = np.flatnonzero((content | 0x20) == ord("{"))
    opened = np.diff(np.searchsorted(brackets, ends))
    if (first != ord("{")).any() or (last != ord("}")).any() or (opened > _MOST_BRACKETS).any():
        return None
    return int(lengths.max())


class _Values:
    """The values of one column: the first line of each kind, and the bounds of integers."""

    def __init__(self) -> None:
        self._scalars: dict[type, int] = {}
        self._items: dict[type, int] = {}  # of lists
        self._low = self._high = 0

    def add(self, value: Any, line: int, extreme: bool) -> None:
        """Note a value; `extreme`: it may be an integer that is negative or large."""
        kind = type(value)
        if kind not in self._scalars and value is not None:
            self._scalars[kind] = line
        if kind is list:
            for item in set(map(type, value)):
                if item is not type(None):
                    self._items.setdefault(item, line)
        if extreme:
            integers = [v for v in (value if kind is list else [value]) if type(v) is int]
            self.widen(min(integers, default=0), max(integers, default=0))

    def widen(self, low: int, high: int) -> None:
        """Note the bounds of integers."""
        self._low, self._high = min(self._low, low), max(self._high, high)

    def kind(self) -> tuple[Any, str]:
        """Return the Arrow type of all values, or None and the reason."""
        is_list = set(self._scalars) == {list}
        kinds = self._items if is_list else self._scalars
        kind = _TYPES.get(frozenset(kinds))
        if kind is None:
            listed = " and ".join(f"{_NAMES[k]} in line {n}" for k, n in list(kinds.items())[:2])
            return None, f"lists with {listed}" if is_list else listed
        if kind == pa.int64() and self._high >= 2**63:
            kind = pa.uint64()
        if kind in (pa.int64(), pa.uint64()) and (
            self._high >= 2**64 or self._low < (0 if kind == pa.uint64() else -(2**63))
        ):
            bad = self._high if self._high >= 2**63 else self._low
            return None, f"the integer {bad}, and integers must fit in 64 bits together"
        return pa.list_(kind) if is_list else kind, ""


def _object(path: Path, number: int, line: bytes, is_first: bool) -> dict[str, Any]:
    """Return the object of a line."""
    try:
        value = json.loads((line.removeprefix(BOM) if is_first else line).decode())
    except (ValueError, RecursionError) as error:
        raise invalid(path, number, error) from error
    if type(value) is not dict:
        raise invalid(path, number, None)
    return value


def invalid(path: Path, number: int, error: Exception | None) -> OperError:
    """Return the error of a line that is not an object."""
    got = "another value" if error is None else one_line(error)
    return OperError(
        f"{path}, line {number}: expected a JSON object, got {got}; correct or remove the line"
    )
