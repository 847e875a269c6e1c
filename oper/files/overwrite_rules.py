"""Rules for overwriting: oper replaces only files and folders that it wrote, and empty ones.

oper wrote a file if `FILE_MARK` is near its beginning or its end. oper wrote a folder if it holds a
marker, a JSON file with oper's schema, and the marker lists everything in it, at any depth. A
folder of windows lists folders that have markers. Nothing else is written into the folder of a plan
or a profile, because oper would no longer replace it.
"""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from oper.base.errors import OperError
from oper.base.spoken import spoken
from oper.files.input_files import LISTED, MARKER, open_file
from oper.files.json_file import read_json

_MARKERS = ("plan.json", "profile.json")  # of folders that oper replaces only as a whole
_NAMED = 5  # foreign entries that a message names, so that it stays one or two lines

# It is in a comment of YAML, a tag of HTML, or the metadata of Parquet and safetensors.
FILE_MARK = "written-by=oper"
_HEAD_BYTES, _TAIL_BYTES = 1 << 12, 1 << 20  # Parquet has its metadata at the end


class Format(NamedTuple):
    """A kind of folder: the name of its marker, and the schema and version in it.

    Only this version is read. Folders of earlier ones may have stated `old_schema` instead. `again`
    says how to make such a folder again, and `command` names the command that makes one.
    """

    marker: str
    schema: str
    version: int
    again: str
    old_schema: str | None = None
    command: str | None = None

    @property
    def name(self) -> str:
        """Name of such a folder in a sentence: `a plan`."""
        return f"a {Path(self.marker).stem}"

    def has_schema(self, content: Any) -> bool:
        """Return whether the content of a marker is of this kind, in any version."""
        schema = content.get("schema") if isinstance(content, dict) else None
        return schema is not None and schema in (self.schema, self.old_schema)


def folder_refusal(folder: Path, kind: Format, overwrite: bool) -> str | None:
    """Return the reason that a folder may not replace `folder`, which exists; None if it may."""
    if not folder.is_dir() or folder.is_symlink():
        return "exists and is not a folder; choose another path, or remove it"
    if _holds_current(folder):
        return (
            "is or contains the current directory, so it cannot be replaced; "
            "choose another path, such as a folder in it"
        )
    if os.path.ismount(folder):
        return "is a mount point, which cannot be replaced; choose another path, such as one in it"
    if not any(folder.iterdir()):
        return None
    listed = _listed(folder, kind)
    if listed is None:
        return (
            f"exists and was not written by oper (it has no {kind.marker} with the schema "
            f"{kind.schema!r}), so it is not overwritten; choose another path, or remove it"
        )
    foreign = sorted(_foreign(folder, listed))
    if foreign:
        shown = ", ".join(foreign[:_NAMED])
        more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
        return (
            f"holds files that oper did not write: {shown}{more}; so it is not overwritten: "
            "move them elsewhere, or choose another path"
        )
    return None if overwrite else _exists()


def inside_refusal(path: Path) -> str | None:
    """Return the reason that nothing may be written below a folder of oper's; None if `path` lies
    in none."""
    for folder in path.parents:
        for marker in _MARKERS:
            if not os.path.isfile(folder / marker):  # False too if the folder may not be read
                continue
            with contextlib.suppress(OperError):
                content = read_json(folder / marker, MARKER)
                if isinstance(content, dict) and str(content.get("schema")).startswith("oper"):
                    return (
                        f"lies in {folder}, which oper wrote ({marker} is in it) and would no "
                        "longer replace; choose a path outside of it"
                    )
    return None


def file_refusal(path: Path, overwrite: bool) -> str | None:
    """Return the reason that a file may not replace `path`, which exists; None if it may."""
    if path.is_dir():
        return "is a folder, and a file was to be written; choose another path"
    if not stat.S_ISREG(path.lstat().st_mode):
        return "exists and is not a regular file, so it is not overwritten; choose another path"
    if not _is_marked(path):
        return (
            "exists and was not written by oper, so it is not overwritten; choose another path, or "
            "remove it"
        )
    return None if overwrite else _exists()


def _is_marked(path: Path) -> bool:
    """Return whether oper wrote a file, or it is empty."""
    mark = FILE_MARK.encode()
    with open_file(path, LISTED) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0 or mark in file.read(_HEAD_BYTES):
            return True
        file.seek(max(0, size - _TAIL_BYTES))
        return mark in file.read(_TAIL_BYTES)


def _exists() -> str:
    """Return the refusal of a path that oper may replace if asked, with the remedy."""
    return f"exists; choose another path, or replace it with {spoken('--force', 'overwrite=True')}"


def is_wholly(folder: Path, kind: Format) -> bool:
    """Return whether oper wrote everything in a folder."""
    listed = _listed(folder, kind)
    return listed is not None and not any(True for _ in _foreign(folder, listed))


def _listed(folder: Path, kind: Format) -> set[str] | None:
    """Return the files that a folder's marker lists, by names below the folder; None without a
    marker."""
    content = _marker(folder, kind)
    if content is None:
        return None
    names = {kind.marker, *_of_type(content.get("files"), dict)}
    for window in _of_type(content.get("windows"), list):
        name = window.get("name") if isinstance(window, dict) else None
        if isinstance(name, str) and name not in ("", ".", "..") and "/" not in name:
            inner = _marker(folder / name, kind)
            files = [] if inner is None else [kind.marker, *_of_type(inner.get("files"), dict)]
            names |= {f"{name}/{file}" for file in files}
    return names


def _marker(folder: Path, kind: Format) -> dict[str, Any] | None:
    try:
        content = read_json(folder / kind.marker, MARKER)
    except OperError:
        return None
    return content if kind.has_schema(content) else None


def _of_type(content: Any, kind: type) -> Any:
    return content if isinstance(content, kind) else ()


def _foreign(folder: Path, listed: set[str]) -> Iterator[str]:
    """Yield the entries that are not listed; a folder without any listed file is one entry."""
    folders = {str(above) for name in listed for above in Path(name).parents}
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(folder / below) as entries:
            for entry in entries:
                name = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if name in folders:
                        pending.append(f"{name}/")
                    else:
                        yield f"{name}/"
                elif name not in listed or not entry.is_file(follow_symlinks=False):
                    yield name


def _holds_current(folder: Path) -> bool:
    current = Path.cwd()
    return any(os.path.samefile(above, folder) for above in (current, *current.parents))
