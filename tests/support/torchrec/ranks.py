"""What tests of the TorchRec side share that run on ranks: sharded models, and how they compare."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import PartialRowWiseAdam, in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedTensor

import oper
from oper.runtime.engine import EmbeddingEngine
from oper.scheduler.cache_settings import CacheSettings
from oper.tables.table import tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import (
    MOMENTUM,
    Inputs,
    Kind,
    Model,
    Reference,
    embedding_weights,
    kind_of,
)

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum_sgd": (torch.optim.SGD, {"momentum": MOMENTUM}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rowwise_adagrad": (RowWiseAdagrad, {}),
    "adam": (torch.optim.Adam, {}),
    "partial_rowwise_adam": (PartialRowWiseAdam, {}),
}
LR, DENSE_LR, STEPS = 0.5, 0.05, 3


@contextmanager
def semi_synchronous_on_cpus() -> Iterator[None]:
    """Inside, TorchRec's semi-synchronous pipeline runs on CPUs: it asks CUDA for its stream,
    whatever the device, and from 1.9 on a stream for its device."""
    with (
        patch.object(torch, "get_device_module", lambda *_: torch.cpu),
        patch.object(torch.cpu.Stream, "device", torch.device("cpu"), create=True),
        patch.object(KeyedTensor, "record_stream", lambda *_: None),
    ):
        yield


def put_optimizer(model: nn.Module, kind: Kind) -> None:
    """Have an optimizer train each table; "none" freezes it."""
    for key, weight in embedding_weights(model).items():
        if (of_table := kind_of(kind, key)) == "none":
            weight.requires_grad_(False)
        else:
            optimizer, settings = OPTIMIZERS[of_table]
            _apply_optimizer_in_backward(optimizer, [weight], {"lr": LR} | settings)


def sharded(
    group: dist.ProcessGroup,
    kind: Kind = "sgd",
    copies: float = 0.3,
    device: str = "cpu",
    data_type: DataType = DataType.FP32,
    cache: CacheSettings | None = None,
    fetch: str = "raw",
    **options: Any,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model sharded over a group, with the sharders' `options`, and the optimizer of all. With
    a `cache` all tables are in the tier."""
    model = Model(device, data_type)
    put_optimizer(model, kind)
    tables = tables_of(model)
    tier = tuple(range(len(tables))) if cache else ()
    ranks = dist.get_world_size(group)
    plan = random_plan(0, tables, ranks, replicated=copies, tier=tier, fetch=fetch)
    torch.manual_seed(3 + dist.get_rank(group))
    env = ShardingEnv.from_process_group(group)
    made = oper.shard(model, plan, env=env, cache=cache, **options)
    return made, all_optimizers(made)


def all_optimizers(model: nn.Module) -> CombinedOptimizer:
    """The tables' optimizers, and SGD for the parameters that have none."""
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=DENSE_LR))
    return CombinedOptimizer([model.fused_optimizer, wrapped])


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Inputs) -> torch.Tensor:
    """One step of a script; its output before the step."""
    optimizer.zero_grad()
    loss, output = model(inputs)
    loss.backward()
    optimizer.step()
    return output.detach()


def whole_model(model: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    """Weights and optimizer states by key, as whole tensors."""
    values = dict(model.state_dict())
    for key, states in model.fused_optimizer.state_dict()["state"].items():
        values |= {f"{key}/{name}": value for name, value in states.items()}
    return whole(values, group)


def whole(values: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
    """Values of a state dict as whole tensors, on all ranks of a group: with those of all ranks,
    as TorchRec has optimizer states only where the tables are."""
    mine = {}
    for key, value in values.items():
        shards = [([0] * value.dim(), value.detach())]
        if isinstance(value, ShardedTensor):
            shards = [(s.metadata.shard_offsets, s.tensor.detach()) for s in value.local_shards()]
        mine[key] = (tuple(value.shape), shards)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    result: dict[str, Any] = {}
    for key, (shape, shards) in (pair for found in everyone for pair in found.items()):
        full = result.setdefault(key, torch.full(shape, torch.nan, dtype=torch.float64))
        for offset, part in shards:
            full[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))] = part
    return result


def compare(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Raise AssertionError where any value differs."""
    assert set(found) == set(expected), set(found) ^ set(expected)
    for key, value in expected.items():
        try:
            torch.testing.assert_close(found[key], value.double(), atol=tolerance, rtol=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{key}: {error}") from error


def reference_state(reference: Reference) -> dict[str, Any]:
    """What `whole_model` should find."""
    found = {key: value.detach().clone() for key, value in reference.model.state_dict().items()}
    for key, states in reference.state.items():
        name = key.split(".")[-2]
        found |= {f"{key}/{name}.{state}": value for state, value in states.items()}
        if kind_of(reference.kind, key) in ("adam", "partial_rowwise_adam"):
            found[f"{key}/{name}.iter"] = torch.tensor([reference.steps])
    return found


def stock(kind: Kind, sharding: str, group: dist.ProcessGroup) -> DistributedModelParallel:
    """The model sharded by TorchRec itself: "row_wise" or "table_wise"."""
    model = Model("meta")
    put_optimizer(model, kind)

    class Bags(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [sharding]

    class Sequences(EmbeddingCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [sharding]

    sharders = [Bags(), Sequences()]
    planner = EmbeddingShardingPlanner(Topology(dist.get_world_size(group), "cpu"))
    plan = planner.collective_plan(model, sharders, group)
    env = ShardingEnv.from_process_group(group)
    return DistributedModelParallel(model, env=env, plan=plan, sharders=sharders)


def whole_tables(model: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    """The tables alone."""
    return {k: v for k, v in whole(model.state_dict(), group).items() if "embed" in k}


def engines(model: Any) -> list[EmbeddingEngine]:
    """The engines of a sharded model."""
    return [module.engine for module in model.modules() if hasattr(module, "engine")]
