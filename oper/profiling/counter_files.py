"""Counters on the disk: one for each row or, if that is smaller, only the counters above 0.

Dense counters are NAME.npy, uint32 or uint64 [size]. Sparse ones, of windows, in which most rows
are never read, lie in blocks of 65,536 rows:

    NAME_block_starts.npy   int64 [blocks + 1]: where each block begins in the next two
    NAME_rows.npy           uint16 [n]: the rows that were read, ascending, counted from their block
    NAME_counts.npy         uint8 [n]: their counters, and 0 for one above 255
    NAME_large_counts.npy   uint32 or uint64: those above 255, in the order of rows

That is 3 bytes for a row that was read (7 for a hot one), and 8 bytes for 65,536 that were not.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.arrays import Counts, Ints
from oper.base.errors import OperError
from oper.files.storage import load_array, save_array

BLOCK_ROWS = 1 << 16
_MOST_SMALL = 255
_HEADER_BYTES = 128  # NumPy's header of an array of one dimension


@dataclass(eq=False)
class SparseCounts:
    """Counters of `size` rows, most of which are 0. The arrays are those of the files."""

    size: int
    block_starts: Ints
    rows: NDArray[np.uint16]
    counts: NDArray[np.uint8]
    large_counts: Counts

    @property
    def dtype(self) -> Any:
        """The type of the dense counters."""
        return self.large_counts.dtype

    def max(self, initial: int = 0) -> int:
        """Return the largest counter, at least `initial`."""
        small = int(self.counts.max(initial=0))
        return max(initial, small, int(self.large_counts.max(initial=0)))

    def sum(self, dtype: Any) -> Any:
        """Return the sum of all counters, in `dtype`."""
        return self.counts.sum(dtype=dtype) + self.large_counts.sum(dtype=dtype)

    def add_to(self, dense: Counts) -> None:
        """Add the counters to `dense`, of as many rows and as wide as the sums need."""
        for block, rows, counts in self._blocks(dense.dtype):
            dense[block : block + BLOCK_ROWS][rows] += counts

    @cached_property
    def dense(self) -> Counts:
        """A counter for each row, made when it is first asked for. `del` frees its memory."""
        made: Counts = np.zeros(self.size, self.dtype)
        for block, rows, counts in self._blocks(self.dtype):
            made[block : block + BLOCK_ROWS][rows] = counts
        return made

    def check(self, where: Path) -> None:
        """Raise OperError if the arrays do not fit together; whatever they hold, `dense` is
        safe."""
        starts, n = self.block_starts, len(self.rows)
        if len(starts) != -(-self.size // BLOCK_ROWS) + 1 or len(self.counts) != n:
            raise _damaged(where, f"they are not of {self.size:,} rows")
        if starts[0] != 0 or starts[-1] != n or (starts[1:] < starts[:-1]).any():
            raise _damaged(where, "blocks do not follow each other")
        ascending = self.rows[1:] > self.rows[:-1]
        inner = starts[(starts > 0) & (starts < n)]
        ascending[inner - 1] = True  # Another block begins after these.
        last = self.rows[starts[-2] :]
        if not ascending.all() or (len(last) and self.size - 1 & (BLOCK_ROWS - 1) < last[-1]):
            raise _damaged(where, "rows are not ascending")
        large = self.large_counts
        if n - np.count_nonzero(self.counts) != len(large) or large.min(initial=256) < 256:
            raise _damaged(where, "the large counts are not those that are left out of the others")

    def _blocks(self, dtype: Any) -> Iterator[tuple[int, NDArray[np.uint16], Any]]:
        """Yield the first row of each block with counters that are not 0, its rows, and their
        counters in `dtype`. A block's counters fit in a cache."""
        large_first = 0
        for block in np.flatnonzero(np.diff(self.block_starts)).tolist():
            of_block = slice(*self.block_starts[block : block + 2].tolist())
            counts = self.counts[of_block].astype(dtype)
            large = np.flatnonzero(counts == 0)
            counts[large] = self.large_counts[large_first : large_first + len(large)]
            large_first += len(large)
            yield block * BLOCK_ROWS, self.rows[of_block], counts


_PARTS: dict[str, tuple[type, ...]] = {
    "block_starts": (np.int64,),
    "rows": (np.uint16,),
    "counts": (np.uint8,),
    "large_counts": (np.uint32, np.uint64),
}
assert list(_PARTS) == [part.name for part in fields(SparseCounts)][1:]


def counter_files(name: str, described: Any) -> list[str]:
    """Return the files of counters `name`, given those of the folder. Raise ValueError if some are
    missing."""
    for files in ([f"{name}.npy"], [f"{name}_{part}.npy" for part in _PARTS]):
        if set(files) <= set(described):
            return files
    raise ValueError("files: the counters are missing")


def save_counters(
    folder: Path, name: str, counters: Counts, sparse: bool = False
) -> Counts | SparseCounts:
    """Write counters into a folder that is being written, and return them as they are there.

    With `sparse` they are written sparse if that is smaller, and a dense file that they are mapped
    to is removed.
    """
    dense_file = folder / f"{name}.npy"
    if sparse and (made := _save_sparse(folder, name, counters)):
        dense_file.unlink(missing_ok=True)
        return made
    if isinstance(counters, np.memmap) and dense_file.exists():
        counters.flush()  # The folder is new, so the counters are mapped to this file.
    else:
        save_array(dense_file, counters)
    return counters


def load_counters(folder: Path, files: list[str], size: int, mmap: bool) -> Any:
    """Return the counters in `files`, as `counter_files` names them: `Counts` or `SparseCounts`.

    Raise OperError if they are not `size` counters.
    """
    if len(files) == 1:
        types: tuple[type, ...] = (np.uint32, np.uint64)
        return _load(folder / files[0], types, size, mmap)
    arrays = [
        _load(folder / file, types, None, mmap)
        for file, types in zip(files, _PARTS.values(), strict=True)
    ]
    sparse = SparseCounts(size, *arrays)
    sparse.check(folder / files[1])
    return sparse


def add_counters(counters: Counts | SparseCounts, total: Counts) -> None:
    """Add counters to `total`, of as many rows and as wide as the sums need."""
    if isinstance(counters, SparseCounts):
        counters.add_to(total)
    else:
        np.add(total, counters, out=total, casting="unsafe")


def sparse_counts(counters: Counts) -> SparseCounts:
    """Return the counters that are not 0, in memory."""
    rows = np.flatnonzero(counters)
    counts = counters[rows]
    large = counts > _MOST_SMALL
    blocks = -(-len(counters) // BLOCK_ROWS)
    return SparseCounts(
        len(counters),
        np.searchsorted(rows, BLOCK_ROWS * np.arange(blocks + 1)).astype(np.int64),
        rows.astype(np.uint16),  # the low 16 bits: their place in the block
        np.where(large, 0, counts).astype(np.uint8),
        counts[large],
    )


def npy_sha256(array: Counts | Ints) -> str:
    """Return the SHA-256 of the .npy file that `save_array` would write, without writing it."""
    digest = hashlib.sha256()
    sink: Any = SimpleNamespace(write=digest.update)
    np.lib.format.write_array(sink, np.ascontiguousarray(array), allow_pickle=False)
    return digest.hexdigest()


def _save_sparse(folder: Path, name: str, counters: Counts) -> SparseCounts | None:
    """Write the files of sparse counters block by block; None if dense ones are not larger."""
    firsts = range(0, len(counters), BLOCK_ROWS)
    blocks = [counters[first : first + BLOCK_ROWS] for first in firsts]
    starts = np.zeros(len(blocks) + 1, np.int64)
    np.cumsum([np.count_nonzero(block) for block in blocks], out=starts[1:])
    n, large = int(starts[-1]), sum(int(np.count_nonzero(b > _MOST_SMALL)) for b in blocks)
    sparse_bytes = starts.nbytes + 3 * n + counters.itemsize * large
    if sparse_bytes + len(_PARTS) * _HEADER_BYTES >= counters.nbytes + _HEADER_BYTES:
        return None
    files = [f"{name}_{part}.npy" for part in _PARTS]
    save_array(folder / files[0], starts)
    with contextlib.ExitStack() as stack:
        rows_file, counts_file, large_file = (
            stack.enter_context(_new_array(folder / file, dtype, length))
            for file, dtype, length in zip(
                files[1:], (np.uint16, np.uint8, counters.dtype), (n, n, large), strict=True
            )
        )
        for block in blocks:
            rows = np.flatnonzero(block)
            counts = block[rows]
            is_large = counts > _MOST_SMALL
            rows.astype(np.uint16).tofile(rows_file)
            np.where(is_large, 0, counts).astype(np.uint8).tofile(counts_file)
            counts[is_large].tofile(large_file)
    loaded = load_counters(folder, files, len(counters), mmap=True)
    assert isinstance(loaded, SparseCounts)
    return loaded


@contextlib.contextmanager
def _new_array(path: Path, dtype: Any, length: int) -> Iterator[Any]:
    """Create a .npy file of `length` numbers, and yield the array to write them into."""
    described = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": (length,),
    }
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, described)
        yield file


def _load(path: Path, types: tuple[type, ...], size: int | None, mmap: bool) -> Any:
    array = load_array(path, mmap)
    if array.dtype not in types or array.ndim != 1 or size not in (None, len(array)):
        expected = " or ".join(np.dtype(t).name for t in types)
        count = "numbers" if size is None else f"{size:,} counters"
        raise OperError(
            f"{path}: expected {count} of {expected}, got {array.dtype} {array.shape}; copy or "
            "write the profile again"
        )
    return array


def _damaged(where: Path, what: str) -> OperError:
    return OperError(
        f"{where}: is damaged, or another of these counters' files ({what}); "
        "copy or write the profile again"
    )
