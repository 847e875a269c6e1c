"""A log read by ranks under a plan, with the runtime's counters; and what a plan says of the same.

The log has plain features, one with bags (some empty, ids repeat), and a table that two features
share. With `drift`, popularity moves to other rows every few hundred samples, so that equal ids
crowd together in time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from oper.logs import Batch, read
from oper.plan.address_map import AddressMap, unpack
from oper.plan.layout import LOCAL
from oper.plan.plan import Plan

RANKS = 3
SAMPLES = 12_000
BATCH = 300  # over all ranks
STEPS = SAMPLES // BATCH
TABLES = """
- {name: user, rows: 1500, dim: 8, optimizer: sgd}
- {name: item, rows: 400, dim: 16, optimizer: sgd, features: [seen, bought]}
- {name: word, rows: 900, dim: 8, optimizer: sgd}
"""
# Links so slow, and latency so small, that replicas pay even on a batch of this size.
TOPOLOGY = """
name: slow-links
node_of: [0, 0, 0]
bandwidth: {local: 4.0e+9, same_node: 1.0e+8}
allreduce_bandwidth: 3.0e+9
latency_seconds: 1.0e-9
memory: shared
"""


def write_log(folder: Path, drift: bool = False) -> Path:
    """The log, and beside it `tables.yaml` and `topology.yaml`."""
    random = np.random.default_rng(5)

    def ids(rows: int, count: NDArray[Any]) -> NDArray[np.int64]:
        """Random ids, as many for each sample as `count` says."""
        sample = np.repeat(np.arange(SAMPLES), count)
        drawn = random.zipf(1.2, len(sample)) - 1
        moved = sample // 400 * 37 if drift else 0
        return (drawn * 13 + moved) % rows  # 13 is prime to all the tables' rows

    one, few = np.ones(SAMPLES, dtype=np.int64), random.integers(0, 5, SAMPLES)
    words = pa.array(ids(900, few))
    columns = {
        "user": ids(1500, one),
        "seen": ids(400, one),
        "bought": ids(400, one),
        "word": pa.ListArray.from_arrays(pa.array(np.cumsum([0, *few]), pa.int32()), words),
    }
    log = folder / "log.parquet"
    pq.write_table(pa.table(columns), log)
    (folder / "tables.yaml").write_text(TABLES, encoding="utf-8")
    (folder / "topology.yaml").write_text(TOPOLOGY, encoding="utf-8")
    return log


def parts(log: Path, plan: Plan, rank: int, whole: bool) -> Iterator[Batch]:
    """What a rank reads: consecutive parts of global batches, or `whole`, a whole part of the log
    of its own, in batches of the same size."""
    size = BATCH // RANKS
    for number, batch in enumerate(read(log, plan.tables, batch_size=size)):
        if (number // STEPS if whole else number % RANKS) == rank:
            yield batch


def count(rank: int, group: Any, log: Path, folder: Path, whole: bool) -> dict[str, Any]:
    """The counters of a rank that trained on its parts of the log, summed over two collections,
    both with a table of dim 8, of which each has its part of the plan."""
    from torch import nn
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    import oper

    plan = Plan.load(folder)
    configs = [
        EmbeddingBagConfig(
            name=t.name,
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            feature_names=list(t.columns),
        )
        for t in plan.tables
    ]
    meta = torch.device("meta")
    module = nn.ModuleList(
        [
            EmbeddingBagCollection(configs[:2], device=meta),
            EmbeddingBagCollection(configs[2:], device=meta),
        ]
    )
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = oper.shard(module, plan, env=ShardingEnv.from_process_group(group))
    for batch in parts(log, plan, rank, whole):
        ids = batch.to_kjt()
        sum(collection(ids).values().sum() for collection in model.module).backward()
    counters = [
        {name: np.array(value) for name, value in found.items()}
        for found in oper.counters(model).values()
    ]
    return {name: sum(found[name] for found in counters) for name in counters[0]}


def owners(plan: Plan) -> list[NDArray[np.int64]]:
    """The rank that alone holds each row, for each table, -1 for rows with copies."""
    maps = [AddressMap.of(plan, rank) for rank in range(plan.ranks)]
    found = []
    for number, table in enumerate(plan.tables):
        every = torch.arange(table.rows)
        fields = torch.stack([unpack(m.translate(number, every))[0] for m in maps])
        held = (fields == LOCAL).numpy()
        found.append(np.where(held.sum(axis=0) == 1, held.argmax(axis=0), -1))
    return found


def accesses_by_sample(log: Path, plan: Plan) -> NDArray[np.int64]:
    """How often each sample of the log reads rows that each rank alone holds, [N, M]."""
    owner, row = owners(plan), 0
    table_of = {name: n for n, table in enumerate(plan.tables) for name in table.columns}
    found = np.zeros((SAMPLES, plan.ranks), dtype=np.int64)
    for batch in read(log, plan.tables):
        for name, ids in batch.features.items():
            sample = row + np.repeat(np.arange(batch.samples), np.diff(ids.offsets()))
            of = owner[table_of[name]][ids.values]
            np.add.at(found, (sample[of >= 0], of[of >= 0]), 1)
        row += batch.samples
    return found
