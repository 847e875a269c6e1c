"""What ranks do in tests of state dicts and checkpoints: functions that `Ranks` run."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchrec.distributed.model_parallel import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from torchrec.distributed.shards_wrapper import LocalShardsWrapper
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType

import oper
from oper.base.errors import OperError
from oper.scheduler.cache_settings import CacheSettings
from oper.tables.table import tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import (
    TABLES,
    Kind,
    Model,
    batch,
    embedding_weights,
)
from tests.support.torchrec.ranks import (
    all_optimizers,
    compare,
    put_optimizer,
    sharded,
    stock,
    train_step,
    whole,
    whole_model,
    whole_tables,
)


def written_in_place(rank: int, group: dist.ProcessGroup, kind: Kind) -> list[str]:
    """What is written into a state dict reaches the tables, on any rank; what is written after
    the tables were used does not, and is warned of."""
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper").addHandler(handler)
    model, optimizer = sharded(group, kind)
    train_step(model, optimizer, batch(rank))
    before = whole_model(model, group)
    key, state = "bags.embedding_bags.wide.weight", "wide.momentum1"
    held = model.state_dict()
    if rank == 0:  # others have only read it
        held[key].local_shards()[0].tensor[2:4] = 5.0
    states = model.fused_optimizer.state_dict()["state"]
    if rank == 1:
        states[key][state].local_shards()[0].tensor.mul_(2)
    with torch.no_grad():
        model(batch(rank))
    after = whole_model(model, group)
    held[key].local_shards()[0].tensor.zero_()
    with torch.no_grad():
        model(batch(rank))
    later = whole_model(model, group)
    expected = {k: v.clone() for k, v in before.items()}
    expected[key][2:4] = 5.0
    expected[f"{key}/{state}"][25:] *= 2
    compare(after, expected, 0)
    compare(later, after, 0)
    return caught


def loaded(rank: int, group: dist.ProcessGroup) -> None:
    """State dicts of the unsharded model, of TorchRec's shardings and of ours are loaded directly,
    and the unsharded model loads ours."""
    plain = Model("cpu")
    with torch.no_grad():
        for number, weight in enumerate(plain.parameters()):
            weight.uniform_(number, number + 1)
    expected = plain.state_dict()
    model, _ = sharded(group, device="meta")
    assert not model.load_state_dict(plain.state_dict()).missing_keys
    compare(whole(model.state_dict(), group), expected, 0)
    for sharding in ("row_wise", "table_wise"):
        other = stock("sgd", sharding, group)
        held = other.state_dict()
        for key, value in held.items():
            for shard in value.local_shards() if isinstance(value, ShardedTensor) else []:
                rows = shard.metadata.shard_offsets[0]
                shard.tensor.copy_(expected[key][rows : rows + len(shard.tensor)])
        model, _ = sharded(group, device="meta")
        model.load_state_dict(other.state_dict())
        compare(whole_tables(model, group), {k: v for k, v in expected.items() if "embed" in k}, 0)
    again = Model("cpu")
    again.load_state_dict({k: v.float() for k, v in whole(model.state_dict(), group).items()})
    compare(whole(model.state_dict(), group), again.state_dict(), 0)
    with torch.inference_mode():
        held = model.state_dict()
    compare(whole(held, group), whole(model.state_dict(), group), 0)
    strange = {"bags.embedding_bags.wide.weight": torch.zeros(51, 16)}
    with pytest.raises(OperError, match=r"state dict's weight: expected .*, got \(51, 16\)"):
        model.load_state_dict(strange, strict=False)
    assert model.load_state_dict({}, strict=False).missing_keys
    # A module of torch's own around it goes another way.
    outer = nn.ModuleDict({"inner": model.module})
    outer.load_state_dict({f"inner.{key}": value for key, value in expected.items()})
    compare(whole(model.state_dict(), group), expected, 0)


def loaded_by_row_wise(rank: int, group: dist.ProcessGroup, kind: str) -> None:
    """TorchRec's row-wise sharding, whose blocks are ours, loads state dicts of ours directly."""
    model, optimizer = sharded(group, kind)
    train_step(model, optimizer, batch(rank))
    other = stock(kind, "row_wise", group)
    other.load_state_dict(model.state_dict())
    other.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    compare(whole_model(other, group), whole_model(model, group), 0)


def loaded_from_dtensors(rank: int, group: dist.ProcessGroup) -> None:
    """DTensors are loaded where they hold whole rows, torch's own and TorchRec's; shards of columns
    are refused by name."""
    ranks = dist.get_world_size(group)
    mesh = DeviceMesh.from_group(group, "cpu")
    key, name = "bags.embedding_bags.wide.weight", "wide"
    values = torch.rand(50, 16)
    dist.broadcast(values, group=group, group_src=0)

    def load(value: Any) -> torch.Tensor:
        model, _ = sharded(group, device="meta")
        model.load_state_dict({key: value}, strict=False)
        return whole_tables(model, group)[key]

    # TorchRec's, in blocks of its own: two on rank 0, one on rank 1.
    places = ([(0, 10), (10, 20)], [(30, 20)])[rank]
    wrapped = LocalShardsWrapper(
        [values[first : first + count] for first, count in places],
        [(first, 0) for first, _ in places],
    )
    theirs = DTensor.from_local(
        wrapped, mesh, [Shard(0)], run_check=False, shape=values.shape, stride=values.stride()
    )
    found = [load(theirs)] + [
        load(distribute_tensor(values, mesh, [p])) for p in (Shard(0), Replicate())
    ]
    for table in found:
        assert torch.equal(table.float(), values)
    width = 16 // ranks
    columns = [ShardMetadata([0, width * r], [50, width], f"rank:{r}/cpu") for r in range(ranks)]
    by_columns = ShardedTensor._init_from_local_shards(
        [LocalShard(values[:, width * rank :][:, :width].contiguous(), columns[rank])],
        50,
        16,
        process_group=group,
    )
    with pytest.raises(OperError, match=f"'{name}': the state dict holds it in shards of columns"):
        load(by_columns)


def unlike_names(rank: int, group: dist.ProcessGroup, strict: bool, values: str) -> None:
    """A state dict that lacks a table on one rank is refused on all, and no row changes."""
    model, _ = sharded(group)
    before = whole_model(model, group)
    state: dict[str, Any] = dict(model.state_dict())
    if values == "whole":
        state = {key: value for key, value in before.items() if "/" not in key}
    state = {key: value + 1 if values == "whole" else value for key, value in state.items()}
    lacking = dist.get_world_size(group) - 1
    if rank == lacking:
        del state["bags.embedding_bags.wide.weight"]
    with pytest.raises(
        OperError, match=f"table 'wide' is given on .* and missing on rank {lacking}"
    ):
        model.load_state_dict(state, strict=strict)
    compare(tables_alone(whole_model(model, group)), tables_alone(before), 0)
    model.load_state_dict(before, strict=False)  # with names of which the model lacks some


def unlike_sizes(rank: int, group: dist.ProcessGroup) -> None:
    """So is one whose table has another size on one rank."""
    model, _ = sharded(group, deadline_seconds=5)
    before = whole_model(model, group)
    state = {"bags.embedding_bags.wide.weight": torch.ones(50 + rank, 16)}
    with pytest.raises(OperError, match=r"state dict's weight: expected .*, got \(51, 16\)"):
        model.load_state_dict(state, strict=False)
    compare(tables_alone(whole_model(model, group)), tables_alone(before), 0)


def tables_alone(values: dict[str, Any]) -> dict[str, Any]:
    """The tables and the states of their optimizers."""
    return {key: value for key, value in values.items() if "embedding" in key}


def narrow(rank: int, group: dist.ProcessGroup, data_type: DataType, folder: Path) -> None:
    """Tables of 16 bits are saved and loaded as such."""
    model, _ = sharded(group, "rowwise_adagrad", data_type=data_type)
    # TorchRec's unsharded modules have halves for both types.
    dtype = {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}[data_type]
    expected = embedding_weights(Model("cpu", data_type))
    held = model.state_dict()
    assert {held[key].dtype for key in expected} == {dtype}
    found = whole_tables(model, group)
    compare(found, {k: v.detach().to(dtype) for k, v in expected.items()}, 0)
    train_step(model, all_optimizers(model), batch(rank))
    save_checkpoint(_state(model, "rowwise_adagrad"), checkpoint_id=folder, process_group=group)
    other, _ = sharded(group, "rowwise_adagrad", 1.0, "meta", data_type)
    _load(other, "rowwise_adagrad", folder, group)
    compare(whole_model(other, group), whole_model(model, group), 0)


def without_step_counts(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """Checkpoints of TorchRec's, which have no number of Adam's steps, are loaded in part."""
    model, optimizer = sharded(group, "adam")
    train_step(model, optimizer, batch(rank))
    state = _state(model, "adam")
    for states in state["optim"]["state"].values():
        for name in [name for name in states if name.endswith(".iter")]:
            del states[name]
    save_checkpoint(state, checkpoint_id=folder, process_group=group)
    other, _ = sharded(group, "adam", device="meta")
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper").addHandler(handler)
    try:
        _load(other, "adam", folder, group, DefaultLoadPlanner(allow_partial_load=True))
    finally:
        logging.getLogger("oper").removeHandler(handler)
    assert [text.partition(",")[0] for text in caught] == [
        f"table {table!r}: Adam's moments were loaded" for table in ("wide", "weighted", "seen")
    ]
    assert all("which stays 0" in text for text in caught)
    found, expected = whole_model(other, group), whole_model(model, group)
    steps = {key for key in expected if key.endswith(".iter")}
    assert {int(found[key]) for key in steps} == {0}
    for key in steps:
        del found[key], expected[key]
    compare(found, expected, 0)


def initial(rank: int, group: dist.ProcessGroup, copies: float) -> dict[str, Any]:
    """Tables of a model made on the meta device, by the seed of rank 0."""
    model, _ = sharded(group, copies=copies, device="meta")
    found = whole_tables(model, group)
    train_step(model, all_optimizers(model), batch(rank))
    for path in ("bags", "weighted", "sequences"):
        torch.manual_seed(3 + rank)  # as when it was sharded
        getattr(model.module, path).reset_parameters()
    compare(whole_tables(model, group), found, 0)
    return found


def rank_zeros_weights(rank: int, group: dist.ProcessGroup) -> None:
    """A model with weights keeps those of rank 0."""
    model = Model("cpu")
    expected = {k: v.clone() for k, v in embedding_weights(model).items()}
    with torch.no_grad():
        for weight in embedding_weights(model).values():
            weight.add_(rank)
    plan = random_plan(0, tables_of(model), dist.get_world_size(group))
    made = oper.shard(model, plan, env=ShardingEnv.from_process_group(group))
    compare(whole_tables(made, group), expected, 0)


def checkpoint(
    rank: int,
    group: dist.ProcessGroup,
    sharding: str,
    kind: Kind,
    load: Path | None,
    save: Path | None = None,
    partial: bool = False,
    cache: CacheSettings | None = None,
) -> dict[str, Any]:
    """Sharded by "oper" or as TorchRec does: load a checkpoint (which may lack keys if `partial`)
    or train two steps, save one, and train a step more. What was loaded or saved, and what came
    after."""
    if sharding == "oper":
        model, _ = sharded(group, kind, device="meta", cache=cache)
    else:
        model = stock(kind, sharding, group)
    optimizer = all_optimizers(model)
    # All ranks have the same batch, so that gradients do not depend on their number.
    if load is None:
        for step in range(2):
            train_step(model, optimizer, batch(step))
    else:
        _load(model, kind, load, group, DefaultLoadPlanner(allow_partial_load=partial))
    found = whole_model(model, group)
    if save is not None:
        save_checkpoint(_state(model, kind), checkpoint_id=save, process_group=group)
    train_step(model, optimizer, batch(9))
    return found | {f"after {key}": value for key, value in whole_model(model, group).items()}


def _whole_state(model: DistributedModelParallel) -> dict[str, Any]:
    return {"model": model.state_dict(), "optim": model.fused_optimizer.state_dict()}


def _state(model: DistributedModelParallel, kind: Kind) -> dict[str, Any]:
    """What scripts save. SGD has no state, and TorchRec's ranks without tables not even the key."""
    return {"model": model.state_dict()} if kind == "sgd" else _whole_state(model)


def _load(
    model: DistributedModelParallel,
    kind: Kind,
    folder: Path,
    group: dist.ProcessGroup,
    planner: DefaultLoadPlanner | None = None,
) -> None:
    """What scripts do to load it."""
    state = _state(model, kind)
    load_checkpoint(state, checkpoint_id=folder, process_group=group, planner=planner)
    model.load_state_dict(state["model"])
    if "optim" in state:
        model.fused_optimizer.load_state_dict(state["optim"])


def resumed(
    rank: int,
    group: dist.ProcessGroup,
    folder: Path,
    dense: bool,
    cache: CacheSettings | None = None,
    rounding: bool = False,
    nodes: tuple[int, ...] = (),
) -> None:
    """Training goes on from a checkpoint, loaded in place alone, bit for bit as without it: the
    tables by themselves, and with the dense part where its buckets stay as they are. With
    `rounding` tables are in BF16, with SGD and stochastic rounding. Where `nodes` are given, rows
    have copies on each."""
    kind, data_type = ("sgd", DataType.BF16) if rounding else ("adam", DataType.FP32)
    fused = {"stochastic_rounding": True} if rounding else None
    ranks = dist.get_world_size(group)

    def make() -> tuple[Any, Any]:
        model = Model("cpu", data_type)
        put_optimizer(model, kind)
        tables = tables_of(model)
        tier = tuple(range(len(tables))) if cache else ()
        plan = random_plan(0, tables, ranks, replicated=0.3, tier=tier, nodes=nodes)
        options: dict[str, Any] = {"fused_params": fused, "cache": cache, "nodes": nodes or None}
        made = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(group),
            plan=oper.torchrec_plan(plan, model),
            sharders=[
                oper.OperEmbeddingBagCollectionSharder(**options),
                oper.OperEmbeddingCollectionSharder(**options),
            ],
            data_parallel_wrapper=DefaultDataParallelWrapper(
                static_graph=False, find_unused_parameters=True
            ),
        )
        return made, all_optimizers(made)

    def step(model: Any, optimizer: Any, number: int) -> None:
        inputs = batch(10 * number + rank)
        if dense:
            train_step(model, optimizer, inputs)
        else:
            model.module.bags(inputs.ids).values().square().sum().backward()
            rows = model.module.sequences(inputs.ids)
            sums = [jagged.values().square().sum() for _, jagged in sorted(rows.items())]
            torch.stack(sums).sum().backward()

    model, optimizer = make()
    for number in range(3):
        step(model, optimizer, number)
    save_checkpoint(_whole_state(model), checkpoint_id=folder, process_group=group)
    other, others_optimizer = make()
    load_checkpoint(_whole_state(other), checkpoint_id=folder, process_group=group)
    steps = {key for key in whole_model(other, group) if key.endswith(".iter")}
    assert {key.split("/")[-1] for key in steps} == {f"{name}.iter" for name in TABLES}
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, others_optimizer, number)
        compare(whole_model(other, group), whole_model(model, group), 0)
