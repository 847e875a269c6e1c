"""What ranks do in tests of `oper.save` and `oper.load`: functions that `Ranks` run."""

import errno
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.optimizers import in_backward_optimizer_filter

import oper
from benchmarks.runtime.checkpoint import Growth
from oper.base.errors import OperError
from oper.checkpoint.direct_file import DirectFile
from oper.checkpoint.shard_file import ShardFile
from oper.scheduler.cache_settings import CacheSettings
from oper.tables.table import tables_of
from oper.torchrec import load_checkpoint as loading
from oper.torchrec import save_checkpoint as saving
from oper.torchrec import streamed_table
from tests.support.runtime.fault_cases import error_of
from tests.support.runtime.mortal_ranks import lose_this_process
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import Kind, Model, batch
from tests.support.torchrec.ranks import (
    compare,
    put_optimizer,
    sharded,
    stock,
    train_step,
    whole,
    whole_model,
)

_PIECE_BYTES = 1000  # a few rows, so that every table has several pieces


@contextmanager
def small_pieces() -> Iterator[None]:
    """Tables are read and written a few rows at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streamed_table, "_PIECE_BYTES", _PIECE_BYTES)
        yield


@contextmanager
def said() -> Iterator[list[str]]:
    """What is logged inside."""
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper").addHandler(handler)
    try:
        yield caught
    finally:
        logging.getLogger("oper").removeHandler(handler)


def dense_adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of the dense part that has states of its own."""
    return torch.optim.Adam(dict(in_backward_optimizer_filter(model.named_parameters())).values())


def trained(
    group: dist.ProcessGroup,
    kind: Kind,
    data_type: DataType = DataType.FP32,
    cache: CacheSettings | None = None,
    **options: Any,
) -> tuple[Any, torch.optim.Optimizer]:
    """A model after two steps, and its dense optimizer."""
    model, _ = sharded(group, kind, data_type=data_type, cache=cache, **options)
    dense = dense_adam(model)
    for step in range(2):
        train_step(model, dense, batch(step))
    return model, dense


def saved(
    rank: int,
    group: dist.ProcessGroup,
    kind: Kind,
    folder: Path,
    data_type: DataType = DataType.FP32,
    cache: CacheSettings | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train and save, and train on: what was saved, and what came after."""
    model, dense = trained(group, kind, data_type, cache, **options)
    with small_pieces():
        state = {"dense": dense, "loader": {"epoch": 3}}
        assert oper.save(model, folder, step=2, state=state) == folder
    found = whole_model(model, group)
    train_step(model, dense, batch(9))
    return found | {f"after {key}": value for key, value in whole_model(model, group).items()}


def loaded(
    rank: int,
    group: dist.ProcessGroup,
    kind: Kind,
    folder: Path,
    data_type: DataType = DataType.FP32,
    cache: CacheSettings | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Load under another plan, into a model that has other values, and train on."""
    model, _ = sharded(group, kind, 1.0, "meta", data_type, cache, **options)
    dense = dense_adam(model)
    before = {"epoch": 0}
    held = model.state_dict()  # which must not undo what is loaded
    held["bags.embedding_bags.wide.weight"].local_shards()[0].tensor.zero_()
    with small_pieces():
        made = oper.load(model, folder, state={"dense": dense, "loader": before})
    assert (made.folder, made.step, before) == (folder, 2, {"epoch": 3})
    assert (made.grown, made.new, made.skipped) == ({}, (), ())
    found = whole_model(model, group)
    train_step(model, dense, batch(9))
    return found | {f"after {key}": value for key, value in whole_model(model, group).items()}


def loaded_to_serve(rank: int, group: dist.ProcessGroup, folder: Path) -> dict[str, Any]:
    """Load the tables and the dense part by a plan for inference, which has no optimizers."""
    model = Model("meta")
    plan = random_plan(0, tables_of(model), dist.get_world_size(group), mode="inference")
    made = oper.shard(model, plan, env=ShardingEnv.from_process_group(group)).eval()
    with small_pieces():
        oper.load(made, folder)
    found = whole(made.state_dict(), group)
    with torch.no_grad():
        made(batch(rank))
    return found


def little_memory(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """Saving and loading take less than 128 MB beside tables of which a rank has 300 MB."""
    model = small_model(group, {"a": (2_400_000, 64)}, "rowwise_adagrad")
    oper.save(model, folder)  # which imports
    for do in (lambda: oper.save(model, folder, overwrite=True), lambda: oper.load(model, folder)):
        dist.barrier(group)
        with Growth() as growth:
            do()
        assert growth.bytes < 128 << 20
    with Growth() as growth:
        held = model.state_dict()
    assert growth.bytes > 256 << 20, "not what state dicts take, of which no growth is noticed"
    del held


def read_by_torch(
    rank: int, group: dist.ProcessGroup, kind: Kind, sharding: str, folder: Path
) -> dict[str, Any]:
    """What torch.distributed.checkpoint reads, into the unsharded module, or into TorchRec's own
    sharding with its optimizers."""
    if sharding == "none":
        module = Model("cpu")
        state: dict[str, Any] = {"model": module.state_dict()}
        load_checkpoint(state, checkpoint_id=folder, process_group=group)
        return {key: value.double() for key, value in module.state_dict().items()}
    model = stock(kind, sharding, group)
    optimizers = model.fused_optimizer.state_dict()
    state = {"model": model.state_dict(), "optimizer": optimizers}
    load_checkpoint(state, checkpoint_id=folder, process_group=group)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    return whole_model(model, group)


def saved_asynchronously(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """torch's `async_save` of a state dict has what the tables were, though they train on."""
    model, dense = trained(group, "adagrad")
    expected = whole_model(model, group)
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    # Without a writer that stages, torch copies no ShardedTensor, TorchRec's own neither; and its
    # thread's messages must not come between those of training.
    writer, own = FileSystemWriter(folder), dist.new_group()
    saving: Any = async_save(state, storage_writer=writer, process_group=own)
    for step in range(3):
        train_step(model, dense, batch(20 + step))
    saving.result()
    other, _ = sharded(group, "adagrad", device="meta")
    into = {"model": other.state_dict(), "optimizer": other.fused_optimizer.state_dict()}
    load_checkpoint(into, checkpoint_id=folder, process_group=group)
    compare(whole_model(other, group), expected, 0)


def written_by_a_full_disk(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """One rank cannot write: all say so, the older checkpoint stays, and the tables train on."""
    model, dense = trained(group, "adam")
    oper.save(model, folder, step=1)
    expected = whole_model(model, group)
    train_step(model, dense, batch(3))

    def write(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    # At once, and in the thread that writes, whose buffers are larger than what there is to write.
    for kind, method in ((ShardFile, "write"), (DirectFile, "_write_at")):
        with pytest.MonkeyPatch.context() as patch, small_pieces():
            if rank == 1:
                patch.setattr(kind, method, write)
            with pytest.raises(OperError, match=r"rank 1 could not write its part \(No space left"):
                oper.save(model, folder, step=2, overwrite=True)
        dist.barrier(group)
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    train_step(model, dense, batch(4))
    assert oper.load(model, folder).step == 1
    compare(whole_model(model, group), expected, 0)


def replaced(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """Nothing is replaced unless that is asked for; of several checkpoints the newest is loaded."""
    model, dense = trained(group, "sgd")
    for step in (9, 10):
        oper.save(model, folder / f"step-{step}", step=step)
        train_step(model, dense, batch(step))
    with pytest.raises(OperError, match="exists; choose another path"):
        oper.save(model, folder / "step-10")
    assert oper.load(model, folder).step == 10
    assert oper.load(model, folder / "step-9").step == 9
    dist.barrier(group)
    oper.save(model, folder / "step-9", step=11, overwrite=True)
    assert oper.load(model, folder).folder == folder / "step-9"


def small_model(group: dist.ProcessGroup, tables: dict[str, tuple[int, int]], kind: str) -> Any:
    """A model whose tables have so many rows and columns, on the meta device."""
    configs = [
        EmbeddingBagConfig(rows, dim, name=name, feature_names=[name])
        for name, (rows, dim) in tables.items()
    ]
    module = nn.ModuleDict({"bags": EmbeddingBagCollection(configs, device=torch.device("meta"))})
    put_optimizer(module, kind)
    plan = random_plan(0, tables_of(module), dist.get_world_size(group))
    torch.manual_seed(5)
    return oper.shard(module, plan, env=ShardingEnv.from_process_group(group))


def small_step(model: Any, rows: int, names: tuple[str, ...]) -> None:
    """A step that trains the first rows of tables."""
    ids = torch.arange(rows).repeat(len(names))
    lengths = torch.ones(len(ids), dtype=torch.int32)
    model.module["bags"](
        KeyedJaggedTensor([*names], ids, lengths=lengths)
    ).values().sum().backward()


def grown(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """Old rows are loaded, new rows and tables keep their initial values, and that is said."""
    old = small_model(group, {"a": (37, 8), "gone": (5, 4)}, "adam")
    for _ in range(2):
        small_step(old, 5, ("a", "gone"))
    oper.save(old, folder, step=7)
    expected = whole_model(old, group)
    model = small_model(group, {"a": (90, 8), "fresh": (6, 4)}, "adam")
    before = whole_model(model, group)
    with said() as texts, small_pieces():
        made = oper.load(model, folder)
    assert (made.grown, made.new, made.skipped) == ({"a": 37}, ("fresh",), ("gone",))
    assert len(texts) == (3 if rank == 0 else 0)
    if rank == 0:
        assert "'a': has 37 rows" in texts[0]
        assert "90 in the model" in texts[0]
    found = whole_model(model, group)
    for key, value in found.items():
        if key.endswith(".iter"):
            assert int(value) == 2
        elif ".a." in key:
            assert torch.equal(value[:37], expected[key].double())
            assert torch.equal(value[37:], before[key][37:])
        else:
            assert torch.equal(value, before[key])


def refused(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """A checkpoint of other tables is refused by name, and nothing is changed."""
    model = small_model(group, {"a": (40, 8)}, "adagrad")
    oper.save(model, folder)
    cases = {
        r"'a' is \(40, 8\) in the checkpoint and \(39, 8\) in the model": ((39, 8), "adagrad"),
        r"'a' is \(40, 8\) in the checkpoint and \(40, 4\) in the model": ((40, 4), "adagrad"),
        r"'a', exp_avg_sq: the checkpoint lacks this state": ((40, 8), "adam"),
        r"'a', momentum1 is \(40, 8\) in the checkpoint and \(40,\)": ((40, 8), "rowwise_adagrad"),
    }
    for message, (shape, kind) in cases.items():
        other = small_model(group, {"a": shape}, kind)
        before = whole_model(other, group)
        with pytest.raises(OperError, match=message):
            oper.load(other, folder)
        compare(whole_model(other, group), before, 0)
    strange = small_model(group, {"b": (40, 8)}, "adagrad")
    with pytest.raises(OperError, match="of another model: its tables are a, and the model has b,"):
        oper.load(strange, folder)
    with pytest.raises(OperError, match="has no 'dense\\.epoch'"):
        oper.load(model, folder, state={"dense": {"epoch": 1}})
    with pytest.raises(OperError, match="'model' is the model's own name"):
        oper.save(model, folder, state={"model": {}}, overwrite=True)


def mistaken_alone(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """What one rank alone gives wrongly is told to all, and the model trains on."""
    model = small_model(group, {"a": (40, 8)}, "adagrad")
    alone: dict[str, dict[str, Any]] = {
        "step is 0 on rank 0 and 1 on rank 1: give all ranks the same": {"step": rank},
        "step: expected int or NoneType, got str": {"step": "1" if rank == 1 else 1},
        "state: expected .*, got int": {"state": 1 if rank == 1 else {}},
        "'model' is the model's own name": {"state": {"model": {}} if rank == 1 else {}},
    }
    for message, given in alone.items():
        with pytest.raises(OperError, match=message):
            oper.save(model, folder, **given)
    with pytest.raises(OperError, match=r"folder: expected .*, got NoneType"):
        oper.save(model, None if rank == 1 else folder)  # type: ignore[arg-type]
    with pytest.raises(OperError, match=r"folder is '.*made0' on rank 0 and '.*made1' on rank 1"):
        oper.save(model, f"{folder}{rank}")
    assert not list(folder.parent.glob("*made*"))
    oper.save(model, folder, step=1)
    with pytest.raises(OperError, match=r"has no 'loader\.epoch'"):
        oper.load(model, folder, state={"loader": {"epoch": 0}} if rank == 1 else None)
    with pytest.raises(OperError, match=r"state: expected .*, got int"):
        oper.load(model, folder, state=1 if rank == 1 else None)  # type: ignore[arg-type]
    small_step(model, 5, ("a",))
    whole(model.state_dict(), group)


def damaged(rank: int, group: dist.ProcessGroup, folder: Path, message: str) -> None:
    """All ranks refuse a damaged checkpoint, for the same reason, and can train on."""
    model = small_model(group, {"a": (40, 8)}, "adagrad")
    with pytest.raises(OperError, match=message):
        oper.load(model, folder)
    small_step(model, 5, ("a",))
    whole(model.state_dict(), group)


def small_saved(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """A checkpoint to be damaged."""
    oper.save(small_model(group, {"a": (40, 8)}, "adagrad"), folder, step=1)


def lost_while_saving(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """A rank is killed as it writes."""
    model = small_model(group, {"a": (40, 8)}, "adagrad")
    oper.save(model, folder, step=1)

    def write(file: ShardFile, data: Any) -> int:
        lose_this_process(signal.SIGKILL)
        raise AssertionError("it lives on")

    with pytest.MonkeyPatch.context() as patch, small_pieces():
        if rank == 1:
            patch.setattr(ShardFile, "write", write)
        oper.save(model, folder, step=2, overwrite=True)


def lost_unheard(rank: int, group: dist.ProcessGroup, folder: Path, saves: bool) -> None:
    """A rank is killed as it comes to save or to load."""
    model = small_model(group, {"a": (40, 8)}, "adagrad")
    oper.save(model, folder, step=1)

    def lose(*_: Any) -> None:
        lose_this_process(signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(saving, "parts_of", lose)
            patch.setattr(loading, "parts_of", lose)
        if saves:
            oper.save(model, folder, step=2, overwrite=True)
        else:
            oper.load(model, folder)


def saved_combined(rank: int, group: dist.ProcessGroup, kind: Kind, folder: Path) -> dict[str, Any]:
    """Train, and save a base and a delta with the optimizer of all."""
    model, optimizer = sharded(group, kind)
    train_step(model, optimizer, batch(rank))
    with small_pieces():
        oper.save(model, folder / "run" / "0", step=0, state={"all": optimizer}, deltas=True)
        train_step(model, optimizer, batch(10 + rank, samples=1))
        held = model.fused_optimizer.state_dict()  # what was handed out changes nothing
        oper.save_delta(model, folder / "run" / "1", step=1, state={"all": optimizer})
    del held
    return whole_model(model, group)


def loaded_combined(
    rank: int, group: dist.ProcessGroup, kind: Kind, folder: Path
) -> dict[str, Any]:
    """Load it into a model that has other values."""
    model, optimizer = sharded(group, kind, 1.0, "meta")
    with small_pieces():
        oper.load(model, folder / "run", state={"all": optimizer})
    return whole_model(model, group)


def combined_grown(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """Tables that grew, are new or are gone, with their states in a part of `state` too."""
    old = small_model(group, {"a": (37, 8), "gone": (5, 4)}, "adam")
    small_step(old, 5, ("a", "gone"))
    oper.save(old, folder / "0", step=0, state={"all": old.fused_optimizer}, deltas=True)
    small_step(old, 3, ("a", "gone"))
    oper.save_delta(old, folder / "1", step=1, state={"all": old.fused_optimizer})
    expected = whole_model(old, group)
    model = small_model(group, {"a": (90, 8), "fresh": (6, 4)}, "adam")
    made = oper.load(model, folder, state={"all": model.fused_optimizer})
    assert (made.grown, made.new, made.skipped) == ({"a": 37}, ("fresh",), ("gone",))
    found = whole_model(model, group)
    for key, value in expected.items():
        if ".a." in key and not key.endswith(".iter"):
            assert torch.equal(found[key][:37], value.double()), key


def late(
    rank: int,
    group: dist.ProcessGroup,
    folder: Path,
    where: str,
    nodes: tuple[int, ...] | None,
) -> tuple[str | None, float]:
    """Rank 2 is stopped; the error of the others, and the seconds that it took."""
    model, optimizer = sharded(group, "adagrad", deadline_seconds=3.0, nodes=nodes)
    oper.save(model, folder / "0", step=0, deltas=True)
    train_step(model, optimizer, batch(rank))
    if rank == 2 and where != "write":
        lose_this_process(signal.SIGSTOP)

    def stop(*_: Any) -> None:
        lose_this_process(signal.SIGSTOP)

    def use() -> None:
        if where == "load":
            oper.load(model, folder)
        elif where == "save_delta":
            oper.save_delta(model, folder / "1", step=1)
        else:
            oper.save(model, folder / "1", step=1)

    begun = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(ShardFile, "close", stop)
        return error_of(use), time.monotonic() - begun
