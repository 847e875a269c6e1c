"""The marker of a checkpoint, `checkpoint.json`: what it is of, and the SHA-256 of every file.

`oper.save`, `oper.save_delta` and `oper checkpoint reshard` write it last, into a folder that then
takes its name at once; so a folder with a marker was whole when it was written.
torch.distributed.checkpoint does not look at it. A checkpoint that torch alone wrote has none.
"""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from oper.checkpoint.delta_rows import is_of_delta
from oper.checkpoint.saved_index import INDEX, read_index
from oper.files import manifest
from oper.files.input_files import refuse_url
from oper.files.overwrite_rules import Format
from oper.files.what_is import what_is

FORMAT = Format("checkpoint.json", "oper-checkpoint", 1, "save it again by oper.save")


@dataclass(frozen=True)
class Delta:
    """What makes a checkpoint a delta: it has the rows alone that were touched since another one,
    which lies beside it as `upon` and whose marker has the digest `sha256`.

    `tables` are all of the model's tables, by name: how many `rows` each has, and the names of its
    `tensors`, which are its weight and the states of its optimizer.
    """

    upon: str
    sha256: str
    tables: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, content: Any) -> "Delta | None":
        """From a marker's content; None where that is none."""
        if not isinstance(content, dict):
            return None
        given: list[Any] = [content.get(name) for name in ("upon", "sha256", "tables")]
        upon, sha256, tables = given
        good = (
            type(upon) is str
            and upon not in ("", ".", "..")
            and not {"/", "\0"} & set(upon)
            and manifest.is_file_name(upon)
            and type(sha256) is str
            and isinstance(tables, dict)
            and all(_is_table(table) for table in tables.values())
        )
        return cls(upon, sha256, tables) if good else None


def _is_table(content: Any) -> bool:
    if not isinstance(content, dict):
        return False
    rows, tensors = content.get("rows"), content.get("tensors")
    names = isinstance(tensors, list) and all(type(name) is str for name in tensors)
    return type(rows) is int and rows >= 0 and names


@dataclass(frozen=True)
class Marker:
    """What the marker says. `step` is what the saver gave; `plan` the digest of the plan by which
    the model was sharded, `ranks` how many wrote it; `files` the bytes and SHA-256 of each; `delta`
    the save that it continues, of one that has touched rows alone; `save` the random bytes, in hex,
    with which each of its shard files ends, so that one of another save is recognised without
    reading it all (older checkpoints have none); `ids` the rows and id rules of the plan's tables
    whose ids are hashed or from a vocabulary, by table (oper/tables/table.py).
    """

    step: int | None
    plan: str | None
    ranks: int
    files: dict[str, dict[str, Any]]
    delta: Delta | None = None
    save: str | None = None
    ids: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def _content(self) -> dict[str, Any]:
        content = {"schema": FORMAT.schema, "version": FORMAT.version, **asdict(self)}
        optional = ("delta", "save", "ids")
        return {name: value for name, value in content.items() if value or name not in optional}

    @property
    def digest(self) -> str:
        """The digest of it, which depends on every byte of the checkpoint."""
        return manifest.content_digest(self._content)

    def write(self, folder: Path) -> None:
        """Write it into a folder, after all its other files."""
        manifest.write_manifest(folder, FORMAT, self._content)

    @classmethod
    def read(cls, folder: Path) -> "Marker":
        """Read that of a folder; OperError where there is none, of another version, or changed."""
        content = manifest.open_folder(folder, FORMAT)
        step, plan, ranks = (content.get(name) for name in ("step", "plan", "ranks"))
        files = manifest.checked_files(folder, content.get("files"))
        delta, save = Delta.of(content.get("delta")), content.get("save")
        ids = content.get("ids", {})
        good = (
            (step is None or type(step) is int)
            and isinstance(ids, dict)
            and all(isinstance(table, dict) for table in ids.values())
            and (plan is None or type(plan) is str)
            and all(type(file["bytes"]) is int for file in files.values())
            and ("delta" in content) == (delta is not None)
            and (save is None or type(save) is str)
        )
        if not good or type(ranks) is not int:
            raise OperError(
                f"{folder / FORMAT.marker}: invalid or missing step, plan, ranks, files, delta or "
                f"ids; {FORMAT.again}"
            )
        return cls(step, plan, ranks, files, delta, save, ids)


def newest(folder: Path | str) -> Path:
    """The checkpoint at a path: the folder, or the newest of the checkpoints in it, which is that
    of the highest step, and of equal steps the one written last.

    OperError where there is neither.
    """
    folder = Path(folder)
    if is_there(folder / FORMAT.marker):
        return folder
    refuse_url(folder)
    if not folder.is_dir():
        what = "no such folder" if not os.path.lexists(folder) else f"is {what_is(folder)}"
        raise OperError(f"{folder}: {what}; expected a checkpoint: a folder that oper.save wrote")
    found = []
    for path in filter(is_there, [folder / INDEX, *sorted(folder.glob(f"*/{INDEX}"))]):
        unmarked = path.parent
        if unmarked.name.startswith(".") or is_there(unmarked / FORMAT.marker):
            continue
        if is_of_delta(read_index(unmarked)):
            raise OperError(
                f"{unmarked}: has the files of a delta, and its {FORMAT.marker} is missing; it may "
                "be the newest checkpoint: copy it again, or move it elsewhere"
            )
    for path in paths_of_checkpoints(folder):
        step = Marker.read(path).step
        written = (path / FORMAT.marker).stat().st_mtime_ns
        found.append((-1 if step is None else step, written, path))
    if not found:
        what = "torch.distributed.checkpoint wrote it: load it by that, into the state dict of the "
        what += "model"
        if not (folder / INDEX).exists():
            what = "give the folder that was given to oper.save, or one of such folders"
        raise OperError(
            f"{folder}: expected a checkpoint, got {what_is(folder)}, which holds no "
            f"{FORMAT.marker} and no folder that does; {what}"
        )
    return max(found)[2]


def is_there(file: Path) -> bool:
    """Return whether there is such a file; a name that no file can have is none."""
    try:
        return file.is_file()
    except (OSError, ValueError):  # Too long, or with a null character.
        return False


def paths_of_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder; hidden names are of saves that go on or were killed."""
    found = sorted(marker.parent for marker in folder.glob(f"*/{FORMAT.marker}"))
    return [path for path in found if not path.name.startswith(".")]
