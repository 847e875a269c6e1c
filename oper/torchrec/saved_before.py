"""Last checkpoint that a model was saved to or loaded from, if rows changed since are marked.

The next delta continues it. Each collection stores it next to the marks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from oper.base.errors import OperError
from oper.checkpoint.marker import Marker
from oper.runtime.table_io import RowRange
from oper.torchrec.sharded_model import sharded_collections


@dataclass(frozen=True)
class SavedBefore:
    """Checkpoint's folder, with symbolic links resolved, and the digest of its marker."""

    folder: Path
    digest: str


def begin_deltas(
    model: nn.Module,
    folder: Path,
    marker: Marker,
    new: Mapping[str, Sequence[RowRange]] | None = None,
) -> None:
    """Mark the rows that are touched from now on: the model equals the checkpoint, except for the
    rows that are `new` in each collection, by its path. Call it on all ranks."""
    saved = SavedBefore(folder.resolve(), marker.digest)
    for path, module in sharded_collections(model).items():
        module.engine.begin_touched((new or {}).get(path, ()))
        module.saved_before = saved


def end_deltas(model: nn.Module) -> None:
    """Stop marking rows, because the model gets other values."""
    for module in sharded_collections(model).values():
        module.engine.end_touched()
        module.saved_before = None


def saved_before(model: nn.Module) -> SavedBefore:
    """Return the checkpoint that a delta of the model would continue; raise OperError if rows have
    not been marked since one."""
    checkpoints = {module.saved_before for module in sharded_collections(model).values()}
    if len(checkpoints) == 1 and (saved := checkpoints.pop()) is not None:
        return saved
    raise OperError(
        "save_delta: which rows changed is not known, as nothing marked them: begin by "
        "oper.save(model, folder, deltas=True), or oper.load(model, folder, deltas=True), and save "
        "deltas upon that"
    )
