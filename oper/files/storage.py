"""Files and folders that are written completely or not at all.

Everything is written to a hidden name next to its destination (temporaries.py), flushed to the disk
(fsync) and then renamed, so that after a full disk, Ctrl-C or kill the destination is unchanged. A
link at the destination is followed. An existing destination is replaced only on request, and a
folder only if oper wrote everything in it (overwrite_rules.py): this is checked before the work,
and again once the new folder has taken the name. Nothing here is pickled.
"""

import contextlib
import errno
import itertools
import os
import tempfile
import tokenize
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from oper.base import open_files, process_signals
from oper.base.errors import OperError, OperWarning
from oper.files import atomic_renames, temporaries
from oper.files.input_files import LISTED, open_file, refuse_url
from oper.files.overwrite_rules import (
    Format,
    file_refusal,
    folder_refusal,
    inside_refusal,
    is_wholly,
)

# Errors of NumPy for a damaged header, which it reads as Python, and for one that states a shape
# beyond the memory or the file.
HEADER_ERRORS = (
    ValueError,
    TypeError,
    SyntaxError,
    tokenize.TokenError,
    EOFError,
    MemoryError,
    OverflowError,
    RecursionError,
)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Open files that are reserved for the clean-up, which needs some even if no more can be opened: one
# for each level of a folder, and one to list it.
_TO_REMOVE = 8
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.EOPNOTSUPP)
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@contextlib.contextmanager
def atomic_folder(path: Path | str, kind: Format, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends without an error.

    An existing `path` is replaced only if it is empty or, with `overwrite`, a folder of this kind
    with nothing else in it. Every file is flushed to the disk first. Raise OperError if `path` is
    taken or cannot be written.
    """
    check_output(path, kind, overwrite)
    path = Path(path)
    target = _followed(path)
    with _written(path, target, folder=True) as temporary:
        yield temporary.path
        _sync_tree(temporary.path)
        temporary.take_mode()
        with process_signals.held():
            try:
                _place_folder(temporary, target, kind, overwrite)
            except _TakenError as taken:
                raise _came_meanwhile(path, taken.refusal, _kept(temporary, target)) from taken
        _sync_directory(target.parent)


def check_output(path: Path | str, kind: Format | None = None, overwrite: bool = False) -> None:
    """Raise OperError if a folder of a `kind`, or a file if `kind` is None, may not be written.

    Commands call it before they start to work. It also removes remains of killed commands next to
    `path`.
    """
    refuse_url(path, written=True)
    path = Path(path)
    try:
        target = _followed(path)
        above = next(folder for folder in (*target.parents, target) if folder.exists())
        if not above.is_dir():
            raise OperError(
                f"{path}: expected a folder at {above}, got a file; choose another path"
            )
        if refusal := inside_refusal(target):
            raise OperError(f"{path}: {refusal}")
        _check_writable(path, above)
        temporaries.sweep(target, lambda old: kind is not None and is_wholly(old, kind))
        refusal = _refusal(target, kind, overwrite)
    except OSError as error:
        raise _write_error(path, error) from error
    if refusal:
        raise OperError(f"{path}: {refusal}")


def _check_writable(path: Path, folder: Path) -> None:
    """Raise OperError if no file can be made in the folder in which `path` is to be written."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno not in _NO_PLACE:
            raise
        reason = error.strerror if error.errno != errno.ENOENT else "its file system makes none"
        raise OperError(
            f"{path}: no file can be made in {folder} ({reason}); choose a path in a folder that "
            "you may write to"
        ) from error


@contextlib.contextmanager
def scratch_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder next to `path` that is removed when the block ends."""
    path = Path(path)
    with _written(path, _followed(path), folder=True) as temporary:
        yield temporary.path


@contextlib.contextmanager
def atomic_file(path: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary path whose file becomes `path` when the block ends without an error.

    The file must have `FILE_MARK` near its beginning or its end: with `overwrite`, an existing
    `path` is replaced only if it has. Raise OperError if `path` may not be replaced, or cannot be
    written.
    """
    check_output(path, overwrite=overwrite)
    path = Path(path)
    target = _followed(path)
    with _written(path, target, folder=False) as temporary:
        yield temporary.path
        _sync_file(temporary.path)
        temporary.take_mode()
        while True:
            if refusal := _refusal(target, None, overwrite):
                raise _came_meanwhile(path, refusal, _kept(temporary, target))
            if os.path.lexists(target):
                os.replace(temporary.path, target)
                break
            try:
                atomic_renames.rename_new(temporary.path, target)
            except FileExistsError:
                continue  # Another command wrote it in this moment.
            break
        _sync_directory(target.parent)


def save_array(path: Path | str, array: NDArray[Any]) -> None:
    """Write one array as .npy."""
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def load_array(path: Path | str, mmap: bool = True) -> NDArray[Any]:
    """Read one .npy array, memory-mapped unless `mmap` is false; never unpickles.

    Raise OperError if the file is missing, truncated or not a .npy array.
    """
    try:
        with open_file(path, LISTED) as file:
            return _mapped(file) if mmap else np.lib.format.read_array(file, allow_pickle=False)
    except (*HEADER_ERRORS, OSError) as error:
        if isinstance(error, OSError) and open_files.are_too_many(error):
            raise OperError(f"{path}: {error.strerror}; {open_files.REMEDY}") from error
        raise OperError(
            f"{path}: is not a readable .npy array ({error}); write or copy it again"
        ) from error


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape of a .npy array, whether it is stored by columns, and its dtype; the array
    follows in the file. Raises one of `HEADER_ERRORS` if the header is damaged."""
    read_header = _HEADERS.get(np.lib.format.read_magic(file))
    if read_header is None:
        raise ValueError("it has a version of the format that oper does not read")
    shape, is_fortran, dtype = read_header(file)
    return shape, is_fortran, dtype


def _mapped(file: BufferedReader) -> NDArray[Any]:
    """Return the array of an open .npy file, memory-mapped, because NumPy maps only files that it
    opens itself."""
    shape, is_fortran, dtype = read_npy_header(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    order: Any = "F" if is_fortran else "C"
    return np.memmap(file, dtype, "r", offset=file.tell(), shape=shape, order=order)


@contextlib.contextmanager
def _written(path: Path, target: Path, folder: bool) -> Iterator[temporaries.Temporary]:
    """Yield a temporary folder or file next to `target`, removed at the end if it still exists."""
    temporary = None
    spare: list[int] = []
    try:
        while len(spare) < _TO_REMOVE:
            spare.append(os.open(os.devnull, os.O_RDONLY))
        target.parent.mkdir(parents=True, exist_ok=True)
        # Ctrl-C must not come between its creation and its name's being known here.
        with process_signals.held():
            temporary = temporaries.Temporary(target, folder)
        yield temporary
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        # A second Ctrl-C must not interrupt the clean-up.
        with process_signals.held():
            for handle in spare:
                os.close(handle)
            if temporary is not None and not temporary.close():
                warnings.warn(
                    f"{temporary.path}: was left behind: it could not be removed; remove it",
                    OperWarning,
                    stacklevel=2,
                )


def _followed(path: Path) -> Path:
    """Return the path behind a link: the link stays, and its target is written."""
    return Path(os.path.realpath(path))


def _refusal(target: Path, kind: Format | None, overwrite: bool) -> str | None:
    if not os.path.lexists(target):
        return None
    if kind is None:
        return file_refusal(target, overwrite)
    return folder_refusal(target, kind, overwrite)


class _TakenError(Exception):
    """Error of a destination that was created while the command worked, and may not be replaced."""

    def __init__(self, refusal: str) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def _place_folder(made: temporaries.Temporary, target: Path, kind: Format, overwrite: bool) -> None:
    """Rename a finished folder to `target`, and remove the old folder if oper wrote all of it.

    Raise _TakenError, with both folders unchanged, if the old folder may not be replaced.
    """
    while True:
        try:
            # Succeeds only if nothing, or an empty folder, has the name.
            made.path.rename(target)
            return
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        if refusal := _refusal(target, kind, overwrite):
            raise _TakenError(refusal)
        with contextlib.suppress(FileNotFoundError), temporaries.locked(target):
            old = _exchange(made, target, kind)
            break
    # Another command may have found and removed it already.
    with contextlib.suppress(FileNotFoundError):
        temporaries.discard(old, target)


def _exchange(made: temporaries.Temporary, target: Path, kind: Format) -> Path:
    """Give the new folder the name of the old one; return the old folder's new path.

    The old one is checked after it has lost its name, when nothing can be added by that name.
    """
    made.rename(temporaries.OLD)
    if atomic_renames.exchange(made.path, target):
        old = made.path

        def undo() -> None:
            if not atomic_renames.exchange(old, target):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    else:
        made.rename(temporaries.UNFINISHED)
        old = temporaries.hidden_name(target, temporaries.OLD)
        target.rename(old)

        def undo() -> None:
            old.rename(target)

    try:
        if os.path.lexists(old) and (refusal := folder_refusal(old, kind, overwrite=True)):
            raise _TakenError(refusal)
        if old != made.path:
            made.path.rename(target)
    except BaseException as error:
        try:
            undo()
        except OSError as failed:
            raise OperError(
                f"{target}: could not be replaced ({error}), and the old folder is now {old} "
                f"({failed.strerror}): move it back"
            ) from error
        raise
    return old


def _kept(made: temporaries.Temporary, target: Path) -> Path:
    """Keep the result, which may have taken hours, under a free name next to its destination."""
    for number in itertools.count(1):
        path = target.with_name(f"{target.name}.kept-{number}")
        try:
            atomic_renames.rename_new(made.path, path)
        except FileExistsError:
            continue
        return path
    raise AssertionError("there are more names than files")


def _came_meanwhile(path: Path, refusal: str, kept: Path) -> OperError:
    return OperError(
        f"{path}: {refusal} (it appeared while this command worked; its result is kept as "
        f"{path.with_name(kept.name)})"
    )


def _sync_tree(folder: Path) -> None:
    files = [p for p in folder.rglob("*") if p.is_file()]
    with ThreadPoolExecutor(max_workers=8) as pool:
        list(pool.map(_sync_file, files))
    for directory in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        _sync_directory(directory)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_error(path: Path, error: OSError) -> OperError:
    # If a disk is full, NumPy reports only the number of items written, without an errno.
    reason = error.strerror or f"a file was not written whole: {error}"
    if open_files.are_too_many(error):
        remedy = open_files.REMEDY
    else:
        space = "free space or " if error.errno in _FULL else ""
        remedy = f"{space}choose another path, and run it again"
    return OperError(f"{path}: cannot be written ({reason}): {remedy}")
