"""Files and folders that are written completely or not at all.

Everything is written to a hidden name beside its destination (temporaries.py), flushed to the disk
(fsync) and then renamed, so that after a full disk, Ctrl-C or kill the destination is as it was
before. A link at the destination is followed. What exists there is replaced only if that was asked
for, and a folder only if oper wrote everything in it (overwrite_rules.py): this is checked before
the work, and again once the new folder has taken the name. Nothing here is pickled.
"""

import contextlib
import errno
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.files import atomic_renames, process_signals, temporaries
from oper.files.overwrite_rules import Format, file_refusal, folder_refusal, is_wholly

_HASH_BLOCK_BYTES = 1 << 22
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


@contextlib.contextmanager
def atomic_folder(path: Path | str, kind: Format, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` when the block ends without an error.

    An existing `path` is replaced only if it is empty or, with `overwrite`, a folder of this kind
    with nothing else in it. Every file is flushed to the disk first. OperError where `path`
    is taken or cannot be written.
    """
    path = Path(path)
    check_output(path, kind, overwrite)
    target = _followed(path)
    with _written(path, target, folder=True) as temporary:
        yield temporary.path
        _sync_tree(temporary.path)
        with process_signals.held():
            try:
                _place_folder(temporary, target, kind, overwrite)
            except _TakenError as taken:
                raise _came_meanwhile(path, taken.refusal, _kept(temporary, target)) from taken
        _sync_directory(target.parent)


def check_output(path: Path | str, kind: Format | None = None, overwrite: bool = False) -> None:
    """OperError where a folder of a `kind`, or a file where `kind` is None, may not be written.

    Commands call it before they start to work. It also removes what killed commands left beside
    `path`.
    """
    path = Path(path)
    try:
        target = _followed(path)
        above = next(folder for folder in (*target.parents, target) if folder.exists())
        if not above.is_dir():
            raise OperError(
                f"{path}: {above} is a file, and a folder was needed; choose another path"
            )
        temporaries.sweep(target, lambda old: kind is not None and is_wholly(old, kind))
        refusal = _refusal(target, kind, overwrite)
    except OSError as error:
        raise _write_error(path, error) from error
    if refusal:
        raise OperError(f"{path}: {refusal}")


@contextlib.contextmanager
def scratch_folder(path: Path | str) -> Iterator[Path]:
    """Yield a temporary folder beside `path` that is removed when the block ends."""
    path = Path(path)
    with _written(path, _followed(path), folder=True) as temporary:
        yield temporary.path


@contextlib.contextmanager
def atomic_file(path: Path | str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary path whose file becomes `path` when the block ends without an error.

    OperError where `path` exists and `overwrite` is false, or where it cannot be written.
    """
    path = Path(path)
    check_output(path, overwrite=overwrite)
    target = _followed(path)
    with _written(path, target, folder=False) as temporary:
        yield temporary.path
        temporary.path.chmod(0o644)
        _sync_file(temporary.path)
        if overwrite:
            os.replace(temporary.path, target)
        else:
            try:
                atomic_renames.rename_new(temporary.path, target)
            except FileExistsError as error:
                refusal = file_refusal(target, overwrite) or "exists"
                raise _came_meanwhile(path, refusal, _kept(temporary, target)) from error
        _sync_directory(target.parent)


def write_json(path: Path | str, content: Any) -> None:
    """Write `content` as indented JSON, keys in the order given."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path | str) -> Any:
    """Read a JSON file; OperError names the file, line and column of a syntax error."""
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise OperError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise OperError(f"{path}: cannot be read as text ({error})") from error
    except json.JSONDecodeError as error:
        raise OperError(
            f"{path}, line {error.lineno}, column {error.colno}: is not JSON ({error.msg}); "
            "the file is damaged or incomplete: write or copy it again"
        ) from error


def save_array(path: Path | str, array: NDArray[Any]) -> None:
    """Write one array as .npy."""
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def load_array(path: Path | str, mmap: bool = True) -> NDArray[Any]:
    """Read one .npy array, memory-mapped unless `mmap` is false; never unpickles.

    OperError where the file is missing, truncated or not a .npy array.
    """
    path = Path(path)
    try:
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        return np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise OperError(f"{path}: no such file; the folder is incomplete") from error
    except (OSError, ValueError, EOFError) as error:
        raise OperError(
            f"{path}: is not a readable .npy array ({error}); write or copy it again"
        ) from error


def sha256(path: Path | str) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> {bytes, sha256} of every file below `folder`, for its marker; hashes in parallel."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        digests = list(pool.map(sha256, files))
    return {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "sha256": digest}
        for file, digest in zip(files, digests, strict=True)
    }


def open_folder(path: Path | str, kind: Format) -> dict[str, Any]:
    """The content of a folder's marker; OperError where the folder is not of this kind."""
    path = Path(path)
    marker, schema, version, oldest = kind
    if not path.is_dir():
        raise OperError(f"{path}: no such folder; a folder with a {marker} was needed")
    if not (path / marker).is_file():
        found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
        raise OperError(f"{path}: holds no {marker} (but {found}); is it the right folder?")
    content = read_json(path / marker)
    if not isinstance(content, dict) or content.get("schema") != schema:
        given = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise OperError(f"{path / marker}: schema {given!r}, and {schema!r} was needed")
    if content.get("version") not in range(oldest, version + 1):
        read = version if oldest == version else f"{oldest} to {version}"
        raise OperError(
            f"{path / marker}: version {content.get('version')!r}, and this oper reads {read}; "
            "write the folder again with this version"
        )
    return content


def verify_files(folder: Path | str, described: dict[str, Any], digests: bool) -> None:
    """Compare the files of `folder` with what its marker says: sizes, and `digests` if asked."""
    folder = Path(folder)
    for name, expected in described.items():
        file = folder / name
        if not file.is_file():
            raise OperError(f"{file}: is missing; the folder is incomplete: copy or write it again")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise OperError(
                f"{file}: {size} bytes, and {expected['bytes']} were written; "
                "it is truncated or was changed: copy or write it again"
            )
    if digests:
        names = list(described)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            found = pool.map(sha256, [folder / name for name in names])
            for name, digest in zip(names, found, strict=True):
                if digest != described[name]["sha256"]:
                    raise OperError(
                        f"{folder / name}: its SHA-256 is not the one in the folder's marker; "
                        "the file was changed or damaged: copy or write it again"
                    )


@contextlib.contextmanager
def _written(path: Path, target: Path, folder: bool) -> Iterator[temporaries.Temporary]:
    """A temporary folder or file beside `target`, removed at the end if it still exists."""
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporaries.Temporary(target, folder)
        yield temporary
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        # A second Ctrl-C must not interrupt the clean-up.
        with process_signals.held():
            if temporary is not None:
                temporary.close()


def _followed(path: Path) -> Path:
    """The path behind a link: the link stays, and its target is written."""
    return Path(os.path.realpath(path))


def _refusal(target: Path, kind: Format | None, overwrite: bool) -> str | None:
    if not os.path.lexists(target):
        return None
    if kind is None:
        return file_refusal(target, overwrite)
    return folder_refusal(target, kind, overwrite)


class _TakenError(Exception):
    """The destination was created while the command worked, and may not be replaced."""

    def __init__(self, refusal: str) -> None:
        super().__init__(refusal)
        self.refusal = refusal


def _place_folder(made: temporaries.Temporary, target: Path, kind: Format, overwrite: bool) -> None:
    """Rename a finished folder to `target`, and remove the old folder if oper wrote all of it.

    _TakenError where the old folder may not be replaced; both are then as they were.
    """
    while True:
        try:
            # Succeeds where nothing or an empty folder has the name, and only there.
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
    garbage = temporaries.hidden_name(target, temporaries.UNFINISHED)
    # Another command may have found and removed it already.
    with contextlib.suppress(FileNotFoundError):
        old.rename(garbage)
        temporaries.remove(garbage)


def _exchange(made: temporaries.Temporary, target: Path, kind: Format) -> Path:
    """Give the new folder the name of the old one; returns where the old one is now.

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
    """Keep the result, which may have taken hours, under a free name beside its destination."""
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
    # Where a disk is full, NumPy reports only how many items it wrote, without an errno.
    reason = error.strerror or f"a file was not written whole: {error}"
    return OperError(
        f"{path}: cannot be written ({reason}); nothing was left behind: "
        "free space or choose another path, and run it again"
    )
