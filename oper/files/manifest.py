"""Manifests: the marker of a folder lists its files with sizes and digests, and its own digest.

A folder's marker (`plan.json`, `profile.json`) has under `files` the size and SHA-256 of every
other file, and under `sha256` the digest of all the rest of it, so that no figure can be edited
and no bit can turn without being found. The digest is of the content, not of its bytes: a marker
that was only indented otherwise is the same. It is a check against damage and slips, no signature.
"""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from oper.base.errors import OperError
from oper.base.spoken import typed_path
from oper.files.input_files import LISTED, MARKER, open_file, refuse_url
from oper.files.json_file import canonical_json, read_json, with_matrix_texts, write_json
from oper.files.overwrite_rules import Format
from oper.files.what_is import what_is, written_kind

_HASH_BLOCK_BYTES = 1 << 22
_OWN_DIGEST = "sha256"
_MOST_NAME_BYTES, _MOST_PATH_BYTES = 255, 4096  # NAME_MAX and PATH_MAX of Linux


def sha256(path: Path | str) -> str:
    """Return the hex SHA-256 of a file's bytes."""
    with open_file(path, LISTED) as file:
        digest = hashlib.sha256()
        while block := file.read(_HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> {bytes, sha256} of every file below `folder`, for its marker; hashes in parallel."""
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        described = list(pool.map(describe_file, files))
    return {
        file.relative_to(folder).as_posix(): description
        for file, description in zip(files, described, strict=True)
    }


def describe_file(path: Path) -> dict[str, Any]:
    """Return the bytes and SHA-256 of a file in the form of a marker."""
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}


def write_manifest(folder: Path, kind: Format, content: dict[str, Any]) -> None:
    """Write a folder's marker, last of all its files: `content`, and the digest of it."""
    rest = with_matrix_texts({k: value for k, value in content.items() if k != _OWN_DIGEST})
    write_json(folder / kind.marker, rest | {_OWN_DIGEST: content_digest(rest)})


def open_folder(path: Path | str, kind: Format) -> dict[str, Any]:
    """Return the content of a folder's marker, without its digest, which must be right.

    Raise OperError if the folder is not of this kind and version, or its marker was changed.
    """
    path = Path(path)
    marker, schema = kind.marker, kind.schema
    if not os.path.lexists(path):
        refuse_url(path)
        raise OperError(f"{path}: no such folder; expected {kind.name}{_remedy(path, kind)}")
    if not _is_file(path / marker):
        raise OperError(
            f"{path}: expected {kind.name} (a folder with a {marker}), got {what_is(path)}"
            f"{_remedy(path, kind)}"
        )
    content = read_json(path / marker, MARKER)
    if not kind.has_schema(content):
        got = content.get("schema") if isinstance(content, dict) else type(content).__name__
        raise OperError(f"{path / marker}: expected schema {schema!r}, got {str(got)[:80]!r}")
    got = content.get("version")
    if got != kind.version:
        raise OperError(
            f"{path / marker}: expected version {kind.version}, got {_other_version(got, kind)}"
        )
    stated = content.pop(_OWN_DIGEST, None)
    if stated != content_digest(content):
        raise OperError(
            f"{path / marker}: its SHA-256 is not the one that it states; the file was changed or "
            "damaged: copy or write the folder again"
        )
    return content


def _other_version(given: Any, kind: Format) -> str:
    """Return a version that this oper does not read, the oper that wrote it, and the remedy."""
    if type(given) is int and given > kind.version:
        return f"{given}, written by a newer oper; install that oper, or {kind.again}"
    older = ", written by an older oper" if type(given) is int else ""
    return f"{given!r:.80}{older}; {kind.again}"


def _is_file(path: Path) -> bool:
    """Return whether a file is there, and the folder that it is in can be read."""
    try:
        return path.is_file()
    except PermissionError:
        return False


def _remedy(path: Path, kind: Format) -> str:
    """Return the command that makes a folder of a kind, of what is at the path if it can be."""
    if kind.command is None:
        return "; give another folder"
    command, which, typed = kind.command, "make one", typed_path(path)
    if "LOG" in command and path.is_file():
        command, which = command.replace("LOG", typed), "if it is a log, profile it first"
    elif "PROFILE" in command.split(" -o ")[0] and written_kind(path) == "a profile":
        command, which = command.replace("PROFILE", typed), "plan for it first"
    return f"; {which}: `{command}`"


def verify_files(folder: Path | str, described: Any, digests: bool) -> None:
    """Compare the files of `folder` with its marker: sizes, and also digests if `digests`."""
    folder = Path(folder)
    for name, expected in checked_files(folder, described).items():
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
            digests_of_files = pool.map(sha256, [folder / name for name in names])
            for name, digest in zip(names, digests_of_files, strict=True):
                if digest != described[name]["sha256"]:
                    raise OperError(
                        f"{folder / name}: its SHA-256 is not the one in the folder's marker; "
                        "the file was changed or damaged: copy or write it again"
                    )


def checked_files(folder: Path, described: Any) -> dict[str, dict[str, Any]]:
    """Return the marker's list of files, whose names must stay below the folder."""
    if not isinstance(described, dict):
        described = {"files": None}
    for name, expected in described.items():
        path = PurePosixPath(name)
        if (
            not isinstance(expected, dict)
            or not {"bytes", "sha256"} <= expected.keys()
            or path.is_absolute()
            or ".." in path.parts
            or "\0" in name
            or not is_file_name(name)
        ):
            raise OperError(
                f"{folder}: its marker is damaged: {name[:80]!r} is no file of the folder with its "
                "bytes and sha256; copy or write the folder again"
            )
    return described


def is_file_name(name: str) -> bool:
    """Return whether a path of this name is short enough for file systems."""
    parts = [part.encode(errors="replace") for part in name.split("/")]
    return sum(map(len, parts)) < _MOST_PATH_BYTES and max(map(len, parts)) <= _MOST_NAME_BYTES


def content_digest(content: dict[str, Any]) -> str:
    """Return the digest of a marker's content without the digest itself."""
    digest = hashlib.sha256()
    for piece in canonical_json(with_matrix_texts(content)):
        digest.update(piece.encode())
    return digest.hexdigest()
