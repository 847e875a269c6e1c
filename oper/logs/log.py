"""A log: its files, one after another, as one stream of batches."""

import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from oper.files.input_files import LOG, open_file, special_kind
from oper.files.what_is import written_kind
from oper.logs.batches.batch import Batch
from oper.logs.batches.columns import Column, Source, choose, left_out
from oper.logs.batches.log_options import LogOptions, TimeUnit


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
            other = choose(source, options)
            if replace(other, batch_rows=0) != replace(self._selection, batch_rows=0):
                raise OperError(
                    f"{source.name}: has other columns than {sources[0].name}: "
                    f"{_difference(other, self._selection)}; read them separately, or choose "
                    "common columns with --columns, --dense and --label"
                )
        self.features = self._selection.features
        self.dense = self._selection.dense
        self.label = self._selection.label
        self.left_out = left_out(sources[0], options, self._selection)
        columns = {c.name: c for c in sources[0].columns}
        self._columns: dict[str, Column] = {name: columns[name] for name in self.features}
        self._check_missing(options.missing)

    def _check_missing(self, missing: str | None) -> None:
        """OperError where the value that means "no id" cannot be in any column of ids."""
        texts = any(c.texts for s in self._sources for c in s.columns if c.name in self._columns)
        if missing is not None and not texts and not re.fullmatch("-?[0-9]{1,20}", missing):
            raise OperError(
                f"--missing {missing[:80]!r}: the columns of ids hold whole numbers, so none of "
                "their values can be it; a whole number was needed, such as -1"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files."""
        return tuple(s.name for s in self._sources)

    @cached_property
    def bags(self) -> frozenset[str]:
        """The features that may have several ids in a sample."""
        return frozenset(n for n, c in self._columns.items() if c.bags)

    @cached_property
    def raw(self) -> frozenset[str]:
        """The features whose integers are raw values, not row ids."""
        return frozenset(n for n, c in self._columns.items() if c.raw)

    @property
    def doubts(self) -> dict[str, str]:
        """Why the ids of a feature are perhaps not meant as they are read, where that is so."""
        return {n: c.doubt for n, c in self._columns.items() if c.doubt}

    @property
    def samples(self) -> int | None:
        """The number of samples that `batches` yields; None where only reading the log tells."""
        known = [s.samples for s in self._sources]
        total = None if None in known else sum(n for n in known if n is not None)
        if self.options.rows is None or (total is None and self.options.rows_need_total):
            return total
        start, stop = self.options.row_range(total)
        if total is None:
            return None
        return max(0, min(total, total if stop is None else stop) - start)

    def count_samples(self) -> int:
        """The number of samples in all files; reads those that do not store it."""
        return sum(s.samples if s.samples is not None else s.count() for s in self._sources)

    def estimated_samples(self) -> int | None:
        """About how many samples `batches` yields, for a progress bar; None where unknown."""
        if self.samples is not None:
            return self.samples
        guesses = [s.samples if s.samples is not None else s.estimate() for s in self._sources]
        total = sum(n for n in guesses if n is not None)
        if None in guesses or not total:
            return None
        start, stop = self.options.row_range(total)
        return max(0, min(total, total if stop is None else stop) - start)

    def whole(self) -> "Log":
        """This log without a selection of rows."""
        if self.options.rows is None:
            return self
        return Log(self._sources, replace(self.options, rows=None))

    def in_unit(self, unit: TimeUnit | None) -> "Log":
        """This log, with the numbers of its time column read in another unit."""
        return Log(self._sources, replace(self.options, time_unit=unit))

    def batches(
        self, features: Sequence[str] | None = None, ids_only: bool = False
    ) -> Iterator[Batch]:
        """The samples in order, with all features or those given.

        `ids_only` leaves out label and dense values. Each batch is from one file and holds at most
        `options.batch_rows` samples. OperError where the log, or the part of it that
        `options.rows` selects, is empty.
        """
        selection = self._selection
        if features is not None:
            selection = replace(selection, features=tuple(features))
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
                f"--rows {self.options.rows!r}: begins at sample {start:,}, and the log has "
                f"{position:,}; choose an earlier part"
            )


def open_log(paths: Any, options: LogOptions | None = None) -> Log:
    """Open a log; formats are recognised by the files' content.

    `paths` is a file, a folder of files, several of either, or an iterable of KeyedJaggedTensor
    batches. Files may be Criteo's TSV, CSV or Parquet with a column per feature, .npz or .npy in
    TorchRec's Criteo form, jagged .npz, FBGEMM request files; texts and requests may be gzipped.
    """
    options = options or LogOptions()
    if isinstance(paths, str | Path):
        paths = [paths]
    if isinstance(paths, Sequence) and paths and all(isinstance(p, str | Path) for p in paths):
        if "" in paths:  # Path takes an empty text for the current folder.
            raise OperError("a path of the log is empty; the current folder is '.'")
        return Log([_open(p, options) for p in _files([Path(p) for p in paths])], options)
    if not isinstance(paths, Iterable):
        raise OperError(f"a log was needed, as paths or as batches, not {type(paths).__name__}")
    from oper.logs.formats.keyed_jagged import KjtSource

    return Log([KjtSource(paths)], options)


def _files(paths: Sequence[Path]) -> list[Path]:
    """All files of the paths and folders, without companions of a sparse .npy."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [p for p in path.iterdir() if not p.is_dir() and not p.name.startswith(".")]
            inside = [p for p in inside if p.suffix not in (".json", ".md", ".yaml")]
            if not inside:
                raise OperError(f"{path}: is a folder without files; pass the log's files")
            files += sorted(inside, key=_natural)
        else:
            files.append(path)
    for path in files:
        _check_regular(path)
    for folder in dict.fromkeys(path.parent for path in files):
        if kind := written_kind(folder):
            raise OperError(
                f"{folder}: expected a log, got {kind}'s folder; give the log's files or folder"
            )
    sparse = {p for p in files if p.suffix == ".npy" and "sparse" in p.name}
    beside = {
        p.with_name(p.name.replace("sparse", role)) for p in sparse for role in ("dense", "labels")
    }
    return [p for p in files if p not in beside]


def _check_regular(path: Path) -> None:
    """OperError where reading the path might never end, or give other bytes the next time."""
    if not path.exists():
        what = "is a link to a file that is not there" if path.is_symlink() else "no such file"
        raise OperError(f"{path}: {what}")
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OperError(
            f"{path}: is {special_kind(mode)}, and a file was needed, as logs are read more than "
            "once; write its content to a file, or leave it out"
        )


def _natural(path: Path) -> list[Any]:
    """day_2 before day_10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", path.name)]


def _open(path: Path, options: LogOptions) -> Source:
    """The reader of one file, by its first bytes, and by its name where those do not tell."""
    from oper.logs.formats import csv_and_criteo, fbgemm_requests, numpy_arrays, parquet

    try:
        # Files of /proc say that they are empty, and to read some of them does not end.
        with open_file(path, LOG) as file:
            head = file.read(8) if path.stat().st_size else b""
    except OSError as error:
        raise OperError(f"{path}: cannot be read ({error.strerror})") from error
    if not head:
        raise OperError(f"{path}: is empty; is it the right file?")
    name = path.name.removesuffix(".gz")
    if head[:4] == b"PAR1" or name.endswith(".parquet"):
        return parquet.ParquetSource(path)
    if name.endswith((".pt", ".pth")):
        return fbgemm_requests.RequestSource(path)
    if head[:6] == b"\x93NUMPY" or name.endswith(".npy"):
        return numpy_arrays.open_npy(path)
    if head[:2] == b"PK" or name.endswith(".npz"):
        return numpy_arrays.open_npz(path, options.values, options.lengths)
    return csv_and_criteo.open_criteo(path) or csv_and_criteo.open_csv(
        path, options.list_separator, options.no_header, options.columns
    )


def _difference(one: Any, other: Any) -> str:
    for what in ("features", "dense", "label", "time"):
        a, b = getattr(one, what), getattr(other, what)
        if a != b:
            if isinstance(a, tuple):
                a, b = sorted(set(a) - set(b)), sorted(set(b) - set(a))
                return f"{what} {', '.join(a) or 'none'} more, {', '.join(b) or 'none'} fewer"
            return f"{what} {a!r} and {b!r}"
    return ""
