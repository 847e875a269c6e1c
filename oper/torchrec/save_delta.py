"""`oper.save_delta`: save of the rows of a model that were touched since its last save.

A delta is a checkpoint with fewer rows (touched_table.py), written like any other
(save_checkpoint.py). It is a sibling of the checkpoint that it continues, whose digest its marker
has. Marks are cleared once the delta is complete, so a failed save loses nothing.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from oper.base.errors import OperError, check_type
from oper.checkpoint.delta_rows import TOUCHED, UPON
from oper.checkpoint.marker import Delta, Marker
from oper.torchrec.objects_of_ranks import of_each_rank, of_first_rank
from oper.torchrec.save_checkpoint import state_to_save, write_checkpoint
from oper.torchrec.saved_before import SavedBefore, begin_deltas, saved_before
from oper.torchrec.sharded_model import sharded_collections
from oper.torchrec.state_dict import TableBlocks
from oper.torchrec.state_parts import check_parts, flattened
from oper.torchrec.streamed_table import TableRows
from oper.torchrec.touched_table import TouchedIds


def save_delta(
    model: nn.Module,
    folder: Path | str,
    *,
    step: int | None = None,
    state: Mapping[str, Any] | None = None,
) -> Path:
    """Save the rows that were touched since the last `oper.save(…, deltas=True)`, `oper.load(…,
    deltas=True)` or `save_delta` of a model, with the states of their optimizers, and the whole
    rest of the model. Call it on all ranks with equal arguments.

    `folder` is a new sibling of the previous save's folder, which the delta continues: `oper.load`
    of the delta loads both. `step` and `state` are those of `oper.save`. Returns the folder. Raises
    OperError, on all ranks, if rows were not marked, if the folder is taken, lies elsewhere or
    cannot be written, or if the previous save is missing.
    """
    check_type("save_delta", "model", model, nn.Module)
    collections = sharded_collections(model)
    first = next(iter(collections.values())).blocks
    group = first.group

    def given() -> SavedBefore:
        check_type("save_delta", "step", step, int, type(None))
        check_parts("save_delta", folder, state)
        return saved_before(model)

    before = of_each_rank(given, group)
    first.agree("save_delta", {"folder": str(folder), "step": step})
    of_first_rank(lambda: _check(Path(folder), before), group)
    with ExitStack() as stack:
        numbers: dict[str, TouchedIds] = {}
        sizes: dict[str, int] = {}
        for module in collections.values():
            blocks: TableBlocks = module.blocks
            touched = blocks.touched()
            stack.enter_context(blocks.streaming(touched))
            of_tables = zip(blocks.tables, touched, strict=True)
            numbers |= {table.name: TouchedIds(block) for table, block in of_tables}
            sizes |= {table.name: table.rows for table in blocks.tables}
        of_delta = {TOUCHED: numbers, UPON: before.folder.name}
        content = of_each_rank(lambda: state_to_save(model, state, **of_delta), group)
        delta = Delta(before.folder.name, before.digest, _tables(content, sizes))
        marker = write_checkpoint(model, Path(folder), content, step, delta=delta)
    begin_deltas(model, Path(folder), marker)
    return Path(folder)


def _check(folder: Path, before: SavedBefore) -> None:
    """Raise OperError if the folder is unsuitable for a delta, or if its base is missing."""
    beside = before.folder.parent
    if folder.resolve().parent != beside:
        raise OperError(
            f"{folder}: a delta lies beside what it is upon, {before.folder}, so that they are "
            f"moved together; give {beside / folder.name}"
        )
    try:
        digest = Marker.read(before.folder).digest
    except OperError as error:
        raise OperError(f"{folder}: {error}; save a whole one, by oper.save") from error
    if digest != before.digest:
        raise OperError(
            f"{folder}: {before.folder}, upon which it would be, is another checkpoint now; save a "
            "whole one, by oper.save"
        )


def _tables(content: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """Return the marker's tables: the sizes of all tables, and the names of their saved tensors."""
    flat, _ = flattened("save_delta", content)
    tables: dict[str, dict[str, Any]] = {
        name: {"rows": rows, "tensors": []} for name, rows in sizes.items()
    }
    for name, value in flat.items():
        if isinstance(value, TableRows):
            tables[value.table]["tensors"].append(name)
    return tables
