"""What ranks do in tests of state dicts and checkpoints: functions that `Ranks` run."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

import oper
from oper.errors import OperError
from oper.tables import tables_of
from tests.runtime_plans import random_plan
from tests.torchrec_models import (
    Model,
    batch,
    embedding_weights,
)
from tests.torchrec_ranks import (
    all_optimizers,
    compare,
    sharded,
    stock,
    train_step,
    whole,
    whole_model,
    whole_tables,
)


def written_in_place(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What is written into a state dict reaches the tables, whoever writes; what is written after
    the tables were used does not, and is warned of."""
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper").addHandler(handler)
    model, optimizer = sharded(group, "adagrad")
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
    strange = {"bags.embedding_bags.wide.weight": torch.zeros(51, 16)}
    with pytest.raises(OperError, match=r"'wide': the state dict's weight is \(51, 16\)"):
        model.load_state_dict(strange, strict=False)
    assert model.load_state_dict({}, strict=False).missing_keys
    # A module of torch's own around it goes another way.
    outer = nn.ModuleDict({"inner": model.module})
    outer.load_state_dict({f"inner.{key}": value for key, value in expected.items()})
    compare(whole(model.state_dict(), group), expected, 0)


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
    kind: str,
    load: Path | None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Sharded by "oper" or as TorchRec does: load a checkpoint or train two steps, save one, and
    train a step more. What was loaded or saved, and what came after."""
    if sharding == "oper":
        model, _ = sharded(group, kind, device="meta")
    else:
        model = stock(kind, sharding, group)
    optimizer = all_optimizers(model)
    # All ranks have the same batch, so that gradients do not depend on their number.
    if load is None:
        for step in range(2):
            train_step(model, optimizer, batch(step))
    else:
        state = _state(model, kind)
        load_checkpoint(state, checkpoint_id=load, process_group=group)
        model.load_state_dict(state["model"])
        if "optim" in state:
            model.fused_optimizer.load_state_dict(state["optim"])
    found = whole_model(model, group)
    if save is not None:
        save_checkpoint(_state(model, kind), checkpoint_id=save, process_group=group)
    train_step(model, optimizer, batch(9))
    return found | {f"after {key}": value for key, value in whole_model(model, group).items()}


def _state(model: DistributedModelParallel, kind: str) -> dict[str, Any]:
    """What scripts save. SGD has no state, and TorchRec's ranks without tables not even the key."""
    state = {"model": model.state_dict()}
    if kind != "sgd":
        state["optim"] = model.fused_optimizer.state_dict()
    return state
