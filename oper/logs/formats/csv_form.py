"""Form of a delimited text file: its columns, delimiter and quotes, and a check of its lines."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.csv as pacsv

from oper.base.errors import OperError
from oper.base.spoken import option
from oper.logs.batches.columns import Column
from oper.logs.formats.delimiters import single_byte, with_single_bytes
from oper.logs.formats.text_lines import Chunk


@dataclass(frozen=True)
class Form:
    """The form of a file's lines; `separator` separates the ids of a bag in a field."""

    columns: tuple[Column, ...]
    delimiter: str  # of the file, one character or more
    header: bool = True
    quotes: bool = True
    separator: str | None = None
    hexadecimal: frozenset[str] = frozenset()

    @property
    def single_delimiter(self) -> str:
        """The delimiter within the text that `plain` returns."""
        return single_byte(self.delimiter)

    def plain(self, text: bytes) -> bytes:
        """Return a file's text as Arrow can parse it."""
        return with_single_bytes(self.delimiter, text)

    @property
    def names(self) -> list[str]:
        """All columns in order."""
        return [c.name for c in self.columns]

    def fields(self, line: str) -> list[str] | None:
        """Return the fields of one plain line as Arrow parses them; None if a quote stays open."""
        if not self.quotes or '"' not in line:
            return line.split(self.single_delimiter)
        fields, start = [], 0
        while start <= len(line):
            quoted = line.startswith('"', start)
            match = _field(self.single_delimiter, quoted).match(line, start)
            if match is None:
                return None
            fields.append(match[1].replace('""', '"') + match[2] if quoted else match[0])
            start = match.end() + 1
        return fields

    def parse_options(self, on_ragged: Any = None) -> Any:
        """Return the form as Arrow's options; `on_ragged` takes lines of other lengths, which are
        errors without it."""
        return pacsv.ParseOptions(
            delimiter=self.single_delimiter,
            quote_char='"' if self.quotes else False,
            invalid_row_handler=on_ragged,
        )

    def open_quote(self, chunk: Chunk) -> OperError | None:
        """Return the error of the first line with an open quote."""
        for number, line in chunk.lines() if b'"' in chunk.text else ():
            # Latin-1 will do: quotes and delimiters are single bytes in UTF-8.
            if line.count(b'"') % 2 and self.fields(line.decode("latin-1")) is None:
                return _stays_open(chunk, number)
        return None

    def stays_open(self, chunk: Chunk) -> bool:
        """Return whether the last line has an open quote, which Arrow closes at the end."""
        text = chunk.text.rstrip(b"\r\n")
        last = text[text.rfind(b"\n") + 1 :]
        return b'"' in last and self.fields(last.decode("latin-1")) is None

    def complaint(self, chunk: Chunk, numbers: Sequence[str]) -> OperError | None:
        """Return the error of the first line that is not a valid sample; None if all are."""
        position = {name: i for i, name in enumerate(self.names)}
        for number, line in chunk.lines():
            where = f"{chunk.path}, line {number}"
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError:
                return OperError(f"{where}: is not UTF-8 text; convert the file")
            fields = self.fields(text)
            if fields is None:
                return _stays_open(chunk, number)
            if b"\r" in line:
                return OperError(
                    f"{where}: has a carriage return in the middle, and lines must end in a line "
                    "feed, with or without one before it; remove it"
                )
            if len(fields) != len(self.columns):
                return OperError(
                    f"{where}: expected {len(self.columns)} fields, got {len(fields)}; correct or "
                    "remove the line"
                )
            for name in numbers:
                value = fields[position[name]]
                if value and not _is_number(value):
                    return OperError(
                        f"{where}: expected a number in column {name!r}, got {value!r}; correct "
                        f"the line, or read the column as ids with {option('--columns')}"
                    )
        return None


def _stays_open(chunk: Chunk, number: int) -> OperError:
    return OperError(
        f"{chunk.path}, line {number}: a field begins with a quote that does not close on its "
        "line, and a sample must be one line; remove the quote or close it, or remove the "
        "line ends from the texts"
    )


@functools.cache
def _field(delimiter: str, quoted: bool) -> re.Pattern[str]:
    """Return a pattern that matches a field; its groups are, for a quoted one, the text in the
    quotes and the rest."""
    rest = f"[^{re.escape(delimiter)}]*+"
    return re.compile(f'"((?:[^"]|"")*+)"({rest})' if quoted else rest)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True
