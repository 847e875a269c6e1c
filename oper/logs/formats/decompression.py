"""Compressed files, read with a limit on their unpacked size.

A gzip of some megabytes can hold gigabytes of one byte. Logs are read as streams, so memory is
safe, but time and temporary files are not: a file that unpacks to more than a gibibyte and to more
than 250 times its size is refused. Deflate reaches a factor of 1,032 at most; logs with varied ids
stay far below.
"""

import gzip
import io
import os
import zipfile
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from oper.files.input_files import LOG, open_file

MOST_BYTES = 1 << 30
MOST_RATIO = 250


def open_unpacked(path: Path) -> io.BufferedIOBase:
    """Return a file's bytes, decompressed if it is gzip."""
    with open_file(path, LOG) as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return _Bounded(path) if compressed else open_file(path, LOG)


def check_ratio(path: Path, unpacked: int) -> None:
    """Raise OperError if `unpacked` bytes are too many for a file of this size to be a log."""
    packed = os.stat(path).st_size
    if unpacked > max(MOST_BYTES, MOST_RATIO * packed):
        raise OperError(
            f"{path}: {packed:,} bytes unpack to {unpacked:,} or more, which no log does; if it is "
            "one, unpack it first"
        )


def check_archive(path: Path, archive: zipfile.ZipFile) -> None:
    """Raise OperError if the members of a zip file unpack to far more than it has bytes."""
    check_ratio(path, sum(member.file_size for member in archive.infolist()))


class _Bounded(gzip.GzipFile):
    """A gzip file that ends with an OperError if it unpacks to far more than a log does."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")
        self._path = path
        self._unpacked = 0

    def read(self, size: int | None = -1) -> bytes:
        return self._checked(super().read(size))

    def readline(self, size: Any = -1) -> bytes:
        return self._checked(super().readline(size))

    def _checked(self, part: bytes) -> bytes:
        self._unpacked += len(part)
        if self._unpacked > MOST_BYTES:
            check_ratio(self._path, self._unpacked)
        return part
