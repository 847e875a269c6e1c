"""JSON lines: an object per line, with a value or a list of values for each column.

A file is read through once when it is opened, because only that tells its columns: any line may
have another one, or the first value that is not an integer. Python's parser does this: it refuses
objects that are nested too deeply, which would end the process in Arrow's. Arrow parses batches
with the types that were found, so columns are read as those of Parquet are.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json as pajson

from oper.base.errors import OperError, one_line
from oper.base.spoken import option
from oper.logs.batches.batch import Batch, Location
from oper.logs.batches.columns import Column, KnownSize, Selection
from oper.logs.formats.arrow_columns import batch_of, column_of
from oper.logs.formats.text_lines import Chunk, beginning, chunks, first_line

_BLOCK_BYTES = 1 << 22
_BOM = b"\xef\xbb\xbf"
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


def is_json(path: Path) -> bool:
    """Return whether a file is JSON lines; OperError where it is JSON of another form."""
    line = first_line(path).removeprefix(_BOM).strip()
    if not line.startswith((b"{", b"[")):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        head = beginning(path, 1 << 16).removeprefix(_BOM).decode("utf-8", "ignore")
        if re.match(r"\s*\[\s*(\{\s*\"|\[\s*[-0-9\"\[]|$)", head) and not re.match(
            r"\s*\[[^\n]*\],", head.partition("\n")[0]
        ):
            raise _array(path) from None
        if re.match(r"\s*\{\s*\"(?:[^\"\\]|\\.)*\"\s*:", head):
            raise OperError(
                f"{path}: expected a JSON object on each line, got one that does not end on its "
                f"line, or is invalid; write an object per line: jq -c . {path.name}"
            ) from None
        return False
    if isinstance(value, list):
        if value and all(isinstance(v, int | float | str) for v in value):
            raise OperError(
                f'{path}: expected a JSON object on each line, got a list; write {{"item": [1, '
                f"2]}} to name the column, or pass {option('--delimiter')} to read it as CSV"
            )
        raise _array(path)
    return True


def _array(path: Path) -> OperError:
    return OperError(
        f"{path}: expected a JSON object on each line, got one array of all samples; write an "
        f"object per line: jq -c '.[]' {path.name}"
    )


class JsonLinesSource(KnownSize):
    """One file of JSON lines, read with the memory of one chunk."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._longest = 0  # bytes of a line
        self.samples = 0
        found: dict[str, _Values] = {}
        for number, line in (entry for chunk in chunks(path) for entry in chunk.lines()):
            self._longest = max(self._longest, len(line))
            self.samples += 1
            extreme = _EXTREME.search(line) is not None
            for name, value in _object(path, number, line, self.samples == 1).items():
                if (values := found.get(name)) is None:
                    values = found[name] = _Values()
                values.add(value, number, extreme)
        self._types: dict[str, Any] = {}
        columns = []
        for name, values in found.items():
            kind, reason = values.kind()
            if kind is None:
                columns.append(Column(name, "other", reason=reason))
            else:
                self._types[name] = kind
                columns.append(column_of(pa.field(name, kind)))
        self.columns = tuple(columns)

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """The samples in file order."""
        wanted = [*selection.features, *selection.dense]
        wanted += [c for c in (selection.label, selection.time) if c is not None]
        reasons = {column.name: column.reason for column in self.columns}
        for name in wanted:
            if name not in self._types:
                raise OperError(
                    f"{self.name}: column {name!r} has {reasons[name]}; write values of one kind "
                    f"or lists of them, or leave the column out with {option('--columns')}"
                )
        schema = pa.schema([pa.field(n, self._types[n]) for n in dict.fromkeys(wanted)])
        form = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
        blocks = pajson.ReadOptions(block_size=max(_BLOCK_BYTES, 2 * self._longest))
        for chunk in chunks(self._path):
            table = self._parsed(chunk, form, blocks)
            location = Location(self.name, 0, "line", chunk.line_of)
            for part in table.combine_chunks().to_batches(selection.batch_rows):
                yield batch_of(part, selection, location)
                location = location.after(part.num_rows)

    def _parsed(self, chunk: Chunk, form: Any, blocks: Any) -> Any:
        try:
            table = pajson.read_json(pa.BufferReader(chunk.text), blocks, form)
        except pa.ArrowInvalid as error:
            for number, line in chunk.lines():
                try:
                    pajson.read_json(pa.BufferReader(line), blocks, form)
                except pa.ArrowInvalid as bad:
                    raise _invalid(self._path, number, bad) from bad
            raise chunk.unparsed(one_line(error)) from error
        if not chunk.is_parsed(table.num_rows):
            raise chunk.unparsed(f"{chunk.samples():,} lines gave {table.num_rows:,} samples")
        return table


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
            self._low = min([self._low, *integers])
            self._high = max([self._high, *integers])

    def kind(self) -> tuple[Any, str]:
        """Return the Arrow type of all values, or None and the reason."""
        is_list = set(self._scalars) == {list}
        kinds = self._items if is_list else self._scalars
        kind = _TYPES.get(frozenset(kinds))
        if kind is None:
            found = " and ".join(f"{_NAMES[k]} in line {n}" for k, n in list(kinds.items())[:2])
            return None, f"lists with {found}" if is_list else found
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
        value = json.loads((line.removeprefix(_BOM) if is_first else line).decode())
    except (ValueError, RecursionError) as error:
        raise _invalid(path, number, error) from error
    if type(value) is not dict:
        raise _invalid(path, number, None)
    return value


def _invalid(path: Path, number: int, error: Exception | None) -> OperError:
    found = "another value" if error is None else one_line(error)
    return OperError(
        f"{path}, line {number}: expected a JSON object, got {found}; correct or remove the line"
    )
