"""Criteo's tab-separated logs and CSV files with one column per feature, plain or gzipped.

Criteo's lines are label, 13 integers I1 … I13 and 26 categories C1 … C26 of 8 hexadecimal digits,
which are 32-bit numbers; empty fields are missing. The lines of its test set have no label. A CSV
file begins with a line of column names, unless it is read without: then they are column_1,
column_2, … A field that begins with a quote ends at the next quote that is not doubled, which must
be on the same line: a sample is always one line, so that a stray quote cannot swallow the lines
after it. Lines end in a line feed, with or without carriage returns before it; a carriage return
elsewhere is an error. Empty lines are skipped.
"""

import functools
import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from oper.base.errors import OperError
from oper.files.input_files import LOG, open_file
from oper.logs.batches.batch import Batch, Location
from oper.logs.batches.columns import Column, Selection
from oper.logs.formats.arrow_columns import batch_of
from oper.logs.formats.csv_column_kinds import are_values, csv_columns
from oper.logs.formats.decompression import open_unpacked

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

# A chunk that is read at a time has enough blocks for Arrow to parse on 8 cores at once.
_CHUNK_BYTES = 1 << 25
_BLOCK_BYTES = 1 << 22
_PEEK_BYTES = 1 << 20  # A few thousand lines tell the types of columns.
_MOST_LINE_BYTES = 1 << 26
_MOST_HEADER_BYTES = 1 << 20
_MOST_BLANK_BYTES = 1 << 25  # There may be so many empty lines before the first one.
_SOMETHING = re.compile(rb"[^\r\n]")
_TEXT = re.compile(rb"\S")
_EMPTY_LINES = re.compile(rb"\n(?:\r*\n)+")
# Arrow ends a line here too, and may cut a quoted text in two.
_LONE_RETURN = re.compile(rb"\r[^\r\n]")
_BRACKETS = "[](){} "


@dataclass(frozen=True)
class Form:
    """How to parse the lines of a file; `separator` is between the ids of a bag in a field."""

    columns: tuple[Column, ...]
    delimiter: str
    header: bool = True
    quotes: bool = True
    separator: str | None = None
    hexadecimal: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """All columns in order."""
        return [c.name for c in self.columns]

    def fields(self, line: str) -> list[str] | None:
        """The fields of one line as Arrow parses them; None where a quote is not closed."""
        if not self.quotes or '"' not in line:
            return line.split(self.delimiter)
        fields, start = [], 0
        while start <= len(line):
            quoted = line.startswith('"', start)
            match = _field(self.delimiter, quoted).match(line, start)
            if match is None:
                return None
            fields.append(match[1].replace('""', '"') + match[2] if quoted else match[0])
            start = match.end() + 1
        return fields

    def parse_options(self, on_ragged: Any = None) -> Any:
        """The form as Arrow's options; lines of other lengths are errors unless it is said what to
        do."""
        return pacsv.ParseOptions(
            delimiter=self.delimiter,
            quote_char='"' if self.quotes else False,
            invalid_row_handler=on_ragged,
        )


@dataclass(frozen=True)
class Chunk:
    """Some complete lines of a file, beginning with line `first_line`."""

    path: Path
    text: bytes
    first_line: int
    ends: int  # how many line ends it has

    def samples(self) -> int:
        """The number of lines that are not empty."""
        empty = sum(found.count(b"\n") - 1 for found in _EMPTY_LINES.findall(b"\n" + self.text))
        tail = self.text[self.text.rfind(b"\n") + 1 :].strip(b"\r")
        return self.ends - empty + bool(tail)

    def is_parsed(self, samples: int) -> bool:
        """Whether Arrow's number of samples is one for each line."""
        if b"\r" in self.text and _LONE_RETURN.search(self.text):
            return False
        # Counting the empty lines takes longer, and most logs have none.
        lines = self.ends + (not self.text.endswith(b"\n"))
        return samples == lines or samples == self.samples()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Number and text of each line that is not empty."""
        for number, line in enumerate(self.text.split(b"\n"), start=self.first_line):
            if line.strip(b"\r"):
                yield number, line.rstrip(b"\r")

    def line_of(self, sample: int) -> int:
        """The line that holds sample `sample` of the chunk."""
        return next(number for i, (number, _) in enumerate(self.lines()) if i == sample)

    def open_quote(self, form: Form) -> OperError | None:
        """The error of the first line with an odd number of quotes, one of which is not closed."""
        for number, line in self.lines() if b'"' in self.text else ():
            # Latin-1 will do: quotes and delimiters are single bytes in UTF-8.
            if line.count(b'"') % 2 and form.fields(line.decode("latin-1")) is None:
                return self._stays_open(number)
        return None

    def complaint(self, form: Form, numbers: Sequence[str]) -> OperError | None:
        """The error of the first line that is not a valid sample; None where all are."""
        position = {name: i for i, name in enumerate(form.names)}
        for number, line in self.lines():
            where = f"{self.path}, line {number}"
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                return OperError(f"{where}: is not UTF-8 text; convert the file")
            fields = form.fields(text)
            if fields is None:
                return self._stays_open(number)
            if b"\r" in line:
                return OperError(
                    f"{where}: has a carriage return in the middle, and lines must end in a line "
                    "feed, with or without one before it; remove it"
                )
            if len(fields) != len(form.columns):
                return OperError(
                    f"{where}: {len(fields)} fields, and {len(form.columns)} were needed; mend or "
                    "remove the line"
                )
            for name in numbers:
                value = fields[position[name]]
                if value and not _is_number(value):
                    return OperError(
                        f"{where}: column {name!r} is {value!r}, and a number was needed; correct "
                        "the line, or read the column as ids with --columns"
                    )
        return None

    def _stays_open(self, number: int) -> OperError:
        return OperError(
            f"{self.path}, line {number}: a field begins with a quote that does not close on its "
            "line, and a sample must be one line; remove the quote or close it, or remove the "
            "line ends from the texts"
        )

    def unparsed(self, message: str) -> OperError:
        """The error where Arrow cannot parse the chunk, and each line alone is valid."""
        return OperError(f"{self.path}, from line {self.first_line}: cannot be parsed ({message})")


class TextSource:
    """One delimited text file, read with the memory of one chunk."""

    def __init__(self, path: Path, form: Form) -> None:
        self.name = str(path)
        self.columns = form.columns
        self.samples: int | None = None  # only reading the file tells
        self._path = path
        self._form = form

    def count(self) -> int:
        """The number of samples: lines that are not empty, without the header."""
        return sum(chunk.samples() for chunk in self._chunks())

    def estimate(self) -> int | None:
        """About how many lines, by the length and the compression of the first ones."""
        try:
            with open_file(self._path, LOG) as file:
                packed = file.peek(2)[:2] == b"\x1f\x8b"
                head = (gzip.GzipFile(fileobj=file) if packed else file).read(_PEEK_BYTES)
                share = file.tell() / os.fstat(file.fileno()).st_size
        except (OSError, EOFError, zlib.error) as error:
            raise damaged(self._path, error) from error
        return round(head.count(b"\n") / share) or None

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """The samples in file order."""
        form = self._form
        numbers = [*selection.dense, *([selection.label] if selection.label else [])]
        types = dict.fromkeys(numbers, pa.float32())
        # Hexadecimal digits are checked when they are decoded, so UTF-8 need not be checked here.
        for name in selection.features:
            types[name] = pa.binary() if name in form.hexadecimal else pa.string()
        if selection.time:
            types[selection.time] = pa.string()
        convert = pacsv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=True,
        )
        for chunk in self._chunks():
            try:
                table = pacsv.read_csv(
                    pa.BufferReader(chunk.text),
                    read_options=pacsv.ReadOptions(
                        block_size=_BLOCK_BYTES, column_names=form.names
                    ),
                    parse_options=form.parse_options(),
                    convert_options=convert,
                )
            except pa.ArrowInvalid as error:
                raise chunk.complaint(form, numbers) or chunk.unparsed(str(error)) from error
            if not chunk.is_parsed(table.num_rows):
                found = f"{chunk.samples():,} lines gave {table.num_rows:,} samples"
                raise chunk.complaint(form, numbers) or chunk.unparsed(found)
            location = Location(self.name, 0, "line", chunk.line_of)
            for part in table.combine_chunks().to_batches(selection.batch_rows):
                bags = part if form.separator is None else _split(part, selection, form.separator)
                yield batch_of(bags, selection, location, form.hexadecimal)
                location = location.after(part.num_rows)

    def _chunks(self) -> Iterator[Chunk]:
        """The lines after the header, as many at a time as are parsed together."""
        try:
            with open_unpacked(self._path) as file:
                line = 1
                if self._form.header:
                    while (header := file.readline()) and not header.strip():
                        line += 1
                    line += 1
                rest = b""
                while block := file.read(_CHUNK_BYTES):
                    if len(rest) > _MOST_LINE_BYTES:
                        raise OperError(
                            f"{self._path}, line {line}: is longer than {_MOST_LINE_BYTES:,} "
                            "bytes, and a sample must be one line; is it a log?"
                        )
                    # A short block is the last one; its last line may lack a line feed.
                    last = len(block) < _CHUNK_BYTES
                    end = len(block) if last else block.rfind(b"\n") + 1
                    whole, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
                    ends = whole.count(b"\n")
                    # Arrow refuses a text that has only empty lines.
                    if _SOMETHING.search(whole):
                        yield Chunk(self._path, whole, line, ends)
                    line += ends
                if _SOMETHING.search(rest):
                    yield Chunk(self._path, rest, line, 0)
        except (OSError, EOFError, zlib.error) as error:
            raise damaged(self._path, error) from error


def open_criteo(path: Path) -> TextSource | None:
    """A file in Criteo's own format; None where its first line is not in it."""
    fields = first_line(path).split(b"\t")
    if len(fields) not in (39, 40):
        return None
    hexadecimal = all(re.fullmatch(rb"[0-9a-fA-F]{0,8}", f) for f in fields[-26:])
    integers = all(re.fullmatch(rb"-?[0-9]*", f) for f in fields[:-26])
    if not (hexadecimal and integers):
        return None
    label = [Column("label", "other", reason="labels")] if len(fields) == 40 else []
    numbers = [
        Column(name, "dense", raw=True, reason="a number of Criteo's logs") for name in INTEGERS
    ]
    categories = [Column(name, raw=True) for name in CATEGORIES]
    columns = (*label, *numbers, *categories)
    return TextSource(
        path,
        Form(columns, "\t", header=False, quotes=False, hexadecimal=frozenset(CATEGORIES)),
    )


def open_csv(
    path: Path, separator: str | None, no_header: bool = False, wanted: Collection[str] = ()
) -> TextSource:
    """A file of fields separated by commas or tabs; its first line has their names, or with
    `no_header` is a sample like the others. A line of values is one of names if some of them are
    `wanted`."""
    header = first_line(path)
    if b"\0" in header or not header.strip():
        raise OperError(
            f"{path}: is not a log in a known format: Criteo TSV, CSV, Parquet, .npz, .npy or "
            "FBGEMM .pt"
        )
    delimiter = "\t" if header.count(b"\t") > header.count(b",") else ","
    try:
        with open_unpacked(path) as file:
            head = file.read(_PEEK_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error
    end = head.rfind(b"\n") + 1
    head = head[:end] if len(head) == _PEEK_BYTES and end else head
    form = Form((), delimiter)
    beginning = Chunk(path, head, 1, head.count(b"\n"))
    if complaint := beginning.open_quote(form):
        raise complaint  # The types of columns would be wrong.
    if b"\r" in header:
        raise OperError(
            f"{path}: has a carriage return within its first line, and lines must end in a line "
            "feed, with or without one before it; convert the file"
        )
    try:
        fields = form.fields(header.decode("utf-8")) or ()  # No quote of it stays open.
        given = [f"column_{i}" for i in range(1, len(fields) + 1)] if no_header else []
        first = 0 if no_header else 1  # The names may be the first line.
        columns = csv_columns(
            # Arrow cannot tell the handler of a line that is no UTF-8, and prints a traceback.
            head.decode("utf-8", "replace").encode() + b"\n",
            form.parse_options(lambda row: "skip"),
            lambda sample: beginning.line_of(sample + first),
            bags=separator is not None,
            names=given,
        )
    except (pa.ArrowInvalid, UnicodeDecodeError) as error:
        what = "" if no_header else " with a line of column names"
        raise OperError(f"{path}: cannot be read as text{what} ({error}); is it a log?") from error
    names = [c.name for c in columns]
    if not no_header and are_values(names) and set(names).isdisjoint(wanted):
        raise OperError(
            f"{path}: its first line, {header[:80].decode('utf-8', 'ignore')!r}, has values, and "
            "names of columns were needed; if it is a sample, pass --no-header (from Python: "
            "no_header=True); if these are names, choose columns by them with "
            "--columns"
        )
    repeated = next((name for name, number in Counter(names).items() if number > 1), None)
    if repeated is not None:
        raise OperError(
            f"{path}, line 1: two columns are called {repeated!r}; rename one, or pass "
            "--no-header if it is a sample"
        )
    return TextSource(path, Form(columns, delimiter, header=not no_header, separator=separator))


def first_line(path: Path) -> bytes:
    """The first line that is not empty, without its end; OperError where it cannot be read.

    Nothing where there is none in the first 32 MiB, or where it is longer than 1 MiB.
    """
    try:
        with open_unpacked(path) as file:
            head = b""
            for _ in range(_MOST_BLANK_BYTES // _MOST_HEADER_BYTES):
                head += file.read(_MOST_HEADER_BYTES)
                if found := _TEXT.search(head):
                    head = head[head.rfind(b"\n", 0, found.start()) + 1 :]
                    head += file.read(max(_MOST_HEADER_BYTES - len(head), 0))
                    end = head.find(b"\n")
                    is_whole = end >= 0 or len(head) < _MOST_HEADER_BYTES
                    return (head[:end] if end >= 0 else head).rstrip(b"\r") if is_whole else b""
                head = head[head.rfind(b"\n") + 1 :][-_MOST_HEADER_BYTES:]
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error
    return b""


def damaged(path: Path, error: Exception) -> OperError:
    """The error for a file that stops or breaks while it is read."""
    return OperError(f"{path}: is damaged or truncated ({error}); copy or write it again")


def _split(part: Any, selection: Selection, separator: str) -> Any:
    """The batch with fields of features split into bags, without brackets and quotes."""
    columns = []
    for name in part.schema.names:
        column = part.column(name)
        if name in selection.features:
            bags = pc.split_pattern(pc.utf8_trim(column, _BRACKETS), separator)
            sizes = pc.fill_null(bags.value_lengths(), 0)
            ends = pc.cumulative_sum(sizes)
            starts_and_end = pa.concat_arrays([pa.array([0], ends.type), ends])
            column = pa.ListArray.from_arrays(starts_and_end, pc.utf8_trim(bags.flatten(), " '\""))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=part.schema.names)


@functools.cache
def _field(delimiter: str, quoted: bool) -> re.Pattern[str]:
    """Matches a field; of a quoted one, what is in the quotes and what follows them."""
    rest = f"[^{re.escape(delimiter)}]*+"
    return re.compile(f'"((?:[^"]|"")*+)"({rest})' if quoted else rest)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
