"""Marker of a checkpoint, `checkpoint.json`: its origin, and the SHA-256 of every file.

`oper.save`, `oper.save_delta` and `oper checkpoint reshard` write it last, into a folder that is
then renamed atomically; so a folder with a marker was complete when it was written.
torch.distributed.checkpoint ignores it. A checkpoint that torch alone wrote has none.
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
    """Description of a delta, which has only the rows touched since another checkpoint: its sibling
    folder `upon`, whose marker has the digest `sha256`.

    `tables` are all of the model's tables, by name: the number of their `rows`, and the names of
    their `tensors`, which are the weight and the states of the optimizer.
    """

    upon: str
    sha256: str
    tables: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, content: Any) -> "Delta | None":
        """Return the delta from a marker's content; None if it is invalid."""
        if not isinstance(content, dict):
            return None
        fields: list[Any] = [content.get(name) for name in ("upon", "sha256", "tables")]
        upon, sha256, tables = fields
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
    """Content of the marker: `step` that the saver gave; `plan`, the digest of the plan by which
    the model was sharded; `ranks`, the number of ranks that wrote it; `files`, the bytes and
    SHA-256 of each; `delta`, the save that a delta continues; `save`, the random bytes, in hex,
    with which each of its shard files ends, so that a file of another save is recognised without
    reading all of it (older checkpoints have none); `ids`, the rows and id rules of the plan's
    tables whose ids are hashed or from a vocabulary, by table (oper/tables/table.py).
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
        """Digest of the marker, which depends on every byte of the checkpoint."""
        return manifest.content_digest(self._content)

    def write(self, folder: Path) -> None:
        """Write the marker into a folder, after all its other files."""
        manifest.write_manifest(folder, FORMAT, self._content)

    @classmethod
    def read(cls, folder: Path) -> "Marker":
        """Read the marker of a folder; raise OperError if it is missing, of another version, or
        changed."""
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
    """Return the checkpoint at a path: the folder itself, or the checkpoint in it with the highest
    step, of equal steps the one written last.

    Raise OperError if there is neither.
    """
    folder = Path(folder)
    if is_there(folder / FORMAT.marker):
        return folder
    refuse_url(folder)
    if not folder.is_dir():
        what = "no such folder" if not os.path.lexists(folder) else f"is {what_is(folder)}"
        raise OperError(f"{folder}: {what}; expected a checkpoint: a folder that oper.save wrote")
    candidates = []
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
        candidates.append((-1 if step is None else step, written, path))
    if not candidates:
        what = "torch.distributed.checkpoint wrote it: load it by that, into the state dict of the "
        what += "model"
        if not (folder / INDEX).exists():
            what = "give the folder that was given to oper.save, or one of such folders"
        raise OperError(
            f"{folder}: expected a checkpoint, got {what_is(folder)}, which holds no "
            f"{FORMAT.marker} and no folder that does; {what}"
        )
    return max(candidates)[2]


def is_there(file: Path) -> bool:
    """Return whether the file exists; False for an impossible name."""
    try:
        return file.is_file()
    except (OSError, ValueError):  # Too long, or with a null character.
        return False


def paths_of_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder; hidden names belong to saves in progress or killed."""
    paths = sorted(marker.parent for marker in folder.glob(f"*/{FORMAT.marker}"))
    return [path for path in paths if not path.name.startswith(".")]
