"""Criteo's tab-separated logs and CSV files with one column per feature, plain or compressed.

Criteo's lines are label, 13 integers I1 … I13 and 26 categories C1 … C26 of 8 hexadecimal digits,
which stand for 32-bit numbers; empty fields are missing. The lines of its test set have no label.
"""

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from oper.errors import OperError
from oper.logs.batch import Batch, Place
from oper.logs.columns import Column, Selection
from oper.logs.parquet import batch_of, column_of

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

# Parsed at a time, in blocks that go to the cores.
_CHUNK_BYTES = 1 << 25
_BLOCK_BYTES = 1 << 22
_PEEK_BYTES = 1 << 20
_COUNT_BYTES = 1 << 22
_BRACKETS = "[](){} "


class TextSource:
    """One delimited text file, parsed block by block."""

    def __init__(self, path: Path, delimiter: str, list_separator: str | None = None) -> None:
        self.name = str(path)
        self.samples: int | None = None
        self._path = path
        self._delimiter = delimiter
        self._separator = list_separator
        self._criteo = False
        self._hexadecimal: frozenset[str] = frozenset()
        self._quote: str | bool = '"'
        with self._reading():
            head = pacsv.open_csv(
                pa.BufferReader(self._head()),
                read_options=pacsv.ReadOptions(block_size=_PEEK_BYTES),
                parse_options=self._parse_options(lambda row: "skip"),
            )
            self.columns = tuple(column_of(f, bags=list_separator is not None) for f in head.schema)
        self._all = tuple(c.name for c in self.columns)
        repeated = [n for n in self._all if self._all.count(n) > 1]
        if repeated:
            raise OperError(f"{path}, line 1: two columns are called {repeated[0]!r}; rename one")

    @classmethod
    def criteo(cls, path: Path, with_label: bool) -> "TextSource":
        """A file in Criteo's own form."""
        source = cls.__new__(cls)
        source.name, source.samples = str(path), None
        source._path, source._delimiter, source._separator = path, "\t", None
        source._criteo, source._quote = True, False
        source._hexadecimal = frozenset(CATEGORIES)
        source._all = (("label",) if with_label else ()) + INTEGERS + CATEGORIES
        label = [Column("label", "other")] if with_label else []
        integers = [Column(n, "dense", raw=True) for n in INTEGERS]
        source.columns = (*label, *integers, *(Column(n, raw=True) for n in CATEGORIES))
        return source

    def count(self) -> int:
        """The number of samples: lines that are not empty, without the header."""
        lines = 0
        previous = b"\n"
        with self._reading(), open_text(self._path) as file:
            while block := file.read(_COUNT_BYTES):
                # An empty line is a line end behind a line end.
                block = previous + block.replace(b"\r", b"")
                lines += block.count(b"\n") - block[:1].count(b"\n")
                lines -= len(re.findall(rb"(?<=\n)\n", block))
                previous = block[-1:]
        lines += previous != b"\n"
        return lines - (not self._criteo)

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """The samples in file order."""
        numbers = [*selection.dense] + ([selection.label] if selection.label else [])
        types = dict.fromkeys(numbers, pa.float32())
        # Hexadecimal digits are checked when they are read, so need no check for UTF-8 before.
        types |= {
            name: pa.binary() if name in self._hexadecimal else pa.string()
            for name in selection.features
        }
        if selection.time:
            types[selection.time] = pa.string()
        ragged: list[Any] = []

        def on_ragged(row: Any) -> str:
            ragged.append(row)
            return "error"

        place = Place(self.name, 0, "line", self.line_of)
        with self._reading(lambda message: self._diagnose(message, bool(ragged), types)):
            for chunk in self._chunks():
                table = pacsv.read_csv(
                    pa.BufferReader(chunk),
                    read_options=pacsv.ReadOptions(block_size=_BLOCK_BYTES, column_names=self._all),
                    parse_options=self._parse_options(on_ragged),
                    convert_options=pacsv.ConvertOptions(
                        column_types=types,
                        include_columns=list(types),
                        null_values=[""],
                        strings_can_be_null=True,
                        quoted_strings_can_be_null=True,
                    ),
                )
                for part in table.combine_chunks().to_batches(selection.batch_rows):
                    split = self._split(part, selection)
                    yield batch_of(split, selection, place, self._hexadecimal)
                    place = place.after(part.num_rows)

    def _chunks(self) -> Iterator[bytes]:
        """The lines behind the header, as many at a time as are parsed together."""
        with open_text(self._path) as file:
            if not self._criteo:
                while (line := file.readline()) and not line.strip(b"\r\n"):
                    pass
            rest = b""
            while block := file.read(_CHUNK_BYTES):
                end = block.rfind(b"\n") + 1
                if end:
                    # Arrow takes a text of empty lines alone for an empty file, and refuses it.
                    chunk = rest + block[:end]
                    if not chunk.isspace():
                        yield chunk
                    rest = block[end:]
                else:
                    rest += block
            if rest.strip():
                yield rest

    def line_of(self, sample: int) -> int:
        """The line, from 1, that holds a sample; read anew, as only errors ask."""
        found = sample + (not self._criteo)
        with open_text(self._path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip(b"\r\n"):
                    if not found:
                        return number
                    found -= 1
        return sample + 1

    def _split(self, block: Any, selection: Selection) -> Any:
        """The block with the features' fields split into bags, where a separator is stated."""
        if self._separator is None:
            return block
        columns = {}
        for name in block.schema.names:
            column = block.column(name)
            if name in selection.features:
                column = pc.split_pattern(pc.utf8_trim(column, _BRACKETS), self._separator)
                trimmed = pc.utf8_trim(column.flatten(), " '\"")
                column = pa.ListArray.from_arrays(
                    pa.concat_arrays(
                        [pa.array([0], pa.int32()), pc.cumulative_sum(_sizes(column))]
                    ),
                    trimmed,
                )
            columns[name] = column
        return pa.RecordBatch.from_pydict(columns)

    def _parse_options(self, on_ragged: Callable[[Any], str]) -> Any:
        return pacsv.ParseOptions(
            delimiter=self._delimiter, quote_char=self._quote, invalid_row_handler=on_ragged
        )

    def _head(self) -> bytes:
        """The file's first lines."""
        with open_text(self._path) as file:
            head = file.read(_PEEK_BYTES)
        end = head.rfind(b"\n") + 1
        return head[:end] if len(head) == _PEEK_BYTES and end else head

    def _reading(self, explain: Callable[[str], OperError] | None = None) -> "_Errors":
        return _Errors(self._path, explain)

    def _diagnose(self, message: str, ragged: bool, types: dict[str, Any]) -> OperError:
        """Find the line that Arrow's parser stopped at, which it tells only sometimes."""
        numbers = [n for n, kind in types.items() if kind == pa.float32()]
        with open_text(self._path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip(b"\r\n") or (not seen_header):
                    continue
                try:
                    fields = self._fields(line.decode("utf-8"))
                except UnicodeDecodeError:
                    return OperError(
                        f"{self._path}, line {number}: is not UTF-8 text; convert the file"
                    )
                if ragged and len(fields) != len(self._all):
                    return OperError(
                        f"{self._path}, line {number}: {len(fields)} fields, and "
                        f"{len(self._all)} were needed; mend or remove the line"
                    )
                if len(fields) != len(self._all):
                    continue
                for name in numbers:
                    value = fields[self._all.index(name)]
                    if value and not _is_number(value):
                        return OperError(
                            f"{self._path}, line {number}: column {name!r} is {value!r}, and a "
                            "number was needed; mend the line, or read the column as ids with "
                            "--columns"
                        )
        return OperError(f"{self._path}: cannot be parsed ({message})")

    def _fields(self, line: str) -> list[str]:
        line = line.rstrip("\r\n")
        if self._quote is False:
            return line.split(self._delimiter)
        return next(csv.reader([line], delimiter=self._delimiter), [])


class _Errors:
    """Turns what reading a text file raises into OperError."""

    def __init__(self, path: Path, explain: Callable[[str], OperError] | None) -> None:
        self._path = path
        self._explain = explain

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, pa.ArrowInvalid | pa.ArrowKeyError):
            if self._explain:
                raise self._explain(str(error)) from error
            raise OperError(f"{self._path}: cannot be parsed ({error})") from error
        if isinstance(error, OSError | EOFError | zlib.error):
            raise OperError(
                f"{self._path}: is damaged or truncated ({error}); copy or make it again"
            ) from error


def open_text(path: Path) -> Any:
    """The file's bytes, decompressed where it is gzip."""
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if compressed else open(path, "rb")


def _sizes(column: Any) -> Any:
    return pc.fill_null(column.value_lengths(), 0)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def criteo_fields(path: Path) -> int | None:
    """39 or 40 where the first line is one of Criteo's, else None."""
    with open_text(path) as file:
        line = file.readline(1 << 16)
    fields = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) not in (39, 40):
        return None
    hexadecimal = all(re.fullmatch(rb"[0-9a-fA-F]{0,8}", f) for f in fields[-26:])
    integers = all(re.fullmatch(rb"-?[0-9]*", f) for f in fields[:-26])
    return len(fields) if hexadecimal and integers else None
