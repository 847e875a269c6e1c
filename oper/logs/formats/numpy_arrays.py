"""Logs in NumPy's formats: jagged .npz, and TorchRec's preprocessed Criteo form.

A jagged .npz holds for each feature the ids of all samples, one bag after the other, and the
size of each bag. TorchRec's form (torchrec.datasets.criteo) has three arrays, in files
NAME_dense.npy, NAME_sparse.npy and NAME_labels.npy or in one .npz: dense float32 [n, 13], sparse
integers [n, 26], labels [n, 1]; its columns are called I1 … I13, C1 … C26 and label here. DLRM's
.npz of the same content names them X_int, X_cat and y.

Arrays are streamed, also from .npz members, so that memory does not depend on their size.
"""

import contextlib
import lzma
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from oper.base.errors import OperError, one_line
from oper.base.spoken import option
from oper.files.input_files import LOG, open_file
from oper.files.storage import HEADER_ERRORS, read_npy_header
from oper.logs.batches.batch import Batch, Jagged, Location
from oper.logs.batches.columns import Column, KnownSize, Selection
from oper.logs.formats.decompression import check_archive

_CRITEO_ARRAYS = ({"sparse", "dense", "labels"}, {"X_cat", "X_int", "y"})
_ROLES = {
    "sparse": "sparse",
    "dense": "dense",
    "labels": "labels",
    "X_cat": "sparse",
    "X_int": "dense",
    "y": "labels",
}

# Errors of NumPy and zipfile for a damaged header, member or archive: a flipped bit may select an
# encryption or compression that zipfile does not have.
_DAMAGE = (
    *HEADER_ERRORS,
    OSError,
    RuntimeError,
    zlib.error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)
_MOST_FEATURES = 1 << 16
# Most bytes of an array that are read at once; a larger batch is cut.
_READ_BYTES = 1 << 28


class ArrayStream:
    """Reader of one .npy of `size` bytes from an open file, some rows at a time; never
    unpickles."""

    def __init__(self, file: IO[bytes], name: str, size: int) -> None:
        self._file = file
        self._name = name
        with _reading(name):
            self.shape, fortran, self.dtype = read_npy_header(file)
        if fortran and len(self.shape) > 1:
            raise OperError(
                f"{name}: is stored by columns; save it with numpy.ascontiguousarray first"
            )
        if self.dtype.hasobject:
            raise OperError(
                f"{name}: has Python objects, which are not loaded; save it as an array of numbers"
            )
        if self.dtype.kind not in "biuf" or not self.shape or min(self.shape) < 0:
            raise OperError(
                f"{name}: expected an array of numbers, got {self.dtype} of shape {self.shape}"
            )
        # The check precedes the allocation of the size that the header states.
        stated = file.tell() + math.prod(self.shape) * self.dtype.itemsize
        if stated > size:
            raise OperError(
                f"{name}: {size:,} bytes, and by its header there are {stated:,}; it is truncated "
                "or damaged: copy or write it again"
            )
        self.row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, rows: int) -> NDArray[Any]:
        """Return the next `rows` rows."""
        shape = (rows, *self.shape[1:])
        needed = math.prod(shape) * self.dtype.itemsize
        # A zipped member may return fewer bytes than asked for.
        parts = []
        with _reading(self._name):
            while needed and (part := self._file.read(needed)):
                parts.append(part)
                needed -= len(part)
        if needed:
            raise OperError(
                f"{self._name}: ends {needed:,} bytes too early by its header; it is truncated: "
                "copy or write it again"
            )
        return np.frombuffer(b"".join(parts), self.dtype).reshape(shape)


@contextlib.contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except _DAMAGE as error:
        raise OperError(
            f"{name}: is not a readable array ({one_line(error)}); it is damaged or "
            "truncated: copy or write it again"
        ) from error


class _Arrays:
    """Named arrays in one .npz, or each in its own .npy."""

    def __init__(self, path: Path, members: dict[str, Path] | None = None) -> None:
        self._path = path
        self._members = members

    @contextlib.contextmanager
    def open(self, *names: str) -> Iterator[list[ArrayStream]]:
        """Open streams of the named arrays."""
        with contextlib.ExitStack() as stack:
            streams = []
            archive = None if self._members else stack.enter_context(open_archive(self._path))
            for name in names:
                file: IO[bytes]
                if archive is None:
                    assert self._members is not None
                    path = self._members[name]
                    label, file, size = str(path), open_file(path, LOG), path.stat().st_size
                else:
                    label = f"{self._path}, array {name!r}"
                    with _reading(label):
                        file = archive.open(f"{name}.npy")
                        size = archive.getinfo(f"{name}.npy").file_size
                streams.append(ArrayStream(stack.enter_context(file), label, size))
            yield streams


def open_archive(path: Path) -> zipfile.ZipFile:
    """Return a zip file; raise OperError if it is not one, or truncated."""
    try:
        archive = zipfile.ZipFile(path)
    except _DAMAGE as error:
        raise OperError(
            f"{path}: is not a readable .npz ({one_line(error)}); it is damaged or "
            "truncated: copy or write it again"
        ) from error
    try:
        check_archive(path, archive)
    except OperError:
        archive.close()
        raise
    return archive


class JaggedSource(KnownSize):
    """One .npz with jagged arrays."""

    def __init__(self, path: Path, values: tuple[str, ...], lengths: tuple[str, ...]) -> None:
        self.name = str(path)
        self._arrays = _Arrays(path)
        self._pairs = dict(zip(values, lengths, strict=True))
        self.columns = tuple(Column(name, bags=True) for name in values)
        with self._arrays.open(*self._pairs.values()) as streams:
            sizes = {name: s.shape for name, s in zip(lengths, streams, strict=True)}
            for name, stream in zip(lengths, streams, strict=True):
                _need_integers(f"{path}, array {name!r}", stream, 1)
        if len(set(sizes.values())) > 1:
            stated = ", ".join(f"{name} {shape[0]}" for name, shape in sizes.items())
            raise OperError(f"{path}: lengths differ in their number of samples: {stated}")
        self.samples = next(iter(sizes.values()))[0]

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the samples in file order."""
        names = selection.features
        lengths_of = [self._pairs[name] for name in names]
        total = self.samples
        with self._arrays.open(*names, *lengths_of) as streams:
            values, lengths = streams[: len(names)], streams[len(names) :]
            for name, stream in zip(names, values, strict=True):
                _need_integers(f"{self.name}, array {name!r}", stream, 1)
            left = [stream.shape[0] for stream in values]
            for first in range(0, total, selection.batch_rows):
                samples = min(selection.batch_rows, total - first)
                location = Location(self.name, first, "sample")
                features = {}
                for index, name in enumerate(names):
                    sizes = lengths[index].read(samples).astype(np.int64)
                    _check_lengths(sizes, left[index], name, lengths_of[index], location)
                    size = int(sizes.sum())
                    left[index] -= size
                    ids = values[index].read(size)
                    unsigned = ids.dtype == np.uint64
                    features[name] = Jagged(
                        ids.astype(np.int64), sizes.astype(np.int32), unsigned=unsigned
                    )
                yield Batch(samples, features, location)
            for name, length_name, rest in zip(names, lengths_of, left, strict=True):
                if rest:
                    raise OperError(
                        f"{self.name}: {name!r} has {rest:,} ids more than the sum of "
                        f"{length_name!r}; is that the right pair of {option('--values')} and "
                        f"{option('--lengths')}?"
                    )


def _check_lengths(
    sizes: NDArray[np.int64], left: int, name: str, lengths: str, location: Location
) -> None:
    if len(sizes) and sizes.min() < 0:
        bad = int(np.argmax(sizes < 0))
        raise OperError(
            f"{location.of(bad)}: expected lengths of at least 0 in {lengths!r}, got "
            f"{int(sizes[bad])}"
        )
    if (len(sizes) and int(sizes.max()) > left) or int(sizes.sum()) > left:
        bad = int(np.argmax(np.cumsum(sizes) > left))
        raise OperError(
            f"{location.of(bad)}: {lengths!r} needs more ids than {name!r} has; is that the right "
            f"pair of {option('--values')} and {option('--lengths')}?"
        )


class CriteoArraysSource(KnownSize):
    """TorchRec's preprocessed Criteo form: one matrix of ids, with dense values and labels."""

    def __init__(self, path: Path, arrays: dict[str, str], members: dict[str, Path] | None) -> None:
        self.name = str(path)
        self._arrays = _Arrays(path, members)
        self._names = arrays
        with self._arrays.open(*arrays.values()) as streams:
            shapes = {role: s.shape for role, s in zip(arrays, streams, strict=True)}
            for role, name, stream in zip(arrays, arrays.values(), streams, strict=True):
                if role == "sparse":
                    _need_integers(f"{path}, array {name!r}", stream, 2)
        if "labels" in shapes and math.prod(shapes["labels"][1:]) != 1:
            raise OperError(
                f"{path}, array {arrays['labels']!r}: expected a label per sample, got shape "
                f"{shapes['labels']}"
            )
        if max(math.prod(shape[1:]) for shape in shapes.values()) > _MOST_FEATURES:
            raise OperError(
                f"{path}: has arrays of shapes {', '.join(map(str, shapes.values()))}, and at most "
                f"{_MOST_FEATURES:,} columns were expected; is it a matrix [samples, features]?"
            )
        rows = {role: shape[0] for role, shape in shapes.items()}
        if len(set(rows.values())) > 1:
            stated = ", ".join(f"{arrays[role]} {n:,}" for role, n in rows.items())
            raise OperError(f"{path}: the arrays differ in their number of samples: {stated}")
        self.samples = rows["sparse"]
        self._sparse = [f"C{i + 1}" for i in range(shapes["sparse"][1])]
        dense = shapes.get("dense", (0, 0))
        self._dense = [f"I{i + 1}" for i in range(dense[1] if len(dense) > 1 else 1)]
        columns = [Column(name) for name in self._sparse]
        columns += [Column(name, "dense", reason="an array of numbers") for name in self._dense]
        if "labels" in arrays:
            columns.append(Column("label", "other", reason="labels"))
        self.columns = tuple(columns)

    def batches(self, selection: Selection) -> Iterator[Batch]:
        """Yield the samples in file order."""
        misplaced = [n for n in selection.features if n not in self._sparse]
        if misplaced:
            raise OperError(
                f"{self.name}: {misplaced[0]!r} is a dense column of transformed numbers, which "
                f"cannot be ids; leave it out of {option('--columns')}"
            )
        features = [(n, self._sparse.index(n)) for n in selection.features]
        dense = [self._dense.index(n) for n in selection.dense]
        roles = ["sparse"]
        roles += ["dense"] if dense else []
        roles += ["labels"] if selection.label else []
        total = self.samples
        with self._arrays.open(*(self._names[role] for role in roles)) as opened:
            streams = dict(zip(roles, opened, strict=True))
            widest = max(stream.row_bytes for stream in opened)
            step = max(1, min(selection.batch_rows, _READ_BYTES // max(widest, 1)))
            for first in range(0, total, step):
                samples = min(step, total - first)
                parts = {role: stream.read(samples) for role, stream in streams.items()}
                unsigned = parts["sparse"].dtype == np.uint64
                ids = np.ascontiguousarray(parts["sparse"].T.astype(np.int64))
                yield Batch(
                    samples=samples,
                    features={n: Jagged(ids[i], unsigned=unsigned) for n, i in features},
                    location=Location(self.name, first, "sample"),
                    label=(
                        parts["labels"].reshape(samples).astype(np.float32)
                        if "labels" in parts
                        else None
                    ),
                    dense=(
                        parts["dense"].reshape(samples, -1)[:, dense].astype(np.float32)
                        if "dense" in parts
                        else None
                    ),
                )


def open_npz(
    path: Path, values: tuple[str, ...], lengths: tuple[str, ...]
) -> JaggedSource | CriteoArraysSource:
    """Return a jagged .npz if `values` and `lengths` name its arrays, else TorchRec's form."""
    with open_archive(path) as archive:
        names = [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]
    for name in (*values, *lengths):
        if name not in names:
            raise OperError(f"{path}: has no array {name!r}; it has {_listed(names) or 'none'}")
    if values:
        return JaggedSource(path, values, lengths)
    for form in _CRITEO_ARRAYS:
        if any(_ROLES[n] == "sparse" for n in form & set(names)):
            arrays = {_ROLES[n]: n for n in sorted(form & set(names))}
            return CriteoArraysSource(path, arrays, None)
    raise OperError(
        f"{path}: holds {_listed(names) or 'no arrays'}; name the arrays of ids and of bag sizes "
        f"with {option('--values')} and {option('--lengths')}"
    )


def open_npy(path: Path) -> CriteoArraysSource:
    """Return a matrix of ids [samples, features]; for NAME_sparse.npy, with dense and labels
    next to it."""
    members = {"sparse": path}
    for role in ("dense", "labels"):
        beside = path.with_name(path.name.replace("sparse", role))
        if beside != path and beside.is_file():
            members[role] = beside
    return CriteoArraysSource(path, {role: role for role in members}, members)


def _need_integers(name: str, stream: ArrayStream, dimensions: int) -> None:
    if stream.dtype.kind not in "iu" or len(stream.shape) != dimensions:
        raise OperError(
            f"{name}: expected integers in {dimensions} dimension{'s' if dimensions > 1 else ''}, "
            f"got {stream.dtype} of shape {stream.shape}"
        )


def _listed(names: Iterable[str]) -> str:
    """Return names on one line, with any characters escaped."""
    return ", ".join(name if name.isprintable() else repr(name) for name in names)
