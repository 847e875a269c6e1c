"""Files of a folder that holds a log, and the keys in the names of partition folders.

Hive, Spark and pyarrow write a table as nested folders KEY=VALUE, with the files in the innermost
ones. The order of the samples decides windows and the held-out part, so folders are read in the
order of their keys by value, and the files of one folder in natural order.
"""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from oper.base.errors import OperError
from oper.logs.not_data import copied_from, kind_of_name, log_files

_NULL = "__HIVE_DEFAULT_PARTITION__"
_PARTITION = re.compile(r"([^=]+)=(.*)", re.DOTALL)
# Files that Spark, Hive and Databricks write next to the data.
_MARKERS = re.compile(r"_SUCCESS|_metadata|_common_metadata|_(started|committed)_.*")
# Folders and files in which a table format lists the files that are part of the table.
_TABLE_FORMATS = {
    "_delta_log": "Delta Lake",
    ".hoodie": "Apache Hudi",
    "_spark_metadata": "Spark's structured streaming",
}
_MOST_LEVELS = 64
_WHOLE = re.compile("-?[0-9]{1,18}")
_NUMBER = re.compile(r"-?[0-9]{1,40}(\.[0-9]{1,40})?")
_DATE = re.compile(r"([0-9]{4})-([0-9]{1,2})-([0-9]{1,2})(?:-([0-9]{1,2}))?")
_PACKED_DATE = re.compile("([0-9]{4})([0-9]{2})([0-9]{2})([0-9]{2})?")
_YEARS = range(1990, 2100)


@dataclass(frozen=True)
class Key:
    """The value of one partition key for the samples of a file; None for Hive's null.

    `value` is a whole number if all values of the key are, else a text; `time` is the ISO 8601 text
    if all values of the key are dates, else `value`.
    """

    value: int | str | None
    time: int | str | None


@dataclass(frozen=True)
class LogFile:
    """A file of a log, the folder that the user named, and the file's partition keys by name."""

    path: Path
    folder: Path | None = None
    keys: dict[str, Key] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """A file and the (key, value) of each partition folder above it, from the outermost."""

    path: Path
    keys: tuple[tuple[str, str | None], ...]


def files_in(folder: Path) -> list[LogFile]:
    """Return the log's files in a folder and its partition folders, in order; a notice names files
    that are not part of the log.

    Raise OperError if the folder holds no file of a log, files that are not all part of one log, or
    a table of Delta Lake, Iceberg or Hudi.
    """
    for above in (folder, *folder.absolute().parents):
        _refuse_table_format(above, folder)
    found = list(_walk(folder, folder, (), ()))
    kept = log_files(folder, [f.path for f in found])
    found = [f for f in found if f.path in kept]
    names = [name for name, _ in found[0].keys]
    for other in found:
        if [name for name, _ in other.keys] != names:
            raise OperError(
                f"{folder}: expected the same partition keys for all files, got "
                f"{_stated(found[0])} and {_stated(other)}; pass folders with equal keys, one "
                "after another"
            )
    if len(set(names)) < len(names):
        raise OperError(
            f"{found[0].path}: expected different partition keys, got {', '.join(names)}; rename "
            "one of the folders"
        )
    columns = [_Values([f.keys[level][1] for f in found]) for level in range(len(names))]

    def order(number: int) -> list[Any]:
        levels = [values.order(number) for values in columns]
        return [*levels, natural(found[number].path.name)]

    return [
        LogFile(
            found[n].path,
            folder,
            {name: values.key(n) for name, values in zip(names, columns, strict=True)},
        )
        for n in sorted(range(len(found)), key=order)
    ]


def natural(name: str) -> tuple[list[Any], str]:
    """Return a key that sorts day_2 before day_10."""
    parts: list[Any] = re.split("([0-9]+)", name)
    parts[1::2] = map(int, parts[1::2])
    return parts, name


class _Values:
    """The values of one partition key, one for each file."""

    def __init__(self, texts: Sequence[str | None]) -> None:
        self._texts = texts
        known = {text for text in texts if text is not None}
        dates = {text: _date(text) for text in known}
        self._dates = dates if all(dates.values()) else None
        self._whole = all(map(_WHOLE.fullmatch, known))
        self._numbers = all(map(_NUMBER.fullmatch, known))

    def order(self, number: int) -> tuple[Any, ...]:
        """Return the place of a file's value among the others; null is first."""
        text = self._texts[number]
        if text is None:
            return (0,)
        return (1, Decimal(text), text) if self._numbers else (1, natural(text))

    def key(self, number: int) -> Key:
        """Return the value of a file."""
        text = self._texts[number]
        if text is None:
            return Key(None, None)
        value = int(text) if self._whole else text
        return Key(value, value if self._dates is None else self._dates[text])


def _date(text: str) -> str | None:
    """Return a date such as 2026-1-9, 20260109 or 2026010917 (with the hour) in ISO 8601."""
    match = _DATE.fullmatch(text) or _PACKED_DATE.fullmatch(text)
    if match is None:
        return None
    year, month, day, hour = (int(part or 0) for part in match.groups())
    try:
        date = datetime(year, month, day, hour)
    except ValueError:
        return None
    return date.isoformat() if date.year in _YEARS else None


def _walk(
    folder: Path, root: Path, keys: tuple[tuple[str, str | None], ...], above: tuple[str, ...]
) -> Iterator[_Found]:
    """Yield the files of a folder and its partition folders, those that are not data included."""
    try:
        real = os.path.realpath(folder)
        inside = sorted(folder.iterdir())
    except OSError as error:
        raise OperError(f"{folder}: cannot be read ({error.strerror}); check its mode") from error
    if real in above:
        raise OperError(f"{folder}: is a link to a folder above it; remove the link")
    if len(keys) > _MOST_LEVELS:
        raise OperError(
            f"{root}: expected at most {_MOST_LEVELS} partition keys, got more below it; pass the "
            "log's files"
        )
    if folder != root:
        _refuse_table_format(folder, root)
    for path in inside:
        if _is_ignored(path.name):
            continue
        if not os.path.isdir(path):
            yield _Found(path, keys)
            continue
        if path.is_symlink() and os.path.realpath(path) in (*above, real):
            raise OperError(f"{path}: is a link to a folder above it; remove the link")
        original = copied_from(path.name)
        if original is not None and (folder / original).is_dir():
            raise OperError(
                f"{path}: by its name it is {kind_of_name(path.name)} of {folder / original}, so "
                "that its samples would be counted twice; move it away, or pass the folders to "
                "read one by one"
            )
        if match := _PARTITION.fullmatch(path.name):
            name, value = (unquote(part) for part in match.groups())
            if any("\ud800" <= letter <= "\udfff" for letter in name + value):
                raise OperError(f"{str(path)!a}: expected a name in UTF-8; rename the folder")
            key = (name, None if value in ("", _NULL) else value)
            yield from _walk(path, root, (*keys, key), (*above, real))
        else:
            files = list(_all_files(path))
            if (file := next((f for f in files if kind_of_name(f.name) is None), None)) is not None:
                raise OperError(
                    f"{path}: expected files or partition folders KEY=VALUE in {folder}, got a "
                    f"folder of another name with files such as {file}; pass the folders to read "
                    "one by one, in order, or move the others away"
                )
            yield from (_Found(file, keys) for file in files)  # A notice names them.


def _all_files(folder: Path) -> Iterator[Path]:
    """Yield the files and links at any depth of a folder that are not ignored, and folders that
    cannot be read, because they may hold some."""
    left = [folder]
    while left:
        above = left.pop()
        try:
            inside = sorted(above.iterdir())
        except OSError:
            yield above
            continue
        for path in (p for p in inside if not _is_ignored(p.name)):
            if os.path.isdir(path) and not path.is_symlink():
                left.append(path)
            else:
                yield path


def _is_ignored(name: str) -> bool:
    return name.startswith(".") or name.endswith(".crc") or bool(_MARKERS.fullmatch(name))


def _refuse_table_format(folder: Path, given: Path) -> None:
    """Raise OperError if a folder holds a table whose metadata lists the files that are part of
    it."""
    found = next((n for n in _TABLE_FORMATS if os.path.isdir(folder / n)), None)
    form = _TABLE_FORMATS[found] if found is not None else ""
    if found is None:
        is_iceberg = any((folder / "metadata").glob("*.metadata.json"))
        found, form = ("metadata", "Apache Iceberg") if is_iceberg else (None, "")
    if found is not None:
        raise OperError(
            f"{given}: expected a folder of plain files, got a table of {form} "
            f"({folder / found}), some files of which may be removed or not yet committed; write "
            "the table's current rows as Parquet with the engine that maintains it, and pass those"
        )


def _stated(found: _Found) -> str:
    return f"{', '.join(name for name, _ in found.keys) or 'none'} for {found.path}"
