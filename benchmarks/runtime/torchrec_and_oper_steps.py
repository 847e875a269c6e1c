"""The two sides of a training step, TorchRec's shardings and OPER, as one function of a batch each.

TorchRec 1.8 on CPU: `planned` is its own planner's choice; table-, row- and column-wise are one
sharding for all tables. Its stock sharder does not offer row-wise on CPU; its reduce-scatter over
gloo is 1.5-6 times slower there than an all_to_all and a sum would be. Column-wise cuts a table
into as many shards as there are ranks, of 4 columns or more.
"""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import oper
from benchmarks.runtime.step_inputs import Cell
from oper.tables.table import Table
from oper.torchrec.sharded_collections import OperShardedEmbeddingBagCollection as ShardedCollection

SHARDINGS = ("planned", "table_wise", "row_wise", "column_wise")
OPTIMIZERS = {"sgd": torch.optim.SGD, "rowwise_adagrad": RowWiseAdagrad}
LEARNING_RATE = 0.01
AROUND = ("embedding_lookup", "embedding_backward")  # operators that only call others
DENSE_FEATURES = 13
DENSE_LAYERS, OVER_LAYERS = (512, 256), (512, 256, 1)  # the paper's; the last dense one is the dim

Step = Callable[[KeyedJaggedTensor], object]


class OnlySharding(EmbeddingBagCollectionSharder):
    """TorchRec's sharder with one sharding, on CPU too."""

    def __init__(self, sharding: str) -> None:
        super().__init__()
        self._only = sharding

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self._only]


def quiet() -> None:
    """Leave out what torch and TorchRec warn of in their own calls, on every rank."""
    warnings.filterwarnings("ignore", module="torch")
    for name in (None, "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)


def make_collection(tables: Sequence[Table]) -> EmbeddingBagCollection:
    """The tables as an EmbeddingBagCollection without memory, its optimizer applied in backward."""
    configs = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.rows,
            embedding_dim=table.dim,
            feature_names=list(table.columns),
        )
        for table in tables
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    optimizer = OPTIMIZERS[tables[0].optimizer]
    apply_optimizer_in_backward(optimizer, collection.parameters(), {"lr": LEARNING_RATE})
    return collection


def make_module(tables: Sequence[Table], what: str) -> nn.Module:
    """The unsharded module of a cell: the collection, or the DLRM around it."""
    collection = make_collection(tables)
    if what != "dlrm":
        return collection
    return DLRM(
        collection,
        dense_in_features=DENSE_FEATURES,
        dense_arch_layer_sizes=[*DENSE_LAYERS, tables[0].dim],
        over_arch_layer_sizes=list(OVER_LAYERS),
    )


def torchrec_model(module: nn.Module, sharding: str, batch: int) -> nn.Module:
    """The module under one of SHARDINGS."""
    ranks = dist.get_world_size()
    sharder, constraints = EmbeddingBagCollectionSharder(), None
    if sharding != "planned":
        sharder = OnlySharding(sharding)
        configs = next(
            m.embedding_bag_configs()
            for m in module.modules()
            if isinstance(m, EmbeddingBagCollection)
        )
        constraints = {
            config.name: ParameterConstraints(min_partition=max(4, config.embedding_dim // ranks))
            for config in configs
        }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks, local_world_size=ranks, compute_device="cpu"),
        batch_size=batch,
        constraints=constraints,
    )
    plan = planner.collective_plan(module, [sharder], dist.group.WORLD)
    return DistributedModelParallel(
        module, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )


def oper_model(module: nn.Module, plan: Path, apart: bool = False) -> nn.Module:
    """The module under OPER's plan; `apart`: each rank is a node, and they talk over loopback."""
    nodes = range(dist.get_world_size()) if apart else None
    return oper.shard(module, oper.Plan.load(plan), nodes=nodes)


def step_of(model: nn.Module, cell: Cell, gradient: torch.Tensor) -> Step:
    """One iteration on a batch: forward, and in training backward from `gradient`, so that no loss
    is timed, with all updates."""
    model.train(cell.training)
    forward = _forward(model, cell)
    if not cell.training:
        return torch.no_grad()(forward)
    # What no table's optimizer updates in backward: layers, and TorchRec's data-parallel tables.
    rest = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    optimizer = OPTIMIZERS[cell.optimizer](rest, lr=LEARNING_RATE) if rest else None

    def train(features: KeyedJaggedTensor) -> None:
        if optimizer is not None:
            optimizer.zero_grad()
        forward(features).backward(gradient)
        if optimizer is not None:
            optimizer.step()

    return train


def _forward(model: nn.Module, cell: Cell) -> Callable[[KeyedJaggedTensor], torch.Tensor]:
    if cell.what != "dlrm":
        return lambda features: model(features).values()
    random = torch.Generator().manual_seed(dist.get_rank())
    dense = torch.randn(cell.batch, DENSE_FEATURES, generator=random)
    return lambda features: model(dense, features)


def fixed_gradient(tables: Sequence[Table], cell: Cell) -> torch.Tensor:
    """Of the output of a cell: the same for every side and batch, another on every rank."""
    columns = 1 if cell.what == "dlrm" else sum(t.dim for t in tables for _ in t.columns)
    random = torch.Generator().manual_seed(dist.get_rank())
    return 1e-3 * torch.randn(cell.batch, columns, generator=random)


def engine_of(model: nn.Module) -> Any:
    """OPER's engine under the one collection of a model."""
    (engine,) = (m.engine for m in model.modules() if isinstance(m, ShardedCollection))
    return engine


def native_step(model: nn.Module, gradient: torch.Tensor) -> Step:
    """OPER's step without autograd and TorchRec around it: what there is to be saved."""
    engine, flat = engine_of(model), gradient.flatten()

    def train(features: KeyedJaggedTensor) -> None:
        batch = engine.prepare(features)
        engine.training_step.forward(batch)
        engine.training_step.backward(batch, flat, False)

    return train


def profile_phases(step: Step, batches: Sequence[KeyedJaggedTensor]) -> dict[str, float]:
    """Milliseconds of a step on this rank by operator of OPER's, waits for other ranks included;
    `around` is the rest: Python, autograd, TorchRec."""
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        for batch in batches:
            step(batch)
        whole = 1e3 * (time.perf_counter() - start) / len(batches)
    found = {
        event.key.removeprefix("oper::"): event.self_cpu_time_total / 1e3 / len(batches)
        for event in profiler.key_averages()
        if event.key.startswith("oper::")
    }
    found = {name: ms for name, ms in found.items() if name not in AROUND}
    return dict(sorted(found.items(), key=lambda item: -item[1])) | {
        "around": whole - sum(found.values())
    }


def fresh(batches: Sequence[Any], first: int, count: int) -> list[KeyedJaggedTensor]:
    """Batches as a loader hands them over: nothing that a step derives from one is kept in it."""
    taken = (batches[(first + n) % len(batches)] for n in range(count))
    return [KeyedJaggedTensor(keys=b.keys(), values=b.values(), lengths=b.lengths()) for b in taken]
