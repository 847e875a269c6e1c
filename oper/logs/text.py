"""Criteo's tab-separated logs and CSV files with one column per feature, plain or compressed.

Criteo's lines are label, 13 integers I1 … I13 and 26 categories C1 … C26 of 8 hexadecimal digits,
which stand for 32-bit numbers; empty fields are missing. The lines of its test set have no label.
"""

import csv
import gzip
import io
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

_BLOCK_BYTES = 1 << 24
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
        self._header: tuple[str, ...] | None = None
        self._hexadecimal: frozenset[str] = frozenset()
        self._quote: str | bool = '"'
        with self._reading():
            head = pacsv.open_csv(
                self._stream(_PEEK_BYTES),
                read_options=pacsv.ReadOptions(block_size=_PEEK_BYTES),
                parse_options=self._parse_options(lambda row: "skip"),
            )
            self.columns = tuple(
                column_of(f, bags=list_separator is not None) for f in head.schema
            )
        self._all = tuple(c.name for c in self.columns)
        repeated = [n for n in self._all if self._all.count(n) > 1]
        if repeated:
            raise OperError(
                f"{path}, line 1: two columns are called {repeated[0]!r}; rename one"
            )

    @classmethod
    def criteo(cls, path: Path, with_label: bool) -> "TextSource":
        """A file in Criteo's own form."""
        source = cls.__new__(cls)
        source.name, source.samples = str(path), None
        source._path, source._delimiter, source._separator = path, "\t", None
        source._quote, source._hexadecimal = False, frozenset(CATEGORIES)
        source._header = (("label",) if with_label else ()) + INTEGERS + CATEGORIES
        source._all = source._header
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
        return lines - (self._header is None)

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """The samples in file order."""
        numbers = [*selection.dense] + ([selection.label] if selection.label else [])
        types = dict.fromkeys(numbers, pa.float32())
        text = pa.string() if self._separator else pa.dictionary(pa.int32(), pa.string())
        types |= dict.fromkeys(selection.features, text)
        if selection.time:
            types[selection.time] = pa.string()
        ragged: list[Any] = []

        def on_ragged(row: Any) -> str:
            ragged.append(row)
            return "error"

        place = Place(self.name, 0, "line", self.line_of)
        with self._reading(lambda message: self._diagnose(message, bool(ragged), types)):
            reader = pacsv.open_csv(
                self._stream(),
                read_options=pacsv.ReadOptions(
                    block_size=_BLOCK_BYTES, column_names=self._header
                ),
                parse_options=self._parse_options(on_ragged),
                convert_options=pacsv.ConvertOptions(
                    column_types=types,
                    include_columns=list(types),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=True,
                ),
            )
            for block in reader:
                for start in range(0, block.num_rows, selection.batch_rows):
                    part = self._split(block.slice(start, selection.batch_rows), selection)
                    yield batch_of(part, selection, place, self._hexadecimal)
                    place = place.after(part.num_rows)

    def line_of(self, sample: int) -> int:
        """The line, from 1, that holds a sample; read anew, as only errors ask."""
        found = sample + (self._header is None)
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

    def _stream(self, limit: int | None = None) -> Any:
        if limit is None:
            return pa.input_stream(str(self._path), compression="detect")
        with open_text(self._path) as file:
            head = file.read(limit)
        # Whole lines only, unless the file has but a part of one.
        end = head.rfind(b"\n") + 1
        return pa.BufferReader(head[:end] if len(head) == limit and end else head)

    def _reading(self, explain: Callable[[str], OperError] | None = None) -> "_Errors":
        return _Errors(self._path, explain)

    def _diagnose(self, message: str, ragged: bool, types: dict[str, Any]) -> OperError:
        """Find the line that Arrow's parser stopped at, which it tells only sometimes."""
        numbers = [n for n, kind in types.items() if kind == pa.float32()]
        with open_text(self._path) as file:
            for number, line in enumerate(file, start=1):
                if not line.strip(b"\r\n") or (number == 1 and self._header is None):
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
    file = open(path, "rb")
    if file.peek(2)[:2] == b"\x1f\x8b":
        return io.BufferedReader(_Gzip(file))
    return file


class _Gzip(gzip.GzipFile):
    """A gzip reader that closes the file it was given."""

    def __init__(self, file: Any) -> None:
        super().__init__(fileobj=file)
        self._raw = file

    def close(self) -> None:
        super().close()
        self._raw.close()


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


