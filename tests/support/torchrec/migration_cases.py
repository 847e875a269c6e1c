"""What ranks do in tests of models whose rows migrate."""

import contextlib
import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import oper
from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.scheduler.cache_settings import CacheSettings
from oper.tables.table import tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import Model, batch, plan_tables
from tests.support.torchrec.ranks import (
    all_optimizers,
    engines,
    semi_synchronous_on_cpus,
    sharded,
    train_step,
    whole_model,
)


def plans(
    group: dist.ProcessGroup, number: int, copies: float = 0.3, cached: bool = False
) -> list[Plan]:
    """Plans of the model's tables, of which `sharded` takes one like the first; where they are
    `cached`, all tables are in the tier."""
    tables, ranks = tables_of(Model("meta")), dist.get_world_size(group)
    tier = tuple(range(len(tables))) if cached else ()
    return [random_plan(n, tables, ranks, replicated=copies, tier=tier) for n in range(number)]


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Values of whole models are equal, bit for bit."""
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def moved_in_a_pipeline(rank: int, group: dist.ProcessGroup, name: str, **options: Any) -> int:
    """A pipeline of TorchRec's trains a model whose rows migrate there and back as it trains one
    whose rows stay; the steps that were made."""
    batches = [batch(100 * step + rank) for step in range(14)]
    back, there = plans(group, 2, cached="cache" in options)
    results = []
    steps = 0
    for moves in (False, True):
        model, optimizer = sharded(group, "adam", **options)
        pipeline = getattr(train_pipelines, name)(model, optimizer, torch.device("cpu"))
        iterator, outputs, migration = iter(batches), [], None
        semi_synchronous = name == "TrainPipelineSemiSync"
        with semi_synchronous_on_cpus() if semi_synchronous else contextlib.nullcontext():
            for step in range(len(batches)):
                found = pipeline.progress(iterator)
                outputs.append(found[1] if isinstance(found, tuple) else found)
                if moves and step in (2, 8):
                    migration = oper.migrate(
                        model, there if step == 2 else back, bytes_per_step=3000
                    )
                if migration is not None:
                    before = migration.steps_made
                    migration.step()
                    steps += migration.steps_made - before
        if migration is not None:
            migration.finish()
        results.append((outputs, whole_model(model, group)))
    (still, expected), (moved, found) = results
    for a, b in zip(moved, still, strict=True):
        assert torch.equal(a, b)
    assert_same_bits(found, expected)
    return steps


def moved_between_accumulated_steps(rank: int, group: dist.ProcessGroup) -> None:
    """Rows do not move while gradients are held back, and do after the step that takes them."""
    results = []
    for moves in (False, True):
        model, optimizer = sharded(group, "adagrad")
        migration = oper.migrate(model, plans(group, 2)[1], bytes_per_step=500)
        for step in range(6):
            optimizer.zero_grad()
            with oper.accumulate(model):
                model(batch(9 * step + rank))[0].backward()
            if moves and not migration.done:
                with pytest.raises(OperError, match="gradients of earlier batches are held back"):
                    migration.step()
            model(batch(9 * step + rank + 50))[0].backward()
            optimizer.step()
            if moves:
                migration.step()
        results.append(whole_model(model, group))
        assert (migration.steps_made > 0) == moves
    assert_same_bits(results[1], results[0])


def summed_as_they_come(
    rank: int, group: dist.ProcessGroup, sync: str, between: str
) -> dict[str, Any]:
    """The table that ranks have trained with caches of eight rows. All train six rows at once,
    whose gradients wait in the caches; then the last rank's leave its cache first, unless rows
    `migrate`, or are all pushed for an `evaluate`, before."""
    torch.manual_seed(7)
    config = EmbeddingBagConfig(60, 64, name="t", feature_names=["t"])
    module = torch.nn.ModuleList([EmbeddingBagCollection([config])])
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    here, there = (random_plan(n, tables_of(module), group.size(), tier=(0,)) for n in range(2))
    cache = CacheSettings(f"{8 * 64 * 4}B", sync)
    model = oper.shard(module, here, env=ShardingEnv.from_process_group(group), cache=cache)

    def output(ids: list[int]) -> torch.Tensor:
        lengths = torch.ones(len(ids), dtype=torch.int32)
        found: torch.Tensor = model.module[0](
            KeyedJaggedTensor(["t"], torch.tensor(ids), lengths=lengths)
        ).values()
        return found

    def train(ids: list[int], seed: int) -> None:
        random = torch.Generator().manual_seed(10 * seed + rank)
        found = output(ids)
        found.backward(torch.randn(found.shape, generator=random))

    train([0, 1, 2, 3, 4, 5], 1)
    if between == "migrate":
        migration = oper.migrate(model, there)
        assert migration.rows > 20
        migration.finish()
    elif between == "evaluate":
        with torch.no_grad():
            output([rank])
    train([*range(20, 28)] if rank == group.size() - 1 else [30 + rank], 2)
    train([40 + rank], 3)
    return whole_model(model, group)


def saved_and_loaded_on_the_way(
    rank: int, group: dist.ProcessGroup, folder: str, **options: Any
) -> None:
    """State dicts are those of a model that stayed, in the midst of a migration too, and can be
    loaded there."""
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    model, optimizer = sharded(group, "adam", **options)
    plain, plain_optimizer = sharded(group, "adam", **options)
    there = plans(group, 2, cached="cache" in options)[1]
    migration = oper.migrate(model, there, bytes_per_step=500)
    step = 0
    while migration.step():
        train_step(model, optimizer, batch(7 * step + rank))
        train_step(plain, plain_optimizer, batch(7 * step + rank))
        assert_same_bits(whole_model(model, group), whole_model(plain, group))
        step += 1
        if step == 2:
            save(model.state_dict(), checkpoint_id=folder, process_group=group)
        if step == 4:
            for each in (model, plain):
                state = each.state_dict()
                load(state, checkpoint_id=folder, process_group=group)
    assert step > 4
    assert_same_bits(whole_model(model, group), whole_model(plain, group))


def mistaken(rank: int, group: dist.ProcessGroup) -> None:
    """What cannot be done is refused on all ranks, and the model goes on as it was."""
    model, optimizer = sharded(group, "sgd")
    plain, plain_optimizer = sharded(group, "sgd")
    tables, ranks = tables_of(Model("meta")), dist.get_world_size(group)
    good = plans(group, 4)
    refused = {
        "the plan to migrate to .*: expected the same": good[1 + rank % 2],
        f"runs on {ranks} ranks": random_plan(1, tables, ranks + 1),
        "has mode inference": random_plan(1, tables, ranks, mode="inference"),
        "has fetch distinct": random_plan(1, tables, ranks, fetch="distinct"),
        "has tables in the tier mean, wide": random_plan(1, tables, ranks, tier=(0, 1)),
        "the plan has no such table": random_plan(1, tables[1:], ranks),
        "and the plan 51 of dim": random_plan(1, (oper.Table("wide", 51, 16), *tables[1:]), ranks),
    }
    for message, plan in refused.items():
        with pytest.raises(OperError, match=message):
            oper.migrate(model, plan)
    with pytest.raises(OperError, match="bytes_per_step: expected at least 1, got"):
        oper.migrate(model, good[1], bytes_per_step=0)
    with pytest.raises(OperError, match="no collection that OPER sharded"):
        oper.migrate(Model("cpu"), good[1])
    with pytest.raises(OperError, match="not-there: no such folder"):  # on one rank alone
        oper.migrate(model, "not-there" if rank == 1 else good[1])
    migration = oper.migrate(model, good[1], bytes_per_step=2000)
    with pytest.raises(OperError, match="on their way to a plan already"):
        oper.migrate(model, good[2])
    for step in range(3):
        migration.step()
        with pytest.raises(OperError, match="on their way to a plan already"):
            oper.migrate(model, good[2])
        for each, of_it in ((model, optimizer), (plain, plain_optimizer)):
            train_step(each, of_it, batch(5 * step + rank))
    migration.finish()
    assert not migration.step()
    assert repr(migration).endswith(f"{migration.steps} of {migration.steps} steps>")
    oper.migrate(model, good[2], bytes_per_step=1 << 70).finish()
    again = oper.migrate(model, replace(good[2], profile="another"))
    assert (again.rows, again.steps, again.done) == (0, 0, True)
    assert {engine.plan.profile for engine in engines(model)} == {"another"}
    assert_same_bits(whole_model(model, group), whole_model(plain, group))


def lost_on_the_way(rank: int, group: dist.ProcessGroup) -> None:
    """A migration whose object is gone is taken up again, by asking for the same plan."""
    model, _ = sharded(group, "adam")
    expected, every = whole_model(model, group), plans(group, 3)
    lost = oper.migrate(model, every[1], bytes_per_step=500)
    same = oper.migrate(model, every[1], bytes_per_step=500)  # as where a cell is run twice
    assert (same.steps, same.steps_made) == (lost.steps, 0)
    del same
    steps, moved = lost.steps, 2
    for _ in range(moved):
        lost.step()
    del lost
    with pytest.raises(OperError, match="which is given again for the same plan"):
        oper.migrate(model, every[2])
    again = oper.migrate(model, every[1], bytes_per_step=500)
    assert 0 < again.steps - again.steps_made == steps - moved
    again.finish()
    assert_same_bits(whole_model(model, group), expected)
    assert oper.migrate(model, every[1]).rows == 0
    oper.migrate(model, every[2]).finish()
    assert_same_bits(whole_model(model, group), expected)


def moved_as_it_infers(rank: int, group: dist.ProcessGroup) -> None:
    """Rows that began to move in inference mode move on in training."""
    model, optimizer = sharded(group, "adam")
    plain, plain_optimizer = sharded(group, "adam")
    with torch.inference_mode():
        migration = oper.migrate(model, plans(group, 2)[1], bytes_per_step=2000)
        migration.step()
    while True:
        for each, of_it in ((model, optimizer), (plain, plain_optimizer)):
            train_step(each, of_it, batch(migration.steps_made + rank))
        if not migration.step():
            break
    assert migration.steps > 2
    assert_same_bits(whole_model(model, group), whole_model(plain, group))


def two_models_of_a_plan(rank: int, group: dist.ProcessGroup) -> None:
    """Where one of two models migrates that were sharded by one plan of TorchRec's, the plan and
    the other model stay."""
    first, second = plans(group, 2)
    shared = oper.torchrec_plan(first, Model("meta"))
    sharders = [oper.OperEmbeddingBagCollectionSharder(), oper.OperEmbeddingCollectionSharder()]
    env = ShardingEnv.from_process_group(group)
    moved, stayed = (
        DistributedModelParallel(Model("cpu"), env=env, plan=shared, sharders=sharders)
        for _ in range(2)
    )
    other = replace(second, profile="another")
    migration = oper.migrate(moved, other, bytes_per_step=2000)
    while not migration.done:
        migration.step()
        if len({engine.plan.profile for engine in engines(moved)}) > 1:  # one collection is there
            with pytest.raises(OperError, match="its rows are on their way to another"):
                oper.monitor(moved)
    assert shared.oper_plan is first
    for model, plan in ((moved, other), (stayed, first)):
        with oper.monitor(model, period=None) as monitor:
            assert monitor.plan is plan


def there_and_back(rank: int, group: dist.ProcessGroup) -> tuple[list[int], int]:
    """The most slots of a rank after each of ten migrations between three plans, and the most that
    a rank has in one of the plans."""
    model, _ = sharded(group, "adam")
    expected, every = whole_model(model, group), plans(group, 3)
    sizes = []
    for turn in range(10):
        oper.migrate(model, every[(turn + 1) % 3], bytes_per_step=2000).finish()
        sizes.append(sum(int(engine.heap.slots.max(axis=1).sum()) for engine in engines(model)))
    assert_same_bits(whole_model(model, group), expected)
    return sizes, max(int(plan.layout.slots.max(axis=1).sum()) for plan in every)


def dies_on_the_way(rank: int, group: dist.ProcessGroup) -> str:
    """What the others say where the last rank is gone before a step."""
    model, _ = sharded(group, "sgd", deadline_seconds=60.0)
    migration = oper.migrate(model, plans(group, 2)[1], bytes_per_step=2000)
    migration.step()
    if rank == dist.get_world_size(group) - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(OperError) as found:
        migration.finish()
    return str(found.value)


def does_not_come(rank: int, group: dist.ProcessGroup) -> str:
    """What ranks say of one that trains on where they move rows."""
    model, optimizer = sharded(group, "sgd", deadline_seconds=3.0)
    migration = oper.migrate(model, plans(group, 2)[1], bytes_per_step=2000)
    try:
        if rank == 0:
            train_step(model, optimizer, batch(rank))
        else:
            migration.step()
        train_step(model, optimizer, batch(rank))
    except OperError as error:
        return str(error)
    return "nothing"


def watched_and_moved(rank: int, group: dist.ProcessGroup, folder: str) -> None:
    """From what a monitor counted to a plan, to which rows migrate, and which it judges then; the
    model knows by which plan it runs."""
    tables, ranks = tables_of(Model("meta")), dist.get_world_size(group)
    plan = plan_tables(tables, ranks)
    model = oper.shard(Model("cpu"), plan, env=ShardingEnv.from_process_group(group))
    optimizer = all_optimizers(model)
    with oper.monitor(model, sample_every=1, period=None) as monitor:
        for step in range(12):
            train_step(model, optimizer, batch(31 * step + rank, 64))
        monitor.report()
        profile = monitor.profile()
        if profile is not None:
            oper.replan(plan, profile, 10**9).plan.save(folder)
        dist.barrier(group)
        expected = whole_model(model, group)
        migration = oper.migrate(model, folder)
        assert migration.rows > 0
        migration.finish()
        assert_same_bits(whole_model(model, group), expected)
        monitor.follow(folder)
        train_step(model, optimizer, batch(rank, 64))
        report = monitor.report()
        assert (report is not None) == (rank == 0)
        with pytest.raises(OperError, match="expected a plan for the tables of the monitored plan"):
            monitor.follow(random_plan(1, tables[::-1], ranks))
    with oper.monitor(model, period=None) as again:
        assert again.plan.profile == oper.Plan.load(folder).profile
