"""`oper.save`: a model's tables, their optimizers and its dense part in one checkpoint.

Rows go from the tables to the disk in pieces, while all ranks pause: a piece is written and hashed
while the next one is read. torch.distributed.checkpoint assigns the writes to ranks and writes the
index, so it can read the folder like its own. The folder has a hidden name until it is complete; a
folder that it replaces stays complete until then.
"""

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from oper.base.errors import OperError, check_type, one_line
from oper.checkpoint.chain import check_replaceable
from oper.checkpoint.marker import FORMAT, Delta, Marker
from oper.checkpoint.saved_index import INDEX
from oper.checkpoint.saved_tables import MODEL, OPTIMIZER
from oper.checkpoint.shard_file import SUFFIX, ShardFile, new_save
from oper.files.manifest import describe_file
from oper.files.storage import atomic_folder
from oper.runtime.comm.group import Group
from oper.runtime.memory.runtime_plan import plan_digest
from oper.torchrec.objects_of_ranks import gathered, is_first, of_each_rank, of_first_rank, ranks_of
from oper.torchrec.parallel_model import fused_optimizer_of
from oper.torchrec.save_plans import plan_from_json, plan_to_json, result_from_json, result_to_json
from oper.torchrec.saved_before import begin_deltas
from oper.torchrec.sharded_model import sharded_collections
from oper.torchrec.state_parts import check_loadable, check_parts, parts_of
from oper.torchrec.streamed_table import Streamed


def save(
    model: nn.Module,
    folder: Path | str,
    *,
    step: int | None = None,
    state: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    deltas: bool = False,
) -> Path:
    """Save a sharded model as a checkpoint of torch.distributed.checkpoint. Call it on all ranks
    with equal arguments; `folder` is on a file system that all ranks share.

    `model.state_dict()` is saved as "model", the tables' optimizers as "optimizer", and the parts
    in `state` under their names: the dense optimizer, or anything with a `state_dict`, or a state
    dict. `step` is the number by which `oper.load` finds the newest of several checkpoints.
    `overwrite` replaces a checkpoint that oper wrote at `folder`, which stays complete until the
    new one is. With `deltas` rows updated from now on are marked, so that `oper.save_delta` can
    save only these; without it, earlier marks stay. Returns the folder. Raises OperError, on all
    ranks, if the folder is taken, is continued by deltas, or cannot be written.
    """
    check_type("save", "model", model, nn.Module)
    blocks = next(iter(sharded_collections(model).values())).blocks

    def check() -> None:
        check_type("save", "step", step, int, type(None))
        check_parts("save", folder, state)

    of_each_rank(check, blocks.group)
    settings = {"folder": str(folder), "step": step, "overwrite": overwrite, "deltas": deltas}
    blocks.agree("save", settings)
    with streaming(model):
        content = of_each_rank(lambda: state_to_save(model, state), blocks.group)
        marker = write_checkpoint(model, Path(folder), content, step, overwrite)
    if deltas:
        begin_deltas(model, Path(folder), marker)
    return Path(folder)


def write_checkpoint(
    model: nn.Module,
    folder: Path,
    content: Mapping[str, Any],
    step: int | None,
    overwrite: bool = False,
    delta: Delta | None = None,
) -> Marker:
    """Write the state of `whole_state`, with streamed tables, to a folder, and return its marker.
    Call it on all ranks."""
    collections = sharded_collections(model)
    group = next(iter(collections.values())).blocks.group
    with _folder_of_all(folder, group, overwrite) as made:
        save = of_first_rank(new_save, group)
        writer = _StreamingWriter(made, save)
        _write_parts(folder, content, writer, group)
        files = {k: v for part in gathered(writer.files, group) for k, v in part.items()}
        digests = b"".join(plan_digest(each.engine.plan) for each in collections.values())
        plan = hashlib.sha256(digests).hexdigest()
        ids = {
            table.name: {"rows": table.rows, "ids": table.ids.to_dict()}
            for each in collections.values()
            for table in each.engine.plan.numbered_tables()
            if table.ids.kind != "dense"
        }

        files[INDEX] = of_first_rank(lambda: describe_file(made / INDEX), group)
        marker = Marker(step, plan, ranks_of(group), files, delta, save, ids)
        of_first_rank(lambda: marker.write(made), group)
        return marker


def _write_parts(
    folder: Path, content: Mapping[str, Any], writer: "_StreamingWriter", group: Group | None
) -> None:
    """Write each rank's part and the index, like torch.distributed.checkpoint's `save`, but without
    its messages between ranks, which have no deadline."""
    planner, first = DefaultSavePlanner(), is_first(group)

    def plan() -> SavePlan:
        planner.set_up_planner(dict(content), writer.storage_meta(), first)
        rank = 0 if group is None else group.rank
        writer.set_up_storage_writer(first, rank=rank, use_collectives=True)
        return writer.prepare_local_plan(planner.create_local_plan())

    def write() -> list[WriteResult]:
        try:
            planned = planner.finish_plan(own_plan)
            return writer.write_data(planned, planner).value()
        except OSError as error:
            raise OperError(
                f"{folder}: rank {0 if group is None else group.rank} could not write its part "
                f"({error.strerror or one_line(error)}); the checkpoint that was there is as it "
                "was: free space or choose another path, and save again"
            ) from error

    plans = gathered(plan_to_json(of_each_rank(plan, group)), group)
    # Equal on all ranks, because the plans are.
    planned, metadata = planner.create_global_plan([plan_from_json(item) for item in plans])
    own_plan = writer.prepare_global_plan(planned)[0 if group is None else group.rank]
    written = gathered([result_to_json(item) for item in of_each_rank(write, group)], group)
    results = [[result_from_json(item) for item in of_rank] for of_rank in written]
    of_first_rank(lambda: writer.finish(metadata, results), group)


@contextmanager
def streaming(model: nn.Module) -> Iterator[None]:
    """Make the model's state dicts have a StreamedTable in the place of each copy of a table,
    inside the context."""
    with ExitStack() as stack:
        for module in sharded_collections(model).values():
            stack.enter_context(module.blocks.streaming())
        yield


def state_to_save(model: nn.Module, state: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    """Return `whole_state` and `more`; raise OperError if a part of it could not be loaded
    again."""
    content = whole_state(model, parts_of(state)) | more
    check_loadable(content)
    return content


def whole_state(model: Any, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint: the state dicts of the model and of its tables'
    optimizers, and the `parts` that a script adds."""
    return {
        MODEL: model.state_dict(),
        OPTIMIZER: fused_optimizer_of(model).state_dict(),
        **parts,
    }


class _StreamingWriter(FileSystemWriter):
    """Writer of a rank's part into one file, tables in pieces; `files` then describes the file."""

    def __init__(self, folder: Path, save: str) -> None:
        super().__init__(folder)
        self._folder, self._save = folder, save
        self.files: dict[str, dict[str, Any]] = {}

    def storage_meta(self) -> StorageMeta:
        """Return torch's own metadata, without the hidden name of the folder."""
        return StorageMeta(save_id=self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write the parts that the plan has for this rank."""
        name = f"{plan.storage_data.prefix}0{SUFFIX}"
        file = ShardFile(self._folder / name)
        results: list[WriteResult] = []
        failure: OSError | None = None
        try:
            with ThreadPoolExecutor(1) as thread:
                writing: Future[WriteResult] | None = None
                for item, data in _parts(plan, planner):
                    # All ranks read together: a rank that cannot write continues to read, and fails
                    # at the end.
                    if item is not None and failure is None:
                        try:
                            if writing is not None:
                                results.append(writing.result())
                            writing = thread.submit(_write, file, name, item, data)
                        except OSError as error:
                            failure = error
                if writing is not None and failure is None:
                    results.append(writing.result())
            if failure is not None:
                raise failure
            self.files[name] = file.close(self._save)
        finally:
            file.abandon()
        done: TorchFuture[list[WriteResult]] = TorchFuture()
        done.set_result(results)
        return done


def _parts(plan: SavePlan, planner: Any) -> Iterator[tuple[WriteItem | None, Any]]:
    """Yield the parts for a rank to write: tensors, and objects as their bytes. An item is None if
    only other ranks have a piece of a table."""
    items = {item.index: item for item in plan.items}
    for name, value in planner.state_dict.items():
        if isinstance(value, Streamed):
            for number, (first, rows) in enumerate(value.pieces):
                index = MetadataIndex(name, value.offsets(first))
                yield items.pop(index) if rows else None, value.read(number)
    for item in items.values():
        yield item, planner.resolve_data(item)


def _write(file: ShardFile, name: str, item: WriteItem, data: Any) -> WriteResult:
    if isinstance(data, torch.Tensor):
        start, length = file.add(data.detach().cpu())
    else:
        start, length = file.bytes, file.write(data.getbuffer())
    return WriteResult(item.index, length, _StorageInfo(name, start, length))


@contextmanager
def _folder_of_all(folder: Path, group: Group | None, overwrite: bool) -> Iterator[Path]:
    """Provide a hidden folder, made by rank 0, into which all ranks write, and which becomes
    `folder` at the end if no rank has failed."""
    with ExitStack() as stack:

        def begin() -> str:
            if overwrite:
                check_replaceable(folder)
            return str(stack.enter_context(atomic_folder(folder, FORMAT, overwrite)))

        made = Path(of_first_rank(begin, group))
        unseen = [r for r, is_there in enumerate(gathered(made.is_dir(), group)) if not is_there]
        if unseen:
            raise OperError(
                f"{folder}: rank {unseen[0]} does not see what rank 0 wrote there; give a folder "
                "on a file system that all ranks share"
            )
        yield made
        # Only rank 0 has something to close.
        of_first_rank(stack.close, group)
