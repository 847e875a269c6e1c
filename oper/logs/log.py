"""A log: its files, one after another, as one stream of batches."""

import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from oper.base.errors import OperError, OperWarning
from oper.base.spoken import option
from oper.files.input_files import LOG, open_file, refuse_url, special_kind
from oper.files.what_is import written_kind
from oper.logs.agreed_kinds import agree
from oper.logs.batches.batch import Batch
from oper.logs.batches.columns import Column, Selection, Source, choose, left_out, no_ids
from oper.logs.batches.log_options import LogOptions, TimeUnit
from oper.logs.batches.number_texts import NumberTexts
from oper.logs.log_folder import LogFile, files_in
from oper.logs.partitioned_source import PartitionedSource


class Log:
    """The samples of several files in order, `options.rows` of them.

    `features` are the columns of ids, `dense` those of numbers, and `left_out` has the reason of
    each column that is not ids and that no option names.
    """

    def __init__(self, sources: Sequence[Source], options: LogOptions) -> None:
        self.options = options
        self._sources = tuple(sources)
        self._selection = choose(sources[0], options)
        for source in sources[1:]:
            if difference := _difference(choose(source, options), self._selection):
                difference += _kinds(source, sources[0])
                raise OperError(
                    f"{source.name}: has other columns than {sources[0].name}: {difference}; "
                    "read them separately, move files away that are not part of the log, or choose "
                    f"common columns with {option('--columns')}, {option('--dense')} and "
                    f"{option('--label')}"
                )
        self.features = self._selection.features
        self.dense = self._selection.dense
        self.label = self._selection.label
        self.left_out = left_out(sources[0], options, self._selection)
        self._columns = self._merged_columns()
        self._check_missing(options.missing)

    def _merged_columns(self) -> dict[str, Column]:
        """Return the first file's columns, each with the properties that it has in any file."""
        merged = {column.name: column for column in self._sources[0].columns}
        for column in (c for s in self._sources[1:] for c in s.columns if c.name in merged):
            known = merged[column.name]
            if column != known:
                merged[column.name] = replace(
                    known,
                    bags=known.bags or column.bags,
                    raw=known.raw or column.raw,
                    texts=known.texts or column.texts,
                    doubt=known.doubt or column.doubt,
                )
        return merged

    def _check_missing(self, missing: str | None) -> None:
        """Raise OperError if the value that means "no id" cannot be in any column of ids."""
        texts = not self.texts.isdisjoint(self.features)
        if missing is not None and not texts and not re.fullmatch("-?[0-9]{1,20}", missing):
            raise OperError(
                f"{option('--missing', missing[:80])}: expected a whole number, such as -1, "
                "because the columns of ids hold whole numbers"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files."""
        return tuple(s.name for s in self._sources)

    @cached_property
    def bags(self) -> frozenset[str]:
        """The columns of ids that may have several in a sample."""
        return frozenset(n for n in self.nameable if self._columns[n].bags)

    @cached_property
    def texts(self) -> frozenset[str]:
        """The columns that may hold texts."""
        return frozenset(n for n, column in self._columns.items() if column.texts)

    @cached_property
    def raw(self) -> frozenset[str]:
        """The columns of ids whose integers are raw values, not row ids."""
        return frozenset(n for n in self.nameable if self._columns[n].raw)

    @cached_property
    def nameable(self) -> tuple[str, ...]:
        """The columns that tables may name: the features and, unless options choose these, the
        columns without another role."""
        if self.options.columns:
            return self.features
        taken = {self.label, self._selection.time}
        taken |= set() if self.options.dense is None else set(self.dense)
        return self.features + tuple(
            n for n in self._columns if n and n not in taken and n not in self.features
        )

    def doubts(self, features: Iterable[str]) -> dict[str, str]:
        """Return, by feature, reasons for which ids may be misread."""
        doubts = {n: self._columns[n].doubt or self._mixed(n) for n in features}
        return {n: doubt for n, doubt in doubts.items() if doubt}

    @cached_property
    def _values(self) -> dict[str, tuple[str, str]]:
        """A whole number with a point and a value that is not a whole number, by column, if the
        beginning of a text file has such values."""
        examples: dict[str, tuple[str, str]] = {}
        for column in (c for s in self._sources for c in s.columns if c.pointed or c.other):
            pointed, other = examples.get(column.name, ("", ""))
            examples[column.name] = (pointed or column.pointed, other or column.other)
        return examples

    def _mixed(self, column: str) -> str:
        pointed, other = self._values.get(column, ("", ""))
        if not (pointed and other):
            return ""
        return (
            f"its values are read as texts, because some, such as {other!r}, are not whole "
            f"numbers; those with a point, such as {pointed!r}, are texts too"
        )

    @property
    def samples(self) -> int | None:
        """The number of samples that `batches` yields; None if only reading the log tells."""
        known = [s.samples for s in self._sources]
        total = None if None in known else sum(n for n in known if n is not None)
        if self.options.rows is None or (total is None and self.options.rows_need_total):
            return total
        start, stop = self.options.row_range(total)
        if total is None:
            return None
        return max(0, min(total, total if stop is None else stop) - start)

    def no_ids(self) -> OperError:
        """Return the error of a log without a named column and without columns that look like
        ids."""
        return no_ids(self._sources[0])

    def count_samples(self) -> int:
        """Return the number of samples in all files; reads those that do not store it."""
        return sum(s.samples if s.samples is not None else s.count() for s in self._sources)

    def estimated_samples(self) -> int | None:
        """Return an estimate of the number of samples of `batches`, for a progress bar; None if
        unknown."""
        if self.samples is not None:
            return self.samples
        guesses = [s.samples if s.samples is not None else s.estimate() for s in self._sources]
        total = sum(n for n in guesses if n is not None)
        if None in guesses or not total:
            return None
        start, stop = self.options.row_range(total)
        return max(0, min(total, total if stop is None else stop) - start)

    def whole(self) -> "Log":
        """Return this log without a selection of rows."""
        if self.options.rows is None:
            return self
        return Log(self._sources, replace(self.options, rows=None))

    def part(self, number: int, parts: int) -> "Log":
        """Return this log's files `number`, `number` + `parts`, …; there must be more than
        `number`."""
        return Log(self._sources[number::parts], self.options)

    def in_unit(self, unit: TimeUnit | None) -> "Log":
        """Return this log with the numbers of its time column in another unit."""
        return Log(self._sources, replace(self.options, time_unit=unit))

    def batches(
        self, features: Sequence[str] | None = None, ids_only: bool = False
    ) -> Iterator[Batch]:
        """Yield the samples in order, with all features or those given.

        `ids_only` leaves out label and dense values. Each batch is from one file and holds at most
        `options.batch_rows` samples. Raise OperError if the log, or the part of it that
        `options.rows` selects, is empty.
        """
        selection = self._selection
        as_texts = {name for name, (_, other) in self._values.items() if other}
        numbers = NumberTexts(as_texts, self.options.missing)
        selection = replace(selection, numbers=numbers)
        if features is None and not self.features:
            raise self.no_ids()
        if features is not None:
            dense = tuple(name for name in selection.dense if name not in features)
            selection = replace(selection, features=tuple(features), dense=dense)
        if ids_only:
            selection = replace(selection, dense=(), label=None)
        total = self.count_samples() if self.options.rows_need_total else None
        start, stop = self.options.row_range(total)
        position = 0  # samples of the log before this batch
        for source in self._sources:
            if stop is not None and position >= stop:
                return
            if source.samples is not None and position + source.samples <= start:
                position += source.samples
                continue
            for batch in source.batches(selection):
                first = max(0, start - position)
                last = batch.samples if stop is None else min(batch.samples, stop - position)
                position += batch.samples
                if ids_only:  # Batches in memory may have a label that no column names.
                    batch = replace(batch, label=None, dense=None)
                if first < last:
                    yield batch.slice(first, last)
                if stop is not None and position >= stop:
                    return
        if position == 0:
            raise OperError(f"{self.names[0]}: has no samples; the log is empty")
        if position <= start:
            raise OperError(
                f"{option('--rows', self.options.rows)}: begins at sample {start:,}, and the log "
                f"has {position:,}; choose an earlier part"
            )


def open_log(paths: Any, options: LogOptions | None = None) -> Log:
    """Open a log; formats are recognised by the files' content.

    `paths` is a file, a folder of files or of partition folders, several of these, or an iterable
    of KeyedJaggedTensor batches. Files may be Criteo's TSV; CSV, JSON lines or Parquet with a
    column per feature; .npz or .npy in TorchRec's Criteo form, jagged .npz, FBGEMM request files;
    texts and requests may be gzipped.
    """
    options = options or LogOptions()
    if isinstance(paths, str | Path):
        paths = [paths]
    if isinstance(paths, Sequence) and paths and all(isinstance(p, str | Path) for p in paths):
        if "" in paths:  # Path takes an empty text for the current folder.
            raise OperError("a path of the log is empty; the current folder is '.'")
        for path in paths:
            check_path(path)
        sources = list(_sources(_files([Path(p) for p in paths]), options))
        agree(sources)
        return Log(sources, options)
    if not isinstance(paths, Iterable):
        raise OperError(f"expected a log, as paths or as batches, got {type(paths).__name__}")
    from oper.logs.formats.keyed_jagged import KjtSource

    return Log([KjtSource(paths)], options)


def _files(paths: Sequence[Path]) -> list[LogFile]:
    """Return all files of the paths and folders, without companions of a sparse .npy."""
    files: list[LogFile] = []
    for path in paths:
        files += files_in(path) if os.path.isdir(path) else [LogFile(path)]
    for file in files:
        _check_regular(file.path)
    for folder in dict.fromkeys(file.path.parent for file in files):
        _refuse_written(folder)
    _warn_of_files_given_twice(files)
    sparse = {f.path for f in files if f.path.suffix == ".npy" and "sparse" in f.path.name}
    beside = {
        p.with_name(p.name.replace("sparse", role)) for p in sparse for role in ("dense", "labels")
    }
    return [f for f in files if f.path not in beside]


def _warn_of_files_given_twice(files: Sequence[LogFile]) -> None:
    """Warn of a file that several of the user's paths lead to."""
    first: dict[tuple[int, int], LogFile] = {}
    for file in files:
        status = file.path.stat()
        other = first.setdefault((status.st_dev, status.st_ino), file)
        if other is not file:
            paths = " and ".join(dict.fromkeys((str(other.path), str(file.path))))
            warnings.warn(
                f"{paths}: is one file, which is given more than once, so that its samples are "
                "counted more than once; pass each file once if that is not meant",
                OperWarning,
                stacklevel=4,
            )
            return


def _sources(files: Sequence[LogFile], options: LogOptions) -> Iterator[Source]:
    """Yield the readers of files; raise OperError if those of one folder are of different
    formats."""
    first: dict[Path, Source] = {}
    in_folder = Counter(file.folder for file in files)
    for file in files:
        try:
            source = _open(file.path, options)
        except OperError as error:
            if file.folder is None or in_folder[file.folder] == 1:
                raise
            raise OperError(
                f"{error}; or move the file out of {file.folder} if it is not part of the log"
            ) from error
        if file.folder is not None:
            other = first.setdefault(file.folder, source)
            if type(source) is not type(other):
                raise OperError(
                    f"{file.folder}: expected files of one format, got {other.name} and "
                    f"{source.name}; move the files that are not part of the log away, or pass "
                    "those of each format by themselves"
                )
        yield PartitionedSource(source, file.keys) if file.keys else source


def check_path(path: Path | str) -> None:
    """Raise OperError if a path of a log is a URL, leads to nothing, or to a folder that oper
    wrote."""
    refuse_url(path)
    if os.path.isdir(path):
        _refuse_written(Path(path))
    else:
        _check_regular(Path(path))


def _refuse_written(folder: Path) -> None:
    if kind := written_kind(folder):
        raise OperError(
            f"{folder}: expected a log, got {kind}'s folder; give the log's files or folder"
        )


def _check_regular(path: Path) -> None:
    """Raise OperError if reading the path might never end, or give other bytes the next time."""
    if not path.exists():
        what = "is a link to a file that is not there" if path.is_symlink() else "no such file"
        raise OperError(f"{path}: {what}")
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OperError(
            f"{path}: expected a file, got {special_kind(mode)}; a log is read more than once: "
            "write its content to a file, or leave it out"
        )


def _open(path: Path, options: LogOptions) -> Source:
    """Return the reader of one file, by its first bytes, and by its name if those do not tell."""
    from oper.logs.formats import (
        csv_and_criteo,
        fbgemm_requests,
        foreign_formats,
        json_lines,
        numpy_arrays,
        parquet,
    )

    try:
        # Files of /proc state a size of 0, and some never end.
        with open_file(path, LOG) as file:
            head = file.read(foreign_formats.HEAD_BYTES) if path.stat().st_size else b""
    except OSError as error:
        raise OperError(f"{path}: cannot be read ({error.strerror})") from error
    if not head:
        raise OperError(f"{path}: is empty; is it the right file?")
    name = path.name.removesuffix(".gz")
    foreign_formats.refuse(path, head)
    if head[:4] == b"PAR1" or name.endswith(".parquet"):
        return parquet.ParquetSource(path)
    if name.endswith((".pt", ".pth")):
        return fbgemm_requests.RequestSource(path)
    if head[:6] == b"\x93NUMPY" or name.endswith(".npy"):
        return numpy_arrays.open_npy(path)
    if head[:2] == b"PK" or name.endswith(".npz"):
        return numpy_arrays.open_npz(path, options.values, options.lengths)
    if options.delimiter is None and json_lines.is_json(path):
        return json_lines.JsonLinesSource(path)
    return csv_and_criteo.open_criteo(path) or csv_and_criteo.open_csv(path, options)


def _difference(one: Selection, other: Selection) -> str:
    """Return a sentence on the columns that only one of the selections has; empty if there are
    none."""
    for role in ("features", "dense"):
        more, fewer = set(getattr(one, role)), set(getattr(other, role))
        more, fewer = more - fewer, fewer - more
        if more or fewer:
            return (
                f"{role} {', '.join(sorted(more)) or 'none'} more, "
                f"{', '.join(sorted(fewer)) or 'none'} fewer"
            )
    for role in ("label", "time"):
        a, b = getattr(one, role), getattr(other, role)
        if a != b:
            return f"{role} {a!r} and {b!r}"
    return ""


def _kinds(one: Source, other: Source) -> str:
    """Return a sentence on the first column whose kinds differ; empty if there is none."""
    columns = {c.name: c for c in other.columns}
    for here in one.columns:
        there = columns.get(here.name, here)
        if here.kind != there.kind:
            kinds = f"{here.reason or 'ids'} here, {there.reason or 'ids'} there"
            return f" (column {here.name!r}: {kinds})"
    return ""
