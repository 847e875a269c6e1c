"""A small model with TorchRec collections, its batches, its plans, and the training of it on one
process without any of our code, to compare with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.streamable import Pipelineable

from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import make_placement
from oper.profiling.profile import Profile
from oper.tables.table import Table
from oper.topology.latency import Latency
from oper.topology.topology import Topology

SAMPLES = 6  # of a rank
MOMENTUM = 0.8  # of SGD that has one

# The optimizer of all tables, or that of each by its name; "none" are frozen.
Kind = str | Mapping[str, str]

BAGS = (
    EmbeddingBagConfig(name="wide", num_embeddings=50, embedding_dim=16, feature_names=["f0"]),
    EmbeddingBagConfig(
        name="mean",
        num_embeddings=30,
        embedding_dim=8,
        feature_names=["f1", "f2"],
        pooling=PoolingType.MEAN,
    ),
    # Fewer rows than ranks, and a feature that it shares with the first table.
    EmbeddingBagConfig(name="tiny", num_embeddings=1, embedding_dim=4, feature_names=["f3"]),
    EmbeddingBagConfig(name="other", num_embeddings=50, embedding_dim=8, feature_names=["f0"]),
)
WEIGHTED = (
    EmbeddingBagConfig(name="weighted", num_embeddings=20, embedding_dim=8, feature_names=["g0"]),
)
SEQUENCES = (
    EmbeddingConfig(name="seen", num_embeddings=40, embedding_dim=8, feature_names=["s0", "s1"]),
    EmbeddingConfig(name="sorts", num_embeddings=3, embedding_dim=8, feature_names=["s0"]),
)
TABLES = tuple(config.name for config in (*BAGS, *WEIGHTED, *SEQUENCES))
# Features with fewest ids that all of their tables have.
ROWS = {"f0": 50, "f1": 30, "f2": 30, "f3": 1, "g0": 20, "s0": 3, "s1": 40}
OUTPUT = 16 + 8 + 8 + 4 + 8 + 8


class Over(nn.Module):
    """What becomes of the rows: a loss and, of each sample, a value that depends on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(OUTPUT, 1)

    def forward(self, bags: Any, weighted: Any, sequences: Any) -> tuple[torch.Tensor, ...]:
        """The loss of a rank, and values [samples]."""
        # By key: TorchRec's own sharding may order them in another way.
        by_key = bags.to_dict() | weighted.to_dict()
        pooled = self.linear(torch.cat([by_key[key] for key in sorted(by_key)], dim=1)).squeeze(1)
        for _, jagged in sorted(sequences.items()):
            bag = torch.repeat_interleave(
                torch.arange(len(pooled), device=pooled.device), jagged.lengths()
            )
            marked = jagged.values().square().sum(dim=1) * (1 + jagged.weights())
            pooled = pooled.index_add(0, bag, marked)
        # Its gradient is bounded, so that large learning rates do not explode.
        return (1 + pooled.square()).sqrt().sum() / 10, pooled


class Model(nn.Module):
    """Bags, weighted bags and sequences under one linear layer."""

    def __init__(self, device: str, data_type: DataType = DataType.FP32) -> None:
        super().__init__()
        torch.manual_seed(7)
        for config in (*BAGS, *WEIGHTED, *SEQUENCES):
            config.data_type = data_type
        place = torch.device(device)
        self.bags = EmbeddingBagCollection(list(BAGS), device=place)
        self.weighted = EmbeddingBagCollection(list(WEIGHTED), is_weighted=True, device=place)
        self.sequences = EmbeddingCollection(list(SEQUENCES), device=place, need_indices=True)
        torch.manual_seed(8)
        self.over = Over()

    def forward(self, inputs: "Inputs") -> tuple[torch.Tensor, ...]:
        """The loss of a rank, and values [samples]."""
        return self.over(
            self.bags(inputs.ids), self.weighted(inputs.weighted_ids), self.sequences(inputs.ids)
        )


@dataclass
class Inputs(Pipelineable):
    """A batch, as TorchRec's pipelines want it."""

    ids: KeyedJaggedTensor
    weighted_ids: KeyedJaggedTensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Inputs":
        """Itself, on another device."""
        return Inputs(self.ids.to(device), self.weighted_ids.to(device))

    def record_stream(self, stream: Any) -> None:
        """Nothing is on another stream."""

    def pin_memory(self) -> "Inputs":
        """Itself."""
        return self

    def of(self, feature: str) -> torch.Tensor:
        """The ids of a feature."""
        found = self.weighted_ids if feature in self.weighted_ids.keys() else self.ids  # noqa: SIM118
        return found[feature].values()


def batch(
    seed: int, samples: int = SAMPLES, order: int = 0, dtype: torch.dtype = torch.int64
) -> Inputs:
    """Bags of 0 to 3 ids, Zipf-like, features in an order that is not the tables', one that no
    table has among them. TorchRec's modules want one order in all batches."""
    random = np.random.default_rng(seed)
    keys = [key for key in ROWS if key != "g0"] + ["unused"]
    np.random.default_rng(order).shuffle(keys)
    return Inputs(
        _jagged(random, keys, samples, dtype), _jagged(random, ["g0"], samples, dtype, True)
    )


def _jagged(
    random: np.random.Generator,
    keys: list[str],
    samples: int,
    dtype: torch.dtype,
    weighted: bool = False,
) -> KeyedJaggedTensor:
    lengths = random.integers(0, 4, (len(keys), samples))
    ids = [
        (random.zipf(1.4, n) - 1) % ROWS.get(key, 9)
        for key, n in zip(keys, lengths.sum(axis=1), strict=True)
    ]
    values = torch.from_numpy(np.concatenate(ids)).to(dtype)
    weights = torch.from_numpy(random.uniform(0.5, 1.5, len(values)).astype(np.float32))
    return KeyedJaggedTensor(
        keys=keys,
        values=values,
        lengths=torch.from_numpy(lengths.ravel()).to(dtype),
        weights=weights if weighted else None,
    )


def plan_tables(tables: Sequence[Table], ranks: int, mode: Any = "training") -> Plan:
    """What the planner makes of tables and made-up counts; with replicas, as if ranks were
    linked."""
    random = np.random.default_rng(0)
    rows = sum(table.rows for table in tables)
    counts = (random.zipf(1.3, rows) % 4000).astype(np.uint32)
    bagged = (False,) * len(tables)
    profile = Profile(tuple(tables), 10_000, counts, np.zeros(0, np.uint32), bagged)
    latency = Latency.of_hops(2e-6)
    topology = replace(Topology.load(f"cpu:{ranks}"), memory=(), latency=latency)
    workload = Workload(mode, "raw", 4096 * ranks)
    settings = PlanSettings(extra_memory=0.2, threshold=0.05, dob=0.5)
    plan = assemble(make_placement(profile, topology, workload, settings))
    assert ranks == 1 or plan.replica_accesses > 0
    return plan


def embedding_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The tables of an unsharded model by their names in state dicts."""
    return {k: p for k, p in model.named_parameters() if "embedding" in k}


def kind_of(kind: Kind, key: str) -> str:
    """The optimizer of the table whose weight has this key in state dicts."""
    return kind if isinstance(kind, str) else kind[key.split(".")[-2]]


class Reference:
    """The model on one process: gradients by autograd, and each optimizer written out, on the rows
    that were accessed.

    Ranks' gradients are averaged.
    """

    def __init__(self, model: nn.Module, kind: Kind, lr: float, dense_lr: float) -> None:
        self.model, self.kind, self.lr, self.dense_lr = model, kind, lr, dense_lr
        self.state: dict[str, dict[str, torch.Tensor]] = {}
        self.steps = 0

    def step(self, batches: Sequence[Inputs], ranks: int | None = None) -> None:
        """One step on the batches of all ranks, which may have had several each."""
        self.model.zero_grad()
        losses = [self.model(inputs)[0] for inputs in batches]
        torch.stack(losses).sum().div(ranks or len(batches)).backward()
        touched = self._touched(batches)
        self.steps += 1
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.grad is None:
                    continue
                if name not in embedding_weights(self.model):
                    weight.sub_(self.dense_lr * weight.grad)
                    continue
                if kind_of(self.kind, name) == "none":
                    continue
                rows = touched[name.split(".")[-2]]
                weight[rows] = weight[rows] - self.lr * self._direction(name, weight, rows)

    def _direction(self, name: str, weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert weight.grad is not None
        grad, kind = weight.grad[rows], kind_of(self.kind, name)
        state = self.state.setdefault(name, {})
        if kind == "sgd":
            return grad
        if kind in ("adagrad", "rowwise_adagrad"):
            wide = kind == "adagrad"
            shape = weight.shape if wide else weight.shape[:1]
            total = state.setdefault("momentum1", torch.zeros(shape))
            total[rows] += grad.square() if wide else grad.square().mean(dim=1)
            root = total[rows].sqrt() + 1e-8
            return grad / (root if wide else root[:, None])
        first = state.setdefault("momentum1", torch.zeros(weight.shape))
        if kind == "momentum_sgd":
            first[rows] = MOMENTUM * first[rows] + grad
            return first[rows]
        wide = kind == "adam"
        shape = weight.shape if wide else weight.shape[:1]
        second = state.setdefault("exp_avg_sq", torch.zeros(shape))
        first[rows] = 0.9 * first[rows] + 0.1 * grad
        squares = grad.square() if wide else grad.square().mean(dim=1)
        second[rows] = 0.999 * second[rows] + 0.001 * squares
        mean = first[rows] / (1 - 0.9**self.steps)
        root = (second[rows] / (1 - 0.999**self.steps)).sqrt() + 1e-8
        return mean / (root if wide else root[:, None])

    def _touched(self, batches: Sequence[Inputs]) -> dict[str, torch.Tensor]:
        """The rows of each table that any bag names."""
        return {
            config.name: torch.cat(
                [b.of(f).long() for b in batches for f in config.feature_names]
            ).unique()
            for config in (*BAGS, *WEIGHTED, *SEQUENCES)
        }
