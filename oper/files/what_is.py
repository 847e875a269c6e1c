"""Names for the contents of a path, for errors that refuse it."""

import re
from pathlib import Path

from oper.base.errors import OperError
from oper.files.input_files import MARKER, open_file

_NAMED = 5  # entries of a folder
_HEAD_BYTES = 1 << 12  # of a marker, which begins with its schema
_SCHEMA = re.compile(rb'"schema": *"oper[.-]([a-z]+)"')


def what_is(path: Path | str) -> str:
    """Return a description of the content of a path: `a plan's folder`, `an empty folder`, `a
    file`, `nothing`."""
    path = Path(path)
    try:
        if path.is_symlink() and not path.exists():
            return "a link to something that is not there"
        if not path.exists():
            return "nothing"
        if not path.is_dir():
            return "a file" if path.is_file() else "a device, a pipe or a socket"
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        return f"a path that cannot be read ({error.strerror})"
    if kind := written_kind(path):
        return f"{kind}'s folder"
    if not names:
        return "an empty folder"
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    return f"a folder with {', '.join(names[:_NAMED])}{more}"


def written_kind(folder: Path) -> str | None:
    """Return the kind of folder that oper wrote, by the schema in its marker: `a plan`; None if it
    wrote none of its kinds of folders."""
    for marker in sorted(folder.glob("*.json")):
        try:
            with open_file(marker, MARKER) as file:
                schema = _SCHEMA.search(file.read(_HEAD_BYTES))
        except OperError:
            continue
        if schema and schema[1].decode() == marker.stem:  # plan.json has oper.plan
            return f"a {marker.stem}"
    return None
