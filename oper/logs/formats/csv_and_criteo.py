"""Criteo's tab-separated logs and CSV files with one column per feature, plain or gzipped.

Criteo's lines are label, 13 integers I1 … I13 and 26 categories C1 … C26 of 8 hexadecimal digits,
which are 32-bit numbers; empty fields are missing. The lines of its test set have no label. A CSV
file begins with a line of column names, unless it is read without: then they are column_1,
column_2, … A field that begins with a quote ends at the next quote that is not doubled, which must
be on the same line: a sample is always one line, so that a stray quote cannot swallow the lines
after it. Lines end in a line feed, with or without carriage returns before it; a carriage return
elsewhere is an error. Empty lines are skipped.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.logs.batches.batch import Batch, Location
from oper.logs.batches.columns import Column, Selection
from oper.logs.batches.log_options import LogOptions
from oper.logs.batches.number_texts import SPACES
from oper.logs.batches.separators import separator
from oper.logs.formats.arrow_columns import batch_of
from oper.logs.formats.csv_column_kinds import csv_columns
from oper.logs.formats.csv_form import Form
from oper.logs.formats.csv_header import (
    are_encoded,
    are_values,
    comment_above,
    named_value,
)
from oper.logs.formats.delimiters import ANY, find_delimiter
from oper.logs.formats.text_lines import (
    BOM,
    Chunk,
    chunks,
    estimated_lines,
    first_line,
    first_lines,
)

INTEGERS = tuple(f"I{i}" for i in range(1, 14))
CATEGORIES = tuple(f"C{i}" for i in range(1, 27))

_BLOCK_BYTES = 1 << 22
_BRACKETS = "[](){} "
_MOST_COMPARED = 100  # lines that tell names from values with names


class TextSource:
    """One delimited text file, read with the memory of one chunk."""

    def __init__(self, path: Path, form: Form) -> None:
        self.name = str(path)
        self.columns = form.columns
        self.samples: int | None = None  # only reading the file tells
        self._path = path
        self._form = form

    def count(self) -> int:
        """Return the number of samples: lines that are not empty, without the header."""
        return sum(chunk.samples() for chunk in self._chunks())

    def estimate(self) -> int | None:
        """Return an estimate of the number of lines, from the length and the compression of the
        first ones."""
        return estimated_lines(self._path)

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the samples in file order."""
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
        header = self._header()
        for chunk in self._chunks():
            if header and (again := header.search(b"\n" + chunk.text)):
                number = chunk.first_line + chunk.text.count(b"\n", 0, again.start())
                raise OperError(
                    f"{self.name}, line {number}: expected a sample, got the names of the columns "
                    "again; remove the line (files put together have one for each)"
                )
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
                raise form.complaint(chunk, numbers) or chunk.unparsed(str(error)) from error
            if not chunk.is_parsed(table.num_rows) or form.stays_open(chunk):
                difference = f"{chunk.samples():,} lines gave {table.num_rows:,} samples"
                raise form.complaint(chunk, numbers) or chunk.unparsed(difference)
            location = Location(self.name, 0, "line", chunk.line_of)
            for part in table.combine_chunks().to_batches(selection.batch_rows):
                bags = part if form.separator is None else _split(part, selection, form.separator)
                if selection.time is not None:
                    at = bags.schema.get_field_index(selection.time)
                    times = pc.utf8_trim(bags.column(at), SPACES)
                    bags = bags.set_column(at, selection.time, times)
                yield batch_of(bags, selection, location, form.hexadecimal, selection.numbers)
                location = location.after(part.num_rows)

    def _header(self) -> re.Pattern[bytes] | None:
        """Return the pattern of a line of names, behind the end of another line."""
        if not self._form.header or len(self.columns) < 2:
            return None  # A text of a single column may equal its name.
        names = self._form.plain(first_line(self._path).removeprefix(BOM))
        return re.compile(rb"\n(?:%b)?%b\r*(?=\n|\Z)" % (BOM, re.escape(names)))

    def _chunks(self) -> Iterator[Chunk]:
        return chunks(self._path, self._form.header, self._form.plain)


def open_criteo(path: Path) -> TextSource | None:
    """Return a file in Criteo's own format; None if its first line is not in it."""
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


def open_csv(path: Path, options: LogOptions) -> TextSource:
    """Open a file of separated fields; its first line has their names, or with `no_header` is a
    sample like the others.

    A first line of values is one of names if `options` name some of them as columns.
    """
    header = first_line(path)
    if b"\0" in header or not header.strip():
        raise OperError(
            f"{path}: is not a log in a known format: Criteo TSV, CSV, JSON lines, Parquet, .npz, "
            ".npy or FBGEMM .pt"
        )
    listed, asked = options.list_separator, options.delimiter
    listed = listed if listed is None else separator(listed, option("--list-separator"))
    beginning = first_lines(path)
    lines = [line.decode("utf-8", "replace") for _, line in beginning.lines()]
    if comment := comment_above(lines):
        raise OperError(
            f"{path}: expected names of columns in the first line, got a comment, "
            f"{comment[:80]!r}; remove the comments"
        )
    if asked is not None:
        delimiter = separator(asked, option("--delimiter"))
    else:
        delimiter = find_delimiter(path, lines, listed)
    form = Form((), delimiter)
    beginning = replace(beginning, text=form.plain(beginning.text))
    if complaint := form.open_quote(beginning):
        raise complaint  # The types of columns would be wrong.
    if b"\r" in header:
        raise OperError(
            f"{path}: has a carriage return within its first line, and lines must end in a line "
            "feed, with or without one before it; convert the file"
        )
    try:
        # No quote of it stays open.
        fields = form.fields(form.plain(header).decode("utf-8").removeprefix("\ufeff")) or []
        names = [_trimmed(field) for field in fields]
        if options.no_header:
            names = [f"column_{i}" for i in range(1, len(fields) + 1)]
        first = 0 if options.no_header else 1  # The names may be the first line.
        columns = csv_columns(
            # Arrow cannot pass a line that is not UTF-8 to the handler, and prints a traceback.
            beginning.text.decode("utf-8", "replace").encode() + b"\n",
            names,
            form.parse_options(lambda row: "skip"),
            lambda sample: beginning.line_of(sample + first),
            options,
        )
    except UnicodeDecodeError as error:
        raise OperError(
            f"{path}: its first line is not UTF-8 text; convert the file if it is a log"
        ) from error
    except pa.ArrowInvalid as error:
        what = "" if options.no_header else " with a line of column names"
        raise OperError(f"{path}: cannot be read as text{what} ({error}); is it a log?") from error
    is_asked_for = options.no_header or not set(names).isdisjoint(options.columns)
    if not is_asked_for:
        others = [form.plain(line.encode()).decode() for line in lines[1:_MOST_COMPARED]]
        below = [form.fields(line) or [] for line in others]
        if are_values(names) or are_encoded(fields, below[0] if below else []):
            raise _no_names(path, header, names, asked)
        if named := named_value(fields, below):
            raise OperError(
                f"{path}: expected names of columns in the first line, got values with names, "
                f"such as {named[:80]!r}, as in the second line; write the names once, as the "
                "first line, and below it the values only, or convert the log to JSON lines"
            )
    repeated = next((name for name, number in Counter(names).items() if number > 1), None)
    if repeated is not None:
        raise OperError(
            f"{path}, line 1: two columns are called {repeated!r}; rename one, or pass "
            f"{option('--no-header', True)} if it is a sample"
        )
    return TextSource(path, Form(columns, delimiter, not options.no_header, separator=listed))


def _no_names(path: Path, header: bytes, names: Sequence[str], delimiter: str | None) -> OperError:
    """Return the error of a first line of values."""
    shown = repr(header[:80].decode("utf-8", "ignore"))
    if delimiter is None and len(names) == 1 and (mark := ANY.search(names[0])):
        # Without a header each line would be one value.
        return OperError(
            f"{path}: its first line, {shown}, has values, and no character separates columns in "
            f"every line; pass {option('--no-header', True)} and "
            f"{option('--list-separator', mark[0])} if a line is one bag of ids, or "
            f"{option('--delimiter', mark[0])} if it separates columns"
        )
    return OperError(
        f"{path}: expected names of columns in the first line, got values, {shown}; if it is a "
        f"sample, pass {option('--no-header', True)}; if these are names, "
        f"choose columns by them with {option('--columns')}"
    )


def _trimmed(field: str) -> str:
    """Return a name without the spaces around it, and without quotes behind a space."""
    name = field.strip(SPACES)
    is_quoted = name != field and re.fullmatch('"[^"]*"', name)
    return name[1:-1] if is_quoted else name


def _split(part: Any, selection: Selection, separator: str) -> Any:
    """Return the batch with fields of features split into bags, without brackets and quotes."""
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
