"""Training on cached rows with samples that a DispatchingLoader dispatched."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

import oper
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.table_io import RowRange
from oper.runtime.tables.optimizer_buckets import EmbeddingTable
from oper.runtime.tables.optimizers import Optimizer
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.training.cached_rows import source_of
from oper.tables.table import Table
from tests.support.runtime.runtime_plans import random_plan

TABLES = (
    Table("a", 300, 8, "fp32", "sgd", "sum", ("a",)),
    Table("b", 150, 8, "fp32", "sgd", "sum", ("b",)),
)
SAMPLES, STEPS, RATE = 8, 12, 0.5


def log_of(ranks: int) -> np.ndarray:
    """Rows of both tables, int64 [samples, 2]; samples of a kind share rows."""
    random = np.random.default_rng(4)
    kind = random.integers(0, 12, ranks * SAMPLES * STEPS)
    rows = [table.rows for table in TABLES]
    found: np.ndarray = (
        np.stack([kind * 11, kind * 7], 1) + random.zipf(1.6, (len(kind), 2))
    ) % rows
    return found


def gradient_of(ids: torch.Tensor) -> torch.Tensor:
    """The gradient of a sample's output by its rows, so that it goes where the sample does: [n,
    16]."""
    return torch.sin(ids[:, :1] + 3 * ids[:, 1:] + torch.arange(16.0)).float()


def train(
    rank: int, group: Any, policy: str, cache: CacheSettings
) -> tuple[dict[str, list[int]], list[torch.Tensor]]:
    """What was transmitted, and the tables at the end."""
    ranks = dist.get_world_size(group)
    plan = random_plan(4, TABLES, ranks, tier=(0, 1))
    ids = torch.from_numpy(log_of(ranks)).view(STEPS, ranks, SAMPLES, 2)[:, rank]
    own = [
        KeyedJaggedTensor(
            keys=["a", "b"],
            values=of_step.T.flatten(),
            lengths=torch.ones(2 * SAMPLES, dtype=torch.int32),
        )
        for of_step in ids
    ]
    tables = [
        EmbeddingTable(n, (t.name,), "sum", Optimizer("sgd", RATE)) for n, t in enumerate(TABLES)
    ]
    engine = EmbeddingEngine(plan, tables, group=group, make_source=source_of(cache))
    loader = oper.DispatchingLoader(
        own, plan, policy=policy, cache=cache, group=group, deterministic=True,
        links=[1.25e10] * ranks,
    )  # fmt: skip
    for batch in loader:
        out = engine(batch)
        out.backward(gradient_of(batch.values().view(2, -1).T))
    assert engine.source is not None
    counted = engine.source.to_dict()
    found = engine.read_rows([RowRange(n, 0, t.rows) for n, t in enumerate(TABLES)])
    engine.close()
    return counted, found


UNLIKE = (
    Table("a", 300, 8, "fp32", "sgd", "sum", ("a",)),
    Table("b", 300, 16, "fp32", "sgd", "sum", ("b",)),
)
ASKED = ((5, 1), (5, 1), (1, 5), (1, 4), (4, 4), (5, 1))  # rows of a and b of a sample, by step


def unlike_batch(step: int, rank: int, asked: tuple[int, int]) -> KeyedJaggedTensor:
    """A rank's samples, each with so many rows of the two tables."""
    random = np.random.default_rng((step, rank))
    counts = [SAMPLES * count for count in asked]
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.from_numpy(np.concatenate([random.integers(0, 300, n) for n in counts])),
        lengths=torch.tensor(np.repeat(asked, SAMPLES), dtype=torch.int32),
    )


def replay(rank: int, group: Any, policy: str, cache: CacheSettings) -> list[list[Any]]:
    """What the loader's replay and the engine cache at the end, and how their caches are divided,
    where batches ask for tables of two widths in turn."""
    ranks = dist.get_world_size(group)
    plan = random_plan(4, UNLIKE, ranks, tier=(0, 1))
    own = [unlike_batch(step, rank, asked) for step, asked in enumerate(ASKED)]
    tables = [
        EmbeddingTable(n, (t.name,), "sum", Optimizer("sgd", RATE)) for n, t in enumerate(UNLIKE)
    ]
    engine = EmbeddingEngine(plan, tables, group=group, make_source=source_of(cache))
    loader = oper.DispatchingLoader(
        own, plan, policy=policy, cache=cache, group=group, deterministic=True
    )
    for batch in loader:
        engine(batch).sum().backward()
    source: Any = engine.source
    assigner: Any = loader._state.assigner
    found = []
    for caches in (assigner._caches, source._caches):
        addresses, copies = caches.cached()
        order = np.argsort(addresses)
        found.append([caches.capacity.tolist(), addresses[order].tolist(), copies[order].tolist()])
    engine.close()
    return found
