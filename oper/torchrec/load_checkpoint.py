"""`oper.load`: a model's tables, their optimizers and its dense part from a checkpoint.

Each rank reads the rows of its own block, in pieces, from any of the files, and writes them to all
their copies. So a checkpoint of any number of ranks can be loaded on any other number, under any
plan. All faults of a checkpoint are found before anything is changed, except corrupted bytes, which
are found when they are read.
"""

import io
import logging
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from oper.base.errors import OperError, check_type, one_line
from oper.checkpoint.chain import Chain, read_chain
from oper.checkpoint.marker import FORMAT, Marker, newest
from oper.checkpoint.saved_index import Extent, SavedIndex
from oper.checkpoint.saved_tables import MODEL, OPTIMIZER, tables_of
from oper.checkpoint.shard_file import check_records
from oper.checkpoint.soundness import open_chain
from oper.checkpoint.torch_index import torch_metadata
from oper.files import temporaries
from oper.files.overwrite_rules import is_wholly
from oper.runtime.comm.group import Group
from oper.runtime.table_io import RowRange
from oper.tables.row_identity import check_same_rows
from oper.tables.table import IdRule, Table
from oper.torchrec.module_tables import first_names
from oper.torchrec.objects_of_ranks import (
    gathered,
    is_first,
    of_each_rank,
    of_first_rank,
)
from oper.torchrec.parallel_model import fused_optimizer_of
from oper.torchrec.save_checkpoint import streaming, whole_state
from oper.torchrec.saved_before import begin_deltas, end_deltas
from oper.torchrec.sharded_model import sharded_collections
from oper.torchrec.state_dict import STEPS
from oper.torchrec.state_parts import (
    check_parts,
    drop_unsaved_states,
    flattened,
    is_stateful,
    load_part,
    parts_of,
    put,
    take_saved_names,
)
from oper.torchrec.streamed_table import StreamedTable

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """Result of `oper.load`: the checkpoint's folder and the step it was given.

    `grown` has, for tables that have more rows now, their rows in the checkpoint; `new` are tables
    that the checkpoint lacks. Rows outside the checkpoint keep their values. `skipped` are the
    checkpoint's tables that the model lacks.
    """

    folder: Path
    step: int | None
    grown: dict[str, int]
    new: tuple[str, ...]
    skipped: tuple[str, ...]


def load(
    model: nn.Module,
    folder: Path | str,
    *,
    state: Mapping[str, Any] | None = None,
    deltas: bool = False,
) -> Loaded:
    """Load a checkpoint of `oper.save` or `oper.save_delta` into a sharded model, under any plan
    and on any number of ranks. Call it on all ranks with equal arguments.

    `folder` is a checkpoint, or a folder of checkpoints, of which the one with the highest step is
    loaded; a delta is loaded with the checkpoints that it continues. With `deltas` rows updated
    from now on are marked, so that `oper.save_delta` can continue this checkpoint. Objects of
    `state` with a `load_state_dict`, such as a dense optimizer, get the state saved under their
    names; dicts are filled. New rows of grown tables, and new tables, keep their initial values,
    with a warning. Raises OperError, on all ranks, if a file of the checkpoint or of one that it
    continues is missing or damaged, if the checkpoint is of another model, or if the model's plan
    numbers its rows differently.
    """
    check_type("load", "model", model, nn.Module)
    collections = sharded_collections(model)
    group = next(iter(collections.values())).blocks.group
    of_each_rank(lambda: check_parts("load", folder, state), group)
    path = Path(of_first_rank(lambda: str(_newest(Path(folder))), group))
    chain = of_each_rank(lambda: read_chain(path), group)  # checked by rank 0
    index, marker = chain.index, chain.marker
    assert marker is not None, "a checkpoint without one is not found"
    parts = dict(state or {})
    with streaming(model):
        content = of_each_rank(lambda: whole_state(model, parts_of(state)), group)
        drop_unsaved_states(parts, index, content)
        flat, paths = of_each_rank(lambda: flattened("load", content), group)
        take_saved_names(parts, index, flat, paths)
        tables = {name: value for name, value in flat.items() if isinstance(value, StreamedTable)}
        new = _absent_tables(path, tables, index)
        present = {name: value for name, value in tables.items() if value.table not in new}
        rest = {name: value for name, value in flat.items() if name not in tables}
        new_steps = _steps_of_new_tables(rest, index)
        rest = {name: value for name, value in rest.items() if name not in new_steps}

        def check() -> dict[str, int]:
            grown = _check(path, present, rest, index)
            _check_rows(model, path, marker)
            if deltas:
                _check_dtypes(path, present, index)
            return grown

        grown = of_each_rank(check, group)
        end_deltas(model)
        of_each_rank(lambda: _read_rest(path, rest, chain.last.index), group)
        _read_tables(chain, present, group)
        steps = next((v for name, v in rest.items() if name.endswith(f".{STEPS}")), None)
        for name, value in (rest | dict.fromkeys(new_steps, steps)).items():
            put(content, paths[name], value)  # fills the dicts of `state`
        model.load_state_dict(content[MODEL])
        fused_optimizer_of(model).load_state_dict(content[OPTIMIZER])
        for name, value in parts.items():
            if is_stateful(value):
                load_part(value, content[name])
    names = {value.table for value in tables.values()}
    skipped = tuple(name for name in tables_of(index) if name not in names)
    loaded = Loaded(path, marker.step, grown, tuple(new), skipped)
    if deltas:
        begin_deltas(model, path, marker, _new_rows(model, loaded))
    if is_first(group):
        _tell(loaded, {value.table: value.shape[0] for value in tables.values()})
    return loaded


def _newest(folder: Path) -> Path:
    """Return the newest checkpoint at a path, after `open_chain` has checked it."""
    # Restore a save that was killed between two renames.
    temporaries.sweep(folder, lambda old: is_wholly(old, FORMAT))
    return open_chain(newest(folder)).folder


def _absent_tables(
    folder: Path, tables: Mapping[str, StreamedTable], index: SavedIndex
) -> list[str]:
    """Return the model's tables that a checkpoint lacks; raise OperError if it has none of them."""
    weights = {value.table: name for name, value in tables.items() if value.state is None}
    absent = [table for table, name in weights.items() if name not in index.tensors]
    if len(absent) == len(weights):
        raise OperError(
            f"{folder}: is a checkpoint of another model: its tables are "
            f"{first_names(tables_of(index), 3)}, and the model has {first_names(weights, 3)}, "
            f"under names such as {next(iter(weights.values()))!r}; load it into the model that it "
            "is of"
        )
    return absent


def _steps_of_new_tables(rest: Mapping[str, Any], index: SavedIndex) -> list[str]:
    """Return the names of Adam's step counts that a checkpoint lacks, if it has those of other
    tables: all tables of an engine share one count."""
    steps = [name for name in rest if name.endswith(f".{STEPS}")]
    lacking = [name for name in steps if name not in index.tensors]
    return lacking if len(lacking) < len(steps) else []


def _check(
    folder: Path, tables: Mapping[str, StreamedTable], rest: Mapping[str, Any], index: SavedIndex
) -> dict[str, int]:
    """Compare the model with the checkpoint; return the saved number of rows of tables that have
    grown."""
    grown: dict[str, int] = {}
    for name, value in tables.items():
        what = f"table {value.table!r}" + (f", {value.state}" if value.state else "")
        if name not in index.tensors:
            raise OperError(
                f"{folder}: {what}: the checkpoint lacks this state of the optimizer: the table "
                "was frozen then, or had another one; load its state dict by "
                "torch.distributed.checkpoint with allow_partial_load=True, or train it as before"
            )
        shape = index.tensors[name].shape
        if shape[1:] != value.shape[1:] or shape[0] > value.shape[0]:
            raise OperError(
                f"{folder}: {what} is {shape} in the checkpoint and {value.shape} in the model; "
                "only rows at the end may be new: give the model as many rows as were saved or "
                "more, of the same dim"
            )
        if shape[0] < value.shape[0]:
            grown[value.table] = shape[0]
    for name, value in rest.items():
        if name not in index.tensors and name not in index.objects:
            raise OperError(
                f"{folder}: has no {name!r}, which the model or its state has; it is of another "
                "model, or was saved without it"
            )
        if isinstance(value, torch.Tensor) and name in index.tensors:
            saved = index.tensors[name].shape
            if tuple(value.shape) != saved:
                raise OperError(
                    f"{folder}: {name!r} is {saved} in the checkpoint and {tuple(value.shape)} in "
                    "the model; it is of another model"
                )
    return grown


def _check_rows(model: nn.Module, folder: Path, marker: Marker) -> None:
    """Raise OperError unless the model's plans number the saved rows identically."""
    try:
        saved = [
            Table(name, table["rows"], ids=IdRule.from_dict(table["ids"]))
            for name, table in marker.ids.items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise OperError(
            f"{folder / FORMAT.marker}: expected the rows and ids of each table, got others "
            f"({type(error).__name__}: {error}); {FORMAT.again}"
        ) from error
    for module in sharded_collections(model).values():
        plan = module.engine.plan
        check_same_rows(
            saved,
            plan.numbered_tables(),
            (str(folder), "the model's plan"),
            "load it under the plan that it was saved by, or one that `oper replan` made from that",
            plan.vocabulary_start,
        )


def _check_dtypes(folder: Path, tables: Mapping[str, StreamedTable], index: SavedIndex) -> None:
    """Raise OperError if rows would be loaded in another dtype than that of the deltas."""
    for name, value in tables.items():
        if (saved := index.tensors[name].dtype) != value.dtype:
            raise OperError(
                f"{folder}: table {value.table!r} is {saved} in the checkpoint and {value.dtype} "
                "in the model, and deltas cannot be upon it: load it without deltas=True, and save "
                "a whole checkpoint to begin with"
            )


def _new_rows(model: nn.Module, loaded: Loaded) -> dict[str, list[RowRange]]:
    """Return the rows of each collection that a checkpoint lacks."""
    new_rows = {}
    for path, module in sharded_collections(model).items():
        old = [
            0 if table.name in loaded.new else loaded.grown.get(table.name, table.rows)
            for table in module.blocks.tables
        ]
        new_rows[path] = [
            RowRange(number, first, table.rows - first)
            for number, (table, first) in enumerate(zip(module.blocks.tables, old, strict=True))
            if first < table.rows
        ]
    return new_rows


def _read_tables(chain: Chain, tables: Mapping[str, StreamedTable], group: Group | None) -> None:
    failure: OperError | None = None
    for name, table in tables.items():
        for first, rows in table.pieces:
            parts: list[tuple[int, torch.Tensor]] = []
            # All ranks write together: a rank that cannot read continues, and fails at the end.
            if failure is None:
                try:
                    rows = min(rows, chain.index.tensors[name].shape[0] - first)
                    parts = [(first, chain.read_rows(name, first, rows))] if rows > 0 else []
                except OperError as error:
                    failure = error
            table.write(parts)
    if said := [text for text in gathered(failure and str(failure), group) if text]:
        raise OperError(said[0])


def _read_rest(folder: Path, rest: dict[str, Any], index: SavedIndex) -> None:
    """Read everything except tables, tensors in place. Each rank reads by itself."""
    if not rest:
        return
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load_state(
                rest,
                storage_reader=_CheckedReader(folder, index),
                planner=_SafeLoadPlanner(),
                no_dist=True,
            )
    except CheckpointException as error:
        (first, _) = next(iter(error.failures.values()))
        if isinstance(first, OperError):
            raise first from error
        raise OperError(f"{folder}: could not be read: {one_line(first)}") from error


class _CheckedReader(FileSystemReader):
    """Reader of the parts in a safely read index, which checks their CRC-32."""

    def __init__(self, folder: Path, index: SavedIndex) -> None:
        super().__init__(folder)
        self._folder, self._index = folder, index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index in torch's form."""
        return torch_metadata(self._index)

    def _slice_file(self, file: Any, info: Any) -> Any:
        check_records(self._folder, Extent(info.relative_path, info.offset, info.length))
        return super()._slice_file(file, info)


class _SafeLoadPlanner(DefaultLoadPlanner):
    """Load planner that reads objects like weights, without running code."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an object into the state dict."""
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _tell(loaded: Loaded, rows: Mapping[str, int]) -> None:
    """Warn of the parts of the model and of the checkpoint that were not loaded."""
    for table, old in loaded.grown.items():
        _log.warning(
            "table %r: has %d rows in %s and %d in the model; the new ones keep their initial "
            "values",
            table,
            old,
            loaded.folder,
            rows[table],
        )
    for table in loaded.new:
        _log.warning("table %r: is not in %s, and keeps its initial values", table, loaded.folder)
    for table in loaded.skipped:
        _log.warning("table %r: is in %s and not in the model", table, loaded.folder)
