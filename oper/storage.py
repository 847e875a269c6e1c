"""Files and folders that are written whole or not at all.

Everything goes to a temporary name beside its destination, is flushed to the disk (fsync) and
then renamed, so that a full disk or Ctrl-C leaves what was there before. A folder is ours when
it holds its marker, a JSON file with the schema and the size and SHA-256 of every other file;
only such a folder is ever replaced. No format here is pickled.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.errors import OperError

_HASH_BLOCK_BYTES = 1 << 22


@contextlib.contextmanager
def atomic_folder(path: Path | str, marker: str, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that takes the place of `path` when the block ends well.

    An existing `path` is replaced only if it is empty or holds `marker`. `durable` flushes every
    file to the disk first. Raises OperError where the place is taken or cannot be written.
    """
    path = Path(path)
    check_place(path, marker)
    parent = path.absolute().parent
    temporary = _writing(path, lambda: _make_temporary_folder(parent, path.name))
    try:
        yield temporary
        if durable:
            _sync_tree(temporary)
        _replace_folder(temporary, path)
        if durable:
            _sync_directory(parent)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        # A no-op once the rename has been made; also the way out for Ctrl-C.
        _remove(temporary)


def check_place(path: Path | str, marker: str | None = None) -> None:
    """Raise OperError where a folder with `marker`, or without one a file, may not be written.

    Commands that work long before they write call it first.
    """
    path = Path(path)
    above = next(folder for folder in path.absolute().parents if os.path.exists(folder))
    if not os.path.isdir(above):
        raise OperError(f"{path}: {above} is a file, and a folder was needed; name another place")
    if marker is None:
        if os.path.isdir(path):
            raise OperError(f"{path}: is a folder, and a file is to be written; name another place")
    elif os.path.exists(path) and not _writing(path, lambda: _replaceable(path, marker)):
        raise OperError(
            f"{path}: exists and is no folder with {marker} in it, so it is not overwritten; "
            "name another place, or remove it"
        )


@contextlib.contextmanager
def atomic_file(path: Path | str) -> Iterator[Path]:
    """Yield a temporary path whose file takes the place of `path` when the block ends well."""
    path = Path(path)
    check_place(path)
    parent = path.absolute().parent

    def make() -> Path:
        parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=parent)
        os.close(handle)
        return Path(name)

    temporary = _writing(path, make)
    try:
        yield temporary
        temporary.chmod(0o644)
        _sync_file(temporary)
        os.replace(temporary, path)
        _sync_directory(parent)
    except OSError as error:
        raise _write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path | str, content: Any) -> None:
    """Write `content` as indented JSON, keys in the order given."""
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(path: Path | str) -> Any:
    """Read a JSON file; OperError names the file, line and column where it breaks."""
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
            "the file is damaged or half-copied: make it again, or copy it again"
        ) from error


def save_array(path: Path | str, array: NDArray[Any]) -> None:
    """Write one array as .npy."""
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def load_array(path: Path | str, mmap: bool = True) -> NDArray[Any]:
    """Read one .npy array, memory-mapped unless told not to; never unpickles.

    Raises OperError where the file is missing, truncated or no .npy at all.
    """
    path = Path(path)
    try:
        if path.stat().st_size == 0:
            raise ValueError("it is empty")
        return np.load(path, mmap_mode="r" if mmap else None, allow_pickle=False)
    except FileNotFoundError as error:
        raise OperError(f"{path}: no such file; the folder is incomplete") from error
    except (OSError, ValueError, EOFError) as error:
        raise OperError(f"{path}: is no readable .npy array ({error}); make it again") from error


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


def open_folder(path: Path | str, marker: str, schema: str, version: int) -> dict[str, Any]:
    """The marker of a folder, once it is known to be of our `schema` and `version`."""
    path = Path(path)
    if not path.is_dir():
        raise OperError(f"{path}: no such folder; a folder with {marker} in it was expected")
    if not (path / marker).is_file():
        found = ", ".join(sorted(p.name for p in path.iterdir())[:5]) or "nothing"
        raise OperError(f"{path}: holds no {marker} (but {found}); is it the right folder?")
    content = read_json(path / marker)
    if not isinstance(content, dict) or content.get("schema") != schema:
        given = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise OperError(f"{path / marker}: schema {given!r}, and {schema!r} was needed")
    if content.get("version") != version:
        raise OperError(
            f"{path / marker}: version {content.get('version')!r}, and this oper reads {version}; "
            "make the folder again with this version"
        )
    return content


def verify_files(folder: Path | str, described: dict[str, Any], digests: bool) -> None:
    """Compare the files of `folder` with what its marker says: sizes, and `digests` if asked."""
    folder = Path(folder)
    for name, expected in described.items():
        file = folder / name
        if not file.is_file():
            raise OperError(f"{file}: is missing; the folder is incomplete: copy or make it again")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise OperError(
                f"{file}: {size} bytes, and {expected['bytes']} were written; "
                "it is truncated or was changed: copy or make it again"
            )
    if digests:
        names = list(described)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            found = pool.map(sha256, [folder / name for name in names])
            for name, digest in zip(names, found, strict=True):
                if digest != described[name]["sha256"]:
                    raise OperError(
                        f"{folder / name}: its SHA-256 is not the one in the folder's record; "
                        "the file was changed or damaged: copy or make it again"
                    )


def _replaceable(path: Path, marker: str) -> bool:
    return path.is_dir() and ((path / marker).is_file() or not any(path.iterdir()))


def _make_temporary_folder(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=parent))
    temporary.chmod(0o755)
    return temporary


def _remove(folder: Path) -> None:
    """Remove a folder, also when Ctrl-C is pressed again meanwhile."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _replace_folder(temporary: Path, path: Path) -> None:
    if not path.exists():
        os.rename(temporary, path)
        return
    # A folder cannot be renamed over a full one: move the old one aside first, and back if the
    # second rename fails, so that one of the two is always there.
    aside = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=temporary.parent))
    os.rename(path, aside / "old")
    try:
        os.rename(temporary, path)
    except BaseException:
        os.rename(aside / "old", path)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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


def _writing(path: Path, make: Any) -> Path:
    try:
        return make()
    except OSError as error:
        raise _write_error(path, error) from error


def _write_error(path: Path, error: OSError) -> OperError:
    # NumPy, where a disk is full, says only how many items it wrote.
    reason = error.strerror or f"a file was not written whole: {error}"
    return OperError(
        f"{path}: cannot be written ({reason}); nothing was left there: "
        "free space or choose another place, and run it again"
    )
