"""What ranks do in tests of the sharders themselves: where plans come from, settings, groups."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torchrec.distributed import comm_ops
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.tables import tables_of
from tests.runtime_plans import random_plan
from tests.torchrec_models import Model, Reference, batch
from tests.torchrec_ranks import (
    DENSE_LR,
    LR,
    compare,
    engines,
    sharded,
    train_step,
    whole_model,
    whole_tables,
)


def from_folder(rank: int, group: dist.ProcessGroup, folder: Path) -> None:
    """Sharders and `shard` take a plan's folder; TorchRec's own planner may plan beside them, and
    nothing of its plan is used."""
    env = ShardingEnv.from_process_group(group)
    torch.manual_seed(5)
    expected = whole_tables(oper.shard(Model("meta"), folder, env=env), group)
    sharders = [
        oper.OperEmbeddingBagCollectionSharder(folder),
        oper.OperEmbeddingCollectionSharder(folder),
    ]
    torch.manual_seed(5)
    made = DistributedModelParallel(Model("meta"), env=env, sharders=sharders)
    assert {engine.plan.profile for engine in engines(made)} == {"made for this test"}
    compare(whole_tables(made, group), expected, 0)


def undivided(rank: int, group: dist.ProcessGroup) -> None:
    """Gradients of tables are summed where TorchRec was told not to divide them."""
    ranks = dist.get_world_size(group)
    with patch.object(comm_ops, "GRADIENT_DIVISION", False):
        model, optimizer = sharded(group)
    reference = Reference(Model("cpu"), "sgd", LR, DENSE_LR)
    batches = [batch(r) for r in range(ranks)]
    train_step(model, optimizer, batches[rank])
    reference.step(batches, ranks=1)
    expected = {k: v.detach() for k, v in reference.model.state_dict().items() if "embed" in k}
    compare(whole_tables(model, group), expected, 1e-4)


def unweighted(rank: int, group: dist.ProcessGroup) -> None:
    """A collection without weights reads none, as when it is not sharded."""
    model, _ = sharded(group)
    ids = batch(rank).ids
    weights = torch.arange(ids.values().numel()).float()
    given = KeyedJaggedTensor(ids.keys(), ids.values(), weights, lengths=ids.lengths())
    with torch.no_grad():
        expected, found = Model("cpu").bags(given), model.module.bags(given)
    torch.testing.assert_close(found.values(), expected.values())


def second_of_two(rank: int, group: dist.ProcessGroup) -> None:
    """A group need not begin with the first rank of all: here it is the second one alone."""
    alone = dist.new_group([1])
    if rank == 0:
        return
    model, optimizer = sharded(alone, "adagrad")
    shards = model.state_dict()["bags.embedding_bags.wide.weight"].metadata().shards_metadata
    assert [shard.placement.rank() for shard in shards] == [1]
    reference = Reference(Model("cpu"), "adagrad", LR, DENSE_LR)
    train_step(model, optimizer, batch(0))
    reference.step([batch(0)])
    found = {
        k: v for k, v in whole_model(model, alone).items() if k in reference.model.state_dict()
    }
    compare(found, reference.model.state_dict(), 1e-4)


def served(rank: int, group: dist.ProcessGroup, dtype: str, tolerance: float) -> None:
    """A plan for inference, some rows on some of the ranks, reads as the unsharded model does."""
    plain = Model("cpu")
    tables = tuple(replace(table, dtype=dtype) for table in tables_of(plain))
    plan = random_plan(0, tables, dist.get_world_size(group), mode="inference")
    made = oper.shard(Model("cpu"), plan, env=ShardingEnv.from_process_group(group)).eval()
    for step in range(2):
        inputs = batch(10 * step + rank)
        with torch.no_grad():
            (_, expected), (_, found) = plain(inputs), made(inputs)
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
