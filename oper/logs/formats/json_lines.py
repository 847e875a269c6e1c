"""JSON lines: an object per line, with a value or a list of values for each column.

A file is read through once when it is opened, because its columns are unknown before
(`json_columns.py`). Arrow parses batches with the types found, so columns are read like those of
Parquet.
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
from oper.logs.formats.json_columns import JsonColumns, invalid
from oper.logs.formats.text_lines import BOM, Chunk, beginning, chunks, first_line

_BLOCK_BYTES = 1 << 22


def is_json(path: Path) -> bool:
    """Return whether a file is JSON lines; raise OperError if it is JSON of another form."""
    line = first_line(path).removeprefix(BOM).strip()
    if not line.startswith((b"{", b"[")):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        head = beginning(path, 1 << 16).removeprefix(BOM).decode("utf-8", "ignore")
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
        content = JsonColumns(path)
        self.samples, self._longest = content.samples, content.longest
        self._types: dict[str, Any] = {}
        columns = []
        for name, (kind, reason) in content.kinds().items():
            if kind is None:
                columns.append(Column(name, "other", reason=reason))
            else:
                self._types[name] = kind
                columns.append(column_of(pa.field(name, kind)))
        self.columns = tuple(columns)

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the samples in file order."""
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
                    raise invalid(self._path, number, bad) from bad
            raise chunk.unparsed(one_line(error)) from error
        if not chunk.is_parsed(table.num_rows):
            raise chunk.unparsed(f"{chunk.samples():,} lines gave {table.num_rows:,} samples")
        return table
