"""The marker of a checkpoint, `checkpoint.json`: what it is of, and the SHA-256 of every file.

`oper.save` and `oper checkpoint reshard` write it last, into a folder that then takes its name at
once; so a folder with a marker was whole when it was written. torch.distributed.checkpoint does
not look at it. A checkpoint that torch alone wrote has none.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oper.base.errors import OperError
from oper.files import manifest
from oper.files.overwrite_rules import Format

FORMAT = Format("checkpoint.json", "oper-checkpoint", 1, "save it again by oper.save")


@dataclass(frozen=True)
class Marker:
    """What the marker says. `step` is what the saver gave; `plan` the digest of the plan by which
    the model was sharded, `ranks` how many wrote it; `files` the bytes and SHA-256 of each."""

    step: int | None
    plan: str | None
    ranks: int
    files: dict[str, dict[str, Any]]

    def write(self, folder: Path) -> None:
        """Write it into a folder, after all its other files."""
        content = {"schema": FORMAT.schema, "version": FORMAT.version, **asdict(self)}
        manifest.write_manifest(folder, FORMAT, content)

    @classmethod
    def read(cls, folder: Path) -> "Marker":
        """Read that of a folder; OperError where there is none, of another version, or changed."""
        content = manifest.open_folder(folder, FORMAT)
        step, plan, ranks = (content.get(name) for name in ("step", "plan", "ranks"))
        files = manifest.checked_files(folder, content.get("files"))
        good = (
            (step is None or type(step) is int)
            and (plan is None or type(plan) is str)
            and all(type(file["bytes"]) is int for file in files.values())
        )
        if not good or type(ranks) is not int:
            raise OperError(
                f"{folder / FORMAT.marker}: its step, plan, ranks or files are none; {FORMAT.again}"
            )
        return cls(step, plan, ranks, files)


def newest(folder: Path | str) -> Path:
    """The checkpoint at a path: the folder, or the newest of the checkpoints in it, which is that
    of the highest step, and of equal steps the one written last.

    OperError where there is neither.
    """
    folder = Path(folder)
    if (folder / FORMAT.marker).exists():
        return folder
    if not folder.is_dir():
        raise OperError(f"{folder}: no such folder; a checkpoint of oper.save was needed")
    found = []
    for marker in folder.glob(f"*/{FORMAT.marker}"):
        # Hidden names are of saves that go on or were killed.
        if not marker.parent.name.startswith("."):
            step = Marker.read(marker.parent).step
            found.append((-1 if step is None else step, marker.stat().st_mtime_ns, marker.parent))
    if not found:
        what = "torch.distributed.checkpoint wrote it: load it by that, into the state dict of the "
        what = what + "model" if (folder / ".metadata").exists() else "is it the right folder?"
        raise OperError(f"{folder}: holds no {FORMAT.marker}, and no folder that does; {what}")
    return max(found)[2]
