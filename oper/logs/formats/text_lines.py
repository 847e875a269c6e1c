"""Text files as chunks of complete lines, plain or gzipped, with the memory of one chunk.

A sample is one line. Lines end in a line feed, with or without carriage returns before it; empty
lines are skipped.
"""

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oper.base.errors import OperError
from oper.files.input_files import LOG, open_file
from oper.logs.formats.decompression import open_unpacked

# A chunk that is read at a time has enough blocks for Arrow to parse on 8 cores at once.
_CHUNK_BYTES = 1 << 25
BOM = b"\xef\xbb\xbf"  # of a text in UTF-8
PEEK_BYTES = 1 << 20  # A few thousand lines tell the types of columns.
_MOST_LINE_BYTES = 1 << 26
_MOST_HEADER_BYTES = 1 << 20
_MOST_BLANK_BYTES = 1 << 25  # There may be so many empty lines before the first one.
_SOMETHING = re.compile(rb"[^\r\n]")
_TEXT = re.compile(rb"\S")
_EMPTY_LINES = re.compile(rb"\n(?:\r*\n)+")
# Arrow ends a line here too, and may cut a quoted text in two.
_LONE_RETURN = re.compile(rb"\r[^\r\n]")


@dataclass(frozen=True)
class Chunk:
    """Some complete lines of a file, beginning with line `first_line`."""

    path: Path
    text: bytes
    first_line: int
    ends: int  # how many line ends it has

    def samples(self) -> int:
        """Return the number of lines that are not empty."""
        empty = sum(blank.count(b"\n") - 1 for blank in _EMPTY_LINES.findall(b"\n" + self.text))
        tail = self.text[self.text.rfind(b"\n") + 1 :].strip(b"\r")
        return self.ends - empty + bool(tail)

    def is_parsed(self, samples: int) -> bool:
        """Return whether Arrow's number of samples is one for each line."""
        if b"\r" in self.text and _LONE_RETURN.search(self.text):
            return False
        # Counting the empty lines takes longer, and most logs have none.
        lines = self.ends + (not self.text.endswith(b"\n"))
        return samples == lines or samples == self.samples()

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and text of each line that is not empty."""
        for number, line in enumerate(self.text.split(b"\n"), start=self.first_line):
            if line.strip(b"\r"):
                yield number, line.rstrip(b"\r")

    def line_of(self, sample: int) -> int:
        """Return the line that holds sample `sample` of the chunk."""
        return next(number for i, (number, _) in enumerate(self.lines()) if i == sample)

    def unparsed(self, message: str) -> OperError:
        """Return the error for a chunk that Arrow cannot parse although each line alone is
        valid."""
        return OperError(f"{self.path}, from line {self.first_line}: cannot be parsed ({message})")


def chunks(
    path: Path, header: bool = False, plain: Callable[[bytes], bytes] | None = None
) -> Iterator[Chunk]:
    """Yield the lines after the header, in chunks that are parsed together.

    `plain` rewrites their text, which must keep the line ends.
    """
    try:
        with open_unpacked(path) as file:
            line = 1
            if header:
                while (names := file.readline()) and not names.strip():
                    line += 1
                line += 1
            rest = b""
            while block := file.read(_CHUNK_BYTES):
                if len(rest) > _MOST_LINE_BYTES:
                    raise OperError(
                        f"{path}, line {line}: is longer than {_MOST_LINE_BYTES:,} "
                        "bytes, and a sample must be one line; is it a log?"
                    )
                # A short block is the last one; its last line may lack a line feed.
                last = len(block) < _CHUNK_BYTES
                end = len(block) if last else block.rfind(b"\n") + 1
                whole, rest = (rest + block[:end], block[end:]) if end else (b"", rest + block)
                whole = plain(whole) if plain else whole
                ends = whole.count(b"\n")
                # Arrow refuses a text that has only empty lines.
                if _SOMETHING.search(whole):
                    yield Chunk(path, whole, line, ends)
                line += ends
            rest = plain(rest) if plain else rest
            if _SOMETHING.search(rest):
                yield Chunk(path, rest, line, 0)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error


def beginning(path: Path, most_bytes: int) -> bytes:
    """Return the first unpacked bytes of a file."""
    try:
        with open_unpacked(path) as file:
            return file.read(most_bytes)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error


def first_lines(path: Path) -> Chunk:
    """Return the complete lines that tell the types of columns."""
    head = beginning(path, PEEK_BYTES)
    end = head.rfind(b"\n") + 1
    head = head[:end] if len(head) == PEEK_BYTES and end else head
    return Chunk(path, head, 1, head.count(b"\n"))


def estimated_lines(path: Path) -> int | None:
    """Return an estimate of the number of lines, from the length and the compression of the
    first."""
    try:
        with open_file(path, LOG) as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            head = (gzip.GzipFile(fileobj=file) if packed else file).read(PEEK_BYTES)
            share = file.tell() / os.fstat(file.fileno()).st_size
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error
    return round(head.count(b"\n") / share) or None


def first_line(path: Path) -> bytes:
    """Return the first line that is not empty, without its end; raise OperError if it cannot be
    read.

    Nothing if there is none in the first 32 MiB, or if it is longer than 1 MiB.
    """
    try:
        with open_unpacked(path) as file:
            head = b""
            for _ in range(_MOST_BLANK_BYTES // _MOST_HEADER_BYTES):
                head += file.read(_MOST_HEADER_BYTES)
                if match := _TEXT.search(head):
                    head = head[head.rfind(b"\n", 0, match.start()) + 1 :]
                    head += file.read(max(_MOST_HEADER_BYTES - len(head), 0))
                    end = head.find(b"\n")
                    is_whole = end >= 0 or len(head) < _MOST_HEADER_BYTES
                    return (head[:end] if end >= 0 else head).rstrip(b"\r") if is_whole else b""
                head = head[head.rfind(b"\n") + 1 :][-_MOST_HEADER_BYTES:]
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, error) from error
    return b""


def damaged(path: Path, error: Exception) -> OperError:
    """Return the error for a file that stops or breaks while it is read."""
    return OperError(f"{path}: is damaged or truncated ({error}); copy or write it again")
