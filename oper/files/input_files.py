"""Opening files that a user names: regular files of a size that such a file can have.

All modules open them here (`tests/project/test_input_files.py`). A path may lead to a device that
never ends or to a pipe that nobody writes to. So the file is opened without waiting for a writer,
and the open file is checked: the path might lead to another file later.
"""

import os
import re
import stat
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from oper.base.errors import OperError, one_line


class Kind(NamedTuple):
    """A kind of input file, and the most bytes that such a file has."""

    name: str
    most_bytes: int | None  # None: it is mapped or read in parts, and checked otherwise


# The reader of YAML takes up to 400 bytes of memory and 9 µs for a byte. A topology with a
# bandwidth for each pair of 1,024 ranks, as `oper topology measure` writes it, has 15 MiB.
YAML = Kind("a YAML file", 16 << 20)
JSON = Kind("a JSON file", 64 << 20)  # what commands print, counters of 4,096 ranks
# Three matrices of the most ranks (MAX_RANKS) in JSON have 1.2 GB.
MARKER = Kind("the marker of a plan or profile", 2 << 30)
LISTED = Kind("a file of a plan or profile", None)  # its marker has its number of bytes
LOG = Kind("a log", None)

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/+(.*)", re.DOTALL)
_SPECIAL = {"a pipe": stat.S_ISFIFO, "a socket": stat.S_ISSOCK}


def open_file(path: Path | str, kind: Kind) -> BufferedReader:
    """Open a regular file to read its bytes.

    Raise OperError if there is none, it cannot be opened, or it has more bytes than its kind
    allows.
    """
    file = _opened(path, kind)
    status = os.fstat(file.fileno())
    problem = None
    if not stat.S_ISREG(status.st_mode):
        problem = (
            f"expected {kind.name}, got {special_kind(status.st_mode)}; write its content to a file"
        )
    elif kind.most_bytes is not None and status.st_size > kind.most_bytes:
        problem = (
            f"expected {kind.name} of at most {kind.most_bytes:,} bytes, got {status.st_size:,}; "
            "is it the right file?"
        )
    if problem:
        file.close()
        raise OperError(f"{path}: {problem}")
    return file


def read_bytes(path: Path | str, kind: Kind) -> bytes:
    """Return all bytes of a regular file; raise the errors of `open_file`."""
    with open_file(path, kind) as file:
        try:
            # It is not read to the end: files of /proc say that they are empty, and some never end.
            return file.read(os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise OperError(f"{path}: cannot be read ({error.strerror})") from error


def read_text(path: Path | str, kind: Kind) -> str:
    """Return the text of a regular file in UTF-8; raises the errors of `open_file`, and one for
    other encodings."""
    try:
        return read_bytes(path, kind).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OperError(
            f"{path}: expected {kind.name}, got bytes that are not UTF-8 ({one_line(error)}); is "
            "it the right file?"
        ) from error


def refuse_url(path: Path | str, written: bool = False) -> None:
    """Raise OperError if a path is a URL, which `Path` turns into `s3:/…`, and not below a folder
    of that name; `written`: something is to be written there."""
    match = _URL.fullmatch(str(path))
    if match is None or os.path.lexists(match[1]):
        return
    typed, is_file = str(path), match[1].lower() == "file:"
    if "://" not in typed:
        typed = f"{match[1]}//{'/' * is_file}{match[2]}"
    if is_file:
        raise OperError(f"{typed}: expected a path, got a URL; pass /{unquote(match[2])}")
    if written:
        remedy = "writes local files only: write to a local path, and copy what is there"
    else:
        remedy = f"reads local files only: download it, or mount what {match[1]}// names, and pass "
        remedy += "the path"
    raise OperError(f"{typed}: expected a path, got a URL; oper {remedy}")


def special_kind(mode: int) -> str:
    """Return the kind of a special file: a pipe, a socket or a device."""
    return next((name for name, is_kind in _SPECIAL.items() if is_kind(mode)), "a device")


def _opened(path: Path | str, kind: Kind) -> BufferedReader:
    try:
        return open(path, "rb", opener=_open_at_once)
    except FileNotFoundError as error:
        refuse_url(path)
        raise OperError(f"{path}: no such file; expected {kind.name}") from error
    except IsADirectoryError as error:
        raise OperError(f"{path}: expected {kind.name}, got a folder; give a file") from error
    except (OSError, ValueError) as error:  # A path with a null character is a ValueError.
        reason = getattr(error, "strerror", None) or error
        raise OperError(f"{path}: cannot be opened ({reason}); expected {kind.name}") from error


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, 0o600)
