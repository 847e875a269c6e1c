"""Work of the ranks in tests of models with sharded parts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv

import oper
from oper.base.errors import OperError
from oper.tables.table import tables_of
from oper.torchrec.parallel_model import ShardedModel
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.ranks import compare, whole

ROWS, DIM, SAMPLES = 20, 4, 6


class Tower(nn.Module):
    """A collection, by the name `ebc`, and dense parts before and after it."""

    def __init__(self, table: str, device: str) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name=table, num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"]
        )
        self.norm = nn.BatchNorm1d(DIM)
        self.ebc = EmbeddingBagCollection([config], device=torch.device(device))
        self.over = nn.Linear(DIM, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.norm(self.ebc(ids).values()))


class Towers(nn.Module):
    """Two towers, one of them two modules deep, between dense parts."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(1, 1)
        self.user = Tower("users", device)
        self.deep = nn.ModuleDict({"inner": nn.ModuleList([Tower("films", device)])})
        self.last = nn.Linear(1, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        inner: Any = self.deep["inner"]
        return self.last(self.first(self.user(ids) + inner[0](ids)))


def batch(seed: int) -> KeyedJaggedTensor:
    ids = torch.randint(ROWS, (2 * SAMPLES,), generator=torch.Generator().manual_seed(seed))
    return KeyedJaggedTensor(["f"], ids, lengths=torch.full((SAMPLES,), 2))


def towers(group: dist.ProcessGroup, parts: str, device: str = "cpu") -> Towers:
    """Towers of which the collections are sharded, or whole towers."""
    model: Any = Towers(device)
    env = ShardingEnv.from_process_group(group)
    ranks = dist.get_world_size(group)

    def shard(part: nn.Module) -> nn.Module:
        plan = random_plan(0, tables_of(part), ranks, replicated=0.3)
        return oper.shard(part, plan, env=env, fused_params={"learning_rate": 0.5})

    if parts == "collections":
        model.user.ebc = shard(model.user.ebc)
        model.deep["inner"][0].ebc = shard(model.deep["inner"][0].ebc)
    else:
        model.user = shard(model.user)
        model.deep["inner"][0] = shard(model.deep["inner"][0])
    return model


def named_as_unsharded(rank: int, group: dist.ProcessGroup, parts: str) -> None:
    """State dicts have the unsharded model's names, load into it, and come back from it."""
    model, plain = towers(group, parts), Towers()
    model(batch(rank)).sum().backward()
    state = model.state_dict()
    assert set(state) == set(plain.state_dict())
    assert set(oper.counters(model)) == {"user.ebc", "deep.inner.0.ebc"}
    full = {name: value.float() for name, value in whole(state, group).items()}
    plain.load_state_dict(full)
    other = towers(group, parts, "meta" if parts == "collections" else "cpu")
    assert not any(other.load_state_dict(plain.state_dict()))
    compare(whole(other.state_dict(), group), whole(state, group), 0)


def wrong_names(rank: int, group: dist.ProcessGroup, parts: str) -> None:
    """Names that are missing or too many are the unsharded model's."""
    model = towers(group, parts)
    state = dict(model.state_dict())
    del state["user.over.bias"], state["deep.inner.0.ebc.embedding_bags.films.weight"]
    state["user.over.more"] = torch.zeros(1)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert set(missing) == {"user.over.bias", "deep.inner.0.ebc.embedding_bags.films.weight"}
    assert unexpected == ["user.over.more"]


def saved(rank: int, group: dist.ProcessGroup, parts: str, folder: Path) -> None:
    """`oper.save` and `oper.load` take models with sharded parts, with their optimizers' states and
    deltas; what one way of sharding has saved another one loads."""
    model = towers(group, parts)
    model(batch(0)).sum().backward()  # the same on all ranks, as dense parts are theirs
    oper.save(model, folder / "base", deltas=True)
    model(batch(5)).sum().backward()
    oper.save_delta(model, folder / "delta")
    for way in ("collections", "towers"):
        other = towers(group, way)
        oper.load(other, folder / "delta")
        compare(whole(other.state_dict(), group), whole(model.state_dict(), group), 0)


def wrapped_by_torchrec(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """A part that DistributedModelParallel wraps, whose state dict repeats the path, is named."""
    model: Any = Towers()
    plan = random_plan(0, tables_of(model.user), dist.get_world_size(group))
    model.user = DistributedModelParallel(
        model.user,
        env=ShardingEnv.from_process_group(group),
        plan=oper.torchrec_plan(plan, model.user),
        sharders=[oper.OperEmbeddingBagCollectionSharder()],
    )
    with pytest.raises(OperError, match=r"'user': expected oper\.shard for a part of a model"):
        oper.save(model, folder)


def fully_sharded(rank: int, group: dist.ProcessGroup) -> None:
    """FSDP takes the rest of a model by the remedy that its refusal names, and trains it as
    averaged gradients do."""
    mesh = DeviceMesh.from_group(group, "cpu")
    refused = towers(group, "collections")
    with pytest.raises(OperError, match=r"'users': expected its own parameter.*ignored_params"):
        fully_shard(refused, mesh=mesh)
    trained_as_by_hand(rank, group, _fully_sharded)


def data_parallel(rank: int, group: dist.ProcessGroup) -> None:
    """DistributedDataParallel takes the rest of a model, as the documents say."""
    trained_as_by_hand(rank, group, _data_parallel)


def trained_as_by_hand(
    rank: int, group: dist.ProcessGroup, wrap: Callable[[nn.Module, dist.ProcessGroup], Any]
) -> None:
    """A model whose dense part `wrap` makes parallel trains as averaged gradients do."""
    losses: list[list[torch.Tensor]] = []
    for by_hand in (False, True):
        model: Any = towers(group, "collections")
        model = model if by_hand else wrap(model, group)
        dense = [p for p in model.parameters() if len(p)]
        optimizer = torch.optim.SGD(dense, lr=0.1)
        losses.append([])
        for step in range(3):
            optimizer.zero_grad()
            loss = model(batch(10 * step + rank)).square().mean()
            loss.backward()
            for parameter in dense if by_hand else ():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= dist.get_world_size(group)
            optimizer.step()
            losses[-1].append(loss.detach())
    torch.testing.assert_close(losses[0], losses[1])


def _data_parallel(model: nn.Module, group: dist.ProcessGroup) -> Any:
    tables = [n for n, p in model.named_parameters() if hasattr(p, "_in_backward_optimizers")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, tables)
    return DistributedDataParallel(model, process_group=group)


def _fully_sharded(model: nn.Module, group: dist.ProcessGroup) -> Any:
    ignored = {
        p
        for part in model.modules()
        if isinstance(part, ShardedModel)
        for p in part.fused_optimizer.params.values()
    }
    return fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), ignored_params=ignored)
