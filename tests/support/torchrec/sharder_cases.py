"""What ranks do in tests of the sharders: plans and parts of them, settings, outputs, groups."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection
from torchrec.distributed import comm_ops
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.base.errors import OperError
from oper.tables.table import tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import (
    BAGS,
    SEQUENCES,
    WEIGHTED,
    Model,
    Reference,
    batch,
    plan_tables,
)
from tests.support.torchrec.ranks import (
    DENSE_LR,
    LR,
    all_optimizers,
    compare,
    engines,
    put_optimizer,
    reference_state,
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


def fused(rank: int, group: dist.ProcessGroup) -> None:
    """Fused parameters of the sharders train tables that have no optimizer of their own."""
    model = Model("cpu")
    plan = random_plan(0, tables_of(model), dist.get_world_size(group))
    settings = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR}
    env = ShardingEnv.from_process_group(group)
    made = oper.shard(model, plan, env=env, fused_params=settings)
    optimizer = all_optimizers(made)
    reference = Reference(Model("cpu"), "rowwise_adagrad", LR, DENSE_LR)
    for step in range(2):
        batches = [batch(10 * step + r) for r in range(dist.get_world_size(group))]
        train_step(made, optimizer, batches[rank])
        reference.step(batches)
    compare(whole_model(made, group), reference_state(reference), 1e-4)


def deterministic(rank: int, group: dist.ProcessGroup) -> None:
    """Equal runs give equal bits, whatever the threads; the dense part is the same in both."""
    found, threads = [], torch.get_num_threads()
    for count in (1, 2):
        made, optimizer = sharded(group, "adam", deterministic=True)
        try:
            torch.set_num_threads(count)
            for step in range(3):
                train_step(made, optimizer, batch(10 * step + rank))
        finally:
            torch.set_num_threads(threads)
        found.append(whole_tables(made, group))
    assert found[0].keys() == found[1].keys()
    for key, table in found[0].items():
        assert torch.equal(table, found[1][key]), key


def outputs(rank: int, group: dist.ProcessGroup) -> None:
    """What comes out has the names, lengths and weights of the unsharded module's."""
    plain, (made, _) = Model("cpu"), sharded(group)
    inputs = batch(rank)
    with torch.no_grad():
        sequences = made.module.sequences(inputs.ids), plain.sequences(inputs.ids)
    for path, ids in (("bags", inputs.ids), ("weighted", inputs.weighted_ids)):
        with torch.no_grad():
            found, expected = getattr(made.module, path)(ids), getattr(plain, path)(ids)
        assert found.keys() == expected.keys()
        assert found.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(found.values(), expected.values())
    found, expected = sequences
    assert set(found.keys()) == set(expected)
    for name, of_name in expected.items():
        torch.testing.assert_close(found[name].values(), of_name.values())
        for part in ("lengths", "offsets", "weights"):
            assert torch.equal(getattr(found[name], part)(), getattr(of_name, part)())


def memory_of_parts(rank: int, group: dist.ProcessGroup) -> None:
    """Each collection has its part of the plan, and all together take what the plan says."""
    ranks = dist.get_world_size(group)
    model = Model("meta")
    put_optimizer(model, "adagrad")
    plan = plan_tables(tables_of(model), ranks)
    made = oper.shard(model, plan, env=ShardingEnv.from_process_group(group))
    parts = [engine.plan.tables for engine in engines(made)]
    names = [[config.name for config in configs] for configs in (BAGS, WEIGHTED, SEQUENCES)]
    assert [[table.name for table in part] for part in parts] == names
    heaps = [engine.heap for engine in engines(made)]
    arenas = [
        arena for h in heaps for w in range(len(h.bases)) for arena in (h.rows(w), h.state(w))
    ]
    assert sum(arena.numel() for arena in arenas) == plan.cost.memory_bytes[rank]
    page = 4096
    assert sum(h.bytes for h in heaps) == sum(-(-a.numel() // page) * page for a in arenas)


def unlike_models(rank: int, group: dist.ProcessGroup) -> None:
    """Ranks whose models have tables or collections in another order are told so, all of them."""
    env = ShardingEnv.from_process_group(group)
    plan = random_plan(0, tables_of(Model("meta")), dist.get_world_size(group))
    swapped = Model("meta")
    if rank:
        swapped.bags, swapped.weighted = swapped.weighted, swapped.bags
    reordered = Model("meta")
    configs = BAGS[::-1] if rank else BAGS
    reordered.bags = EmbeddingBagCollection(list(configs), device=torch.device("meta"))
    for model, what in ((swapped, "plan"), (reordered, "tables and optimizers")):
        with pytest.raises(OperError, match=f"{what}: expected the same on all ranks"):
            oper.shard(model, plan, env=env)


def told_by_another_collection(rank: int, group: dist.ProcessGroup) -> None:
    """A rank that fails in one collection says so to those that wait for it in another."""
    model, _ = sharded(group)
    inputs = batch(rank)
    if rank == 1:
        inputs.ids.values()[0] = 10**8
        with pytest.raises(OperError, match="id 100000000, number 0 of the feature on rank 1"):
            model.module.bags(inputs.ids)
    else:

        def train() -> None:  # told in forward or in backward, whichever is later than the failure
            model.module.weighted(inputs.weighted_ids).values().sum().backward()

        with pytest.raises(OperError, match="rank 1 failed: feature 'f2': id 100000000"):
            train()
    dist.barrier(group)  # the engines live until all were told


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


def warned(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What a rank logs of a model with three collections and another optimizer than the plan's."""
    model = Model("meta")
    plan = random_plan(0, tables_of(model), dist.get_world_size(group))
    adams = replace(plan, tables=tuple(replace(t, optimizer="adam") for t in plan.tables))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper").addHandler(handler)
    try:
        oper.shard(model, adams, env=ShardingEnv.from_process_group(group))
    finally:
        logging.getLogger("oper").removeHandler(handler)
    return said


def compiled(rank: int, group: dist.ProcessGroup, backend: str) -> None:
    """A model under torch.compile trains as it does without, and so do its parts."""
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        made, optimizer = sharded(group, "adagrad")
        run: Any = torch.compile(made, backend=backend) if compiles else made
        outputs = []
        for step in range(3):
            inputs = batch(10 * step + rank, 6 + step, order=step)
            outputs.append(train_step(run, optimizer, inputs))
        bags: Any = made.module.bags
        if compiles:
            bags = torch.compile(bags, backend=backend)
        with torch.no_grad():
            outputs += bags(inputs.ids).to_dict().values()
            engine: Any = made.module.bags.engine
            outputs.append(
                (torch.compile(engine, backend=backend) if compiles else engine)(inputs.ids)
            )
        found.append([*outputs, *whole_model(made, group).values()])
    for eager, by_graphs in zip(*found, strict=True):
        torch.testing.assert_close(by_graphs, eager, atol=1e-6, rtol=1e-6)
