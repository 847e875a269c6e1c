"""Files in a folder that are not part of its log: copies, unfinished files, descriptions.

A file is skipped, and named, only if its name, its size or a link proves that it adds no samples. A
folder in which two files may hold the same samples is refused, because the intended one is unknown.
"""

import gzip
import os
import re
import warnings
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from oper.base.errors import OperError, OperNotice
from oper.files.input_files import LOG, open_file

_NAMED = 5  # files that a sentence names
_PACKED = ("gz", "zst", "bz2", "xz", "lz4", "snappy", "zip", "z")
_FORMS = ("csv", "tsv", "txt", "json", "jsonl", "ndjson", "parquet", "pq", "npz", "npy")
_JSON_LINES = re.compile(rf".*\.(jsonl|ndjson|json\.({'|'.join(_PACKED)}))", re.IGNORECASE)
_DESCRIBED = re.compile(
    r"(readme|licen[cs]e)([ ._-].*)?|(copying|notice|authors|contributing|citation|changelog|"
    r"changes|notes|todo|version|manifest|about|info)",
    re.IGNORECASE,
)
_TEXTS = re.compile(r"|.*\.(txt|text|md|rst|htm|html|pdf|docx?|json)", re.IGNORECASE)
_KINDS = {
    "a backup": r".*(~|\.(bak|backup|old|orig|save|swp|swo))|#.*#",
    "an unfinished or locked file": r".*\.(tmp|temp|part|partial|filepart|crdownload|download|"
    r"opdownload|aria2|inprogress|pending|_copying_|lock|lck)|.*\.inprogress\..*|~\$.*",
    "a checksum": r".*\.(md5|sha1|sha256|sha512|asc|sig)|(md5|sha1|sha256|sha512)sums?(\.txt)?",
    "a description": r".*\.(md|rst|ya?ml)|thumbs\.db|desktop\.ini",
}
_PATTERNS = {kind: re.compile(text, re.IGNORECASE | re.DOTALL) for kind, text in _KINDS.items()}
_COPY = re.compile(
    r"(?:copy of (?P<of>.+))|(?P<stem>.+?)(?:[ ._-]+(?:copy|old|bak|backup|orig|save|tmp|temp))?"
    r"(?: ?\([0-9]+\))?",
    re.IGNORECASE | re.DOTALL,
)


def log_files(folder: Path, paths: Iterable[Path]) -> set[Path]:
    """Return the files below a folder that are part of its log; a notice names the others.

    Raise OperError if two of the files may have the same samples, or none has any.
    """
    skipped: dict[Path, str] = {}
    kept = list(paths)

    def skip(reason: Callable[[Path], str | None]) -> None:
        nonlocal kept
        unwanted = {path: why for path in kept if (why := reason(path)) is not None}
        skipped.update(unwanted)
        kept = [path for path in kept if path not in unwanted]

    skip(lambda path: kind_of_name(path.name))
    # JSON next to other files describes them, unless it has the samples.
    if not all(_is_json(path) for path in kept) and not any(map(_has_json_lines, kept)):
        skip(lambda path: "a description" if _is_json(path) else None)
    skip(lambda path: "empty" if _is_empty(path) else None)
    skip(_second_names(kept).get)
    _refuse_same_names(folder, kept)
    if not kept:
        only = f"; it has only {_listed(skipped)}" if skipped else ""
        raise OperError(f"{folder}: is a folder without files of a log{only}; pass the log's files")
    if skipped:
        warnings.warn(
            f"{folder}: skipped, because they are not part of the log: {_listed(skipped)}",
            OperNotice,
            stacklevel=2,
        )
    return set(kept)


def kind_of_name(name: str) -> str | None:
    """Return the kind of a file whose name says that it is not data, `a backup`; None otherwise."""
    bare = _without(name, _PACKED)
    if _DESCRIBED.fullmatch(bare.rpartition(".")[0] or bare) and _TEXTS.fullmatch(_suffix(bare)):
        return "a description"
    return next((kind for kind, pattern in _PATTERNS.items() if pattern.fullmatch(bare)), None)


def copied_from(name: str) -> str | None:
    """Return the name that a backup or an unfinished copy of a file or folder was made from."""
    match = re.fullmatch(r"#(.+)#|(.+?)(~|\.[A-Za-z_]+)", name, re.DOTALL)
    return None if match is None or kind_of_name(name) is None else match[1] or match[2]


def _second_names(paths: list[Path]) -> dict[Path, str]:
    """Return the symbolic links to files of the same folder. Raise OperError if one file has two
    names otherwise, because its place in the log is then unknown."""
    names: dict[tuple[int, int], list[Path]] = defaultdict(list)
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue  # It is refused when it is opened.
        names[status.st_dev, status.st_ino].append(path)
    second_names: dict[Path, str] = {}
    for same in names.values():
        links = [path for path in same if path.is_symlink()]
        if len(same) == 1:
            continue
        if len(links) < len(same) - 1 or len({path.parent for path in same}) > 1:
            raise OperError(
                f"{same[0]} and {same[1]}: are two names of one file (links), so that its samples "
                "would be counted twice; remove one, or pass the files to read one by one"
            )
        original = next((path for path in same if path not in links), same[0])
        second_names |= {path: f"a link to {original.name}" for path in same if path != original}
    return second_names


def _refuse_same_names(folder: Path, paths: list[Path]) -> None:
    """Raise OperError if two files of one folder are probably the same samples: `a.csv` and
    `a.csv.gz`, or `a.csv` and `a (1).csv`."""
    first: dict[tuple[Path, str], Path] = {}
    for path in paths:
        other = first.setdefault((path.parent, _stem(path.name)), path)
        if other != path:
            raise _same_samples(folder, other, path)
    for (parent, stem), path in first.items():
        match = _COPY.fullmatch(stem)
        original = match and (match["of"] or match["stem"])
        if original and original != stem and (parent, original) in first:
            raise _same_samples(folder, first[parent, original], path)


def _same_samples(folder: Path, one: Path, other: Path) -> OperError:
    return OperError(
        f"{folder}: expected each sample once, got {one.name} and {other.name} in {one.parent}, "
        "by their names the same samples twice; move one of them away, or pass the files to "
        "read one by one"
    )


def _stem(name: str) -> str:
    """Return a file's name without the endings of formats and compressions."""
    return _without(name, (*_PACKED, *_FORMS))


def _without(name: str, endings: Iterable[str]) -> str:
    while True:
        stem, dot, ending = name.rpartition(".")
        if not (dot and stem and ending.lower() in endings):
            return name
        name = stem


def _suffix(name: str) -> str:
    stem, dot, ending = name.rpartition(".")
    return f".{ending}" if dot and stem else ""


def _is_json(path: Path) -> bool:
    return path.suffix.lower() == ".json"


def _has_json_lines(path: Path) -> bool:
    return bool(_JSON_LINES.fullmatch(path.name))


def _is_empty(path: Path) -> bool:
    """Return whether a regular file is empty, after unpacking if it is gzipped."""
    try:
        if not path.is_file():
            return False
        with open_file(path, LOG) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return True
            if file.peek(2)[:2] != b"\x1f\x8b":
                return False
            return gzip.GzipFile(fileobj=file).read(1) == b""
    except (OperError, OSError, EOFError, zlib.error):
        return False  # It is refused when it is opened.


def _listed(skipped: dict[Path, str]) -> str:
    shown = [f"{path.name} ({why})" for path, why in list(skipped.items())[:_NAMED]]
    more = len(skipped) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")
