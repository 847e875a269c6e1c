"""The DLRM that stages train on one device: 26 tables of 400,000 rows, Zipf ids, one id a bag.

Dense layers are the paper's. Both sides start from the same weights.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import oper
from oper.base.errors import OperError
from oper.profiling.profile import Profile
from oper.tables.table import tables_of
from oper.topology.presets import SERVERS
from oper.topology.topology import Topology
from scripts.gpu_check.lookup_case import zipf_ids

TABLES, DIM = 26, 64
DENSE_FEATURES, DENSE_LAYERS, OVER_LAYERS = 13, [512, 256, DIM], [512, 256, 1]
LEARNING_RATE = 0.01
INPUTS = 4  # batches, which steps take in turn
UNTIL_CAPTURED = 16  # calls of `oper.graph_step`, more than any of these steps needs before capture


@dataclass(frozen=True)
class Sizes:
    """Rows of each table, and samples of a batch."""

    rows: int = 400_000
    batches: tuple[int, ...] = (4_096, 65_536)
    rounds: int = 20


DRY = Sizes(rows=50, batches=(8, 16), rounds=2)


@dataclass(frozen=True)
class Batch:
    """The inputs of one training step."""

    dense: torch.Tensor  # [samples, DENSE_FEATURES]
    ids: KeyedJaggedTensor
    labels: torch.Tensor  # [samples]


def draw_batches(sizes: Sizes, samples: int, place: torch.device) -> list[Batch]:
    """Return INPUTS batches of ids by Zipf's law."""
    random = np.random.default_rng(1)
    keys = [f"f{n}" for n in range(TABLES)]
    lengths = torch.ones(TABLES * samples, dtype=torch.int32)
    drawn = []
    for _ in range(INPUTS):
        ids = zipf_ids(TABLES * samples, sizes.rows, "cpu")
        batch = KeyedJaggedTensor(keys, ids, lengths=lengths)
        batch.length_per_key()  # known to the host, as graphs need
        dense = torch.from_numpy(random.random((samples, DENSE_FEATURES), dtype=np.float32))
        labels = torch.from_numpy(random.integers(0, 2, samples).astype(np.float32))
        drawn.append(Batch(dense.to(place), batch.to(place), labels.to(place)))
    return drawn


def make_collection(sizes: Sizes) -> EmbeddingBagCollection:
    """Return the tables without memory; row-wise Adagrad updates them in the backward."""
    configs = [
        EmbeddingBagConfig(
            name=f"t{n}", num_embeddings=sizes.rows, embedding_dim=DIM, feature_names=[f"f{n}"]
        )
        for n in range(TABLES)
    ]
    made = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    settings = {"lr": LEARNING_RATE, "eps": 1e-8}
    apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), settings)
    return made


def make_dlrm(sizes: Sizes) -> DLRM:
    torch.manual_seed(3)
    return DLRM(make_collection(sizes), DENSE_FEATURES, DENSE_LAYERS, OVER_LAYERS)


def make_plan(module: nn.Module, batches: Sequence[Batch], topology: Topology) -> oper.Plan:
    """Plan the tables for one rank by the accesses of the batches."""
    tables = tables_of(module)
    samples = len(batches[0].labels)
    rows = tables[0].rows
    counts = np.zeros((TABLES, rows), dtype=np.uint32)
    for batch in batches:
        for n, ids in enumerate(batch.ids.values().cpu().view(TABLES, samples).numpy()):
            counts[n] += np.bincount(ids, minlength=rows).astype(np.uint32)
    profile = Profile(
        tables, samples * len(batches), counts.ravel(), counts[:0].ravel(), (False,) * TABLES
    )
    return oper.make_plan(profile, topology, oper.Workload("training", batch_size=samples))


def topology_of(device: Any) -> Topology:
    """Return one rank of the preset that has this device; in a dry run, one CPU rank.

    Raise OperError if no preset has such a device.
    """
    if device.torch_device.type == "cpu":
        return Topology.load("cpu:1")
    for preset in SERVERS:
        kind = preset.partition("-")[2]
        if re.search(rf"\b{kind}\b", device.name, re.IGNORECASE):
            return first_rank(Topology.load(preset))
    raise OperError(f"{device.name}: expected a device of one of {', '.join(SERVERS)}")


def first_rank(topology: Topology) -> Topology:
    """Return a topology of the first rank alone."""
    memory, host = topology.device_memory_bytes, topology.host_memory_bytes
    return replace(
        topology,
        name=f"{topology.name}, one device",
        node_of=(0,),
        link_cost=topology.link_cost[:1, :1],
        device_memory_bytes=memory and memory[:1],
        host_memory_bytes=host and host[:1],
        host_bandwidth=topology.host_bandwidth and topology.host_bandwidth[:1],
    )


@contextmanager
def process_group(place: torch.device) -> Iterator[Any]:
    """Provide a process group of one rank, for DistributedModelParallel."""
    backend = "cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
