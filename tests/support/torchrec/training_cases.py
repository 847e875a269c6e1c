"""What ranks do in tests of sharded models: functions that `Ranks` run."""

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import oper
from oper.base.errors import OperError
from oper.profiling.profile import Profile
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.gradient_mailbox import Mailboxes
from oper.runtime.step.apply_gradients import Gradients
from oper.tables.table import tables_of
from oper.torchrec.sharded_collections import OperShardedEmbeddingBagCollection
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec import ranks
from tests.support.torchrec.models import (
    BAGS,
    SAMPLES,
    Model,
    Reference,
    batch,
)
from tests.support.torchrec.ranks import (
    DENSE_LR,
    LR,
    STEPS,
    all_optimizers,
    compare,
    engines,
    reference_state,
    semi_synchronous_on_cpus,
    sharded,
    stock,
    train_step,
    whole,
    whole_model,
    whole_tables,
)


def train_and_compare(
    rank: int,
    group: dist.ProcessGroup,
    kind: str,
    copies: float,
    mutant: str | None = None,
    **options: Any,
) -> float:
    """Outputs, tables and optimizer states against the reference after three steps; how far the
    tables moved."""
    with mutated(mutant):
        ranks = dist.get_world_size(group)
        model, optimizer = sharded(group, kind, copies, **options)
        reference = Reference(Model("cpu"), kind, LR, DENSE_LR)
        start = reference_state(reference)
        pairs = []
        for step in range(STEPS):
            batches = [batch(100 * step + r, SAMPLES + r, order=step) for r in range(ranks)]
            with torch.no_grad():
                _, expected = reference.model(batches[rank])
            pairs.append((train_step(model, optimizer, batches[rank]), expected))
            reference.step(batches)
        found = whole_model(model, group)
    # Collectives are over: a rank that fails now leaves none behind.
    for output, expected in pairs:
        torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)
    compare(found, reference_state(reference), 1e-4)
    return min(float((found[key] - start[key]).abs().max()) for key in start)


@contextmanager
def mutated(mutant: str | None) -> Iterator[None]:
    """Break the engine in one way, or in none."""
    update, read, start = Gradients._update, Mailboxes.read, EmbeddingEngine.__init__

    def two_updates(self: Gradients, *arguments: Any) -> None:
        update(self, *arguments)
        update(self, *arguments)

    def undivided(self: EmbeddingEngine, *arguments: Any, **named: Any) -> None:
        start(self, *arguments, **named | {"gradient_scale": 1.0})

    changed: dict[str, tuple[Any, str, Any]] = {
        "no update": (Gradients, "_update", lambda *_: None),
        "two updates": (Gradients, "_update", two_updates),
        "no division": (EmbeddingEngine, "__init__", undivided),
        # An owner takes its own gradients for everyone's.
        "wrong exchange": (Mailboxes, "read", lambda self, _: read(self, self._rank)),
    }
    if mutant is None:
        yield
    else:
        with patch.object(*changed[mutant]):
            yield


def pipelined(rank: int, group: dist.ProcessGroup, name: str, **options: Any) -> None:
    """A pipeline of TorchRec's trains (or reads, in evaluation) as a plain loop does."""
    batches = [batch(100 * step + rank) for step in range(5)]
    model, optimizer = sharded(group, "rowwise_adagrad", **options)
    plain, plain_optimizer = sharded(group, "rowwise_adagrad", **options)
    evaluates = name.startswith("Eval")
    if evaluates:
        model.eval()
        plain.eval()
    made = getattr(train_pipelines, name)(model, optimizer, torch.device("cpu"))
    with torch.set_grad_enabled(not evaluates):
        iterator = iter(batches)
        found = [made.progress(iterator) for _ in batches]
        with pytest.raises(StopIteration):
            made.progress(iterator)
        if evaluates:
            expected = [plain(inputs) for inputs in batches]
        else:
            expected = [(0, train_step(plain, plain_optimizer, inputs)) for inputs in batches]
    for output, (_, values) in zip(found, expected, strict=True):
        values_found = output[1] if isinstance(output, tuple) else output
        torch.testing.assert_close(values_found, values, atol=1e-5, rtol=1e-5)
    compare(whole_model(model, group), whole_model(plain, group))


def semi_synchronous(rank: int, group: dist.ProcessGroup, start_batch: int = 0) -> None:
    """TorchRec's semi-synchronous pipeline looks a batch up before the one before it is trained, as
    a plain loop does here that calls the whole model then: dense parameters stay as they are."""
    batches = [batch(100 * step + rank) for step in range(5)]
    with patch.object(ranks, "DENSE_LR", 0.0):
        model, optimizer = sharded(group, "rowwise_adagrad")
        plain, _ = sharded(group, "rowwise_adagrad")
    made = train_pipelines.TrainPipelineSemiSync(
        model, optimizer, torch.device("cpu"), start_batch=start_batch
    )
    iterator = iter(batches)
    with semi_synchronous_on_cpus():
        found = [made.progress(iterator) for _ in batches]
    expected, ahead = [], plain(batches[0])
    for step, inputs in enumerate([*batches[1:], None]):
        (loss, output), early = ahead, step >= start_batch and inputs is not None
        if early:
            ahead = plain(inputs)
        loss.backward()
        plain.fused_optimizer.step()
        expected.append(output.detach())
        if inputs is not None and not early:
            ahead = plain(inputs)
    for output, values in zip(found, expected, strict=True):
        torch.testing.assert_close(output, values, atol=1e-5, rtol=1e-5)
    compare(whole_model(model, group), whole_model(plain, group))


def scheduled(rank: int, group: dist.ProcessGroup) -> None:
    """Learning rates follow the parameter groups, and warm-up stages through them."""
    model, _ = sharded(group)
    fused = model.fused_optimizer
    warmed = WarmupOptimizer(fused, [WarmupStage(WarmupPolicy.LINEAR, 4, 0.25)], lr=LR)
    rates = []
    for _ in range(4):
        train_step(model, warmed, batch(rank))
        (rate,) = {rate for engine in engines(model) for rate in engine.learning_rates}
        rates.append(rate)
    assert rates == [LR * (0.25 + 0.75 * step / 4) for step in range(4)]
    fused.param_groups[0]["lr"] = 0.0
    before = whole_tables(model, group)
    train_step(model, fused, batch(rank))
    after = whole_tables(model, group)
    still = {p for p in after if torch.equal(before[p], after[p])}
    slow = {id(parameter) for parameter in fused.param_groups[0]["params"]}
    held = {key for key, parameter in fused.params.items() if id(parameter) in slow}
    assert held <= still
    assert len(still) < len(after)
    fused.update_hyper_parameters({"lr": 0.125})
    assert {r for engine in engines(model) for r in engine.learning_rates} == {0.125}


def planned_together(rank: int, group: dist.ProcessGroup) -> None:
    """The planner plans on rank 0 for all ranks, and sharders take its plan; what fails there fails
    on all."""
    model, fused = Model("meta"), {"learning_rate": LR}
    tables = tables_of(model)
    counts = np.arange(sum(table.rows for table in tables), dtype=np.uint32)
    profile = Profile(tables, 1000, counts, counts[:0], (False,) * len(tables))
    planner = oper.OperShardingPlanner(profile=profile, batch_size=64)  # for all ranks there are
    sharders = [
        oper.OperEmbeddingBagCollectionSharder(fused_params=fused),
        oper.OperEmbeddingCollectionSharder(fused_params=fused),
    ]
    plan = planner.collective_plan(model, sharders, group)
    env = ShardingEnv.from_process_group(group)
    made = DistributedModelParallel(model, env=env, plan=plan, sharders=sharders)
    assert made.plan is plan
    train_step(made, all_optimizers(made), batch(rank))
    with pytest.raises(OperError, match="no collection that the sharders take"):
        planner.collective_plan(Model("meta"), [], group)


def accumulated(rank: int, group: dist.ProcessGroup) -> None:
    """Gradients of several batches make one step."""
    ranks = dist.get_world_size(group)
    model, optimizer = sharded(group, "adagrad")
    reference = Reference(Model("cpu"), "adagrad", LR, DENSE_LR)
    for step in range(2):
        batches = [
            [batch(9 * step + 3 * r + n, SAMPLES + n) for n in range(3)] for r in range(ranks)
        ]
        optimizer.zero_grad()
        with oper.accumulate(model):
            for inputs in batches[rank][:2]:
                model(inputs)[0].backward()
        model(batches[rank][2])[0].backward()
        optimizer.step()
        reference.step([inputs for of_rank in batches for inputs in of_rank], ranks)
    compare(whole_model(model, group), reference_state(reference), 1e-4)


def parameters(rank: int, group: dist.ProcessGroup) -> None:
    """Names are TorchRec's; dense optimizers, clipping and DistributedDataParallel leave the tables
    alone; copies are those of TorchRec."""
    model, _ = sharded(group, "adagrad")
    other = stock("adagrad", "row_wise", group)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in other.named_parameters())
    assert set(model.state_dict()) == set(Model("meta").state_dict())
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert set(dense) == {"over.linear.weight", "over.linear.bias"}
    assert not [name for name, _ in model.named_buffers()]
    ours, theirs = (m.fused_optimizer.state_dict()["state"] for m in (model, other))
    assert {k: set(v) for k, v in ours.items()} == {k: set(v) for k, v in theirs.items()}
    loss, _ = model(batch(rank))
    loss.backward()
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) > 0
    assert isinstance(model.module.bags, OperShardedEmbeddingBagCollection)
    # As TorchRec's sharded_model_copy does, which needs a torch with NCCL.
    with patch.object(torch.Tensor, "__deepcopy__", lambda tensor, _: tensor):
        assert copy.deepcopy(model.module.bags) is model.module.bags
    with pytest.raises(OperError, match="memory that all ranks share"):
        copy.deepcopy(model.module.bags)
    with pytest.raises(OperError, match=r"cannot be pickled; save a checkpoint of its state_dict"):
        pickle.dumps(model.module.bags)
    model.module.bags.embedding_bags["wide"].weight._in_backward_optimizers[0].zero_grad()


def frozen(rank: int, group: dist.ProcessGroup) -> None:
    """Tables whose parameters need no gradients are not trained, the others are."""
    model, _ = sharded(group, "none")
    optimizer = all_optimizers(model)
    before = whole(model.state_dict(), group)
    train_step(model, optimizer, batch(rank))
    after = whole(model.state_dict(), group)
    still = {key for key in before if torch.equal(before[key], after[key])}
    assert still == {key for key in before if "embedding" in key}
    assert not model.fused_optimizer.state_dict()["state"]
    mixed = Model("cpu")
    mixed.bags.embedding_bags["wide"].weight.requires_grad_(False)
    plan = random_plan(0, tables_of(mixed), dist.get_world_size(group))
    model = oper.shard(mixed, plan, env=ShardingEnv.from_process_group(group))
    before = whole_tables(model, group)
    for _ in range(2):
        train_step(model, all_optimizers(model), batch(rank))
    after = whole_tables(model, group)
    still = {key for key in before if torch.equal(before[key], after[key])}
    assert still == {"bags.embedding_bags.wide.weight"}
    state = {k: set(v) for k, v in model.fused_optimizer.state_dict()["state"].items()}
    assert not any(state.values())


def counted(rank: int, group: dist.ProcessGroup) -> None:
    """Counters of each module."""
    with pytest.raises(OperError, match="no collection that OPER sharded"):
        oper.counters(Model("meta"))
    with pytest.raises(OperError, match="no option 'deadline'; it has bounds, "):
        oper.shard(Model("meta"), random_plan(0, tables_of(Model("meta")), 2), deadline=5)
    model, optimizer = sharded(group)
    inputs = batch(rank)
    train_step(model, optimizer, inputs)
    found = oper.counters(model)
    assert set(found) == {"bags", "weighted", "sequences"}
    features = [f for config in BAGS for f in config.feature_names]
    bags = found["bags"]
    assert bags["accesses"] == sum(len(inputs.of(f)) for f in features)
    assert bags["steps"] == bags["lookups"] == 1


def tensor_dict(rank: int, group: dist.ProcessGroup) -> None:
    """A TensorDict of jagged tensors is read as the KeyedJaggedTensor of them."""
    model, _ = sharded(group)
    ids = batch(rank).ids
    offsets = {key: jagged.offsets() for key, jagged in ids.to_dict().items()}
    content = {
        key: torch.nested.nested_tensor_from_jagged(jagged.values(), offsets[key])
        for key, jagged in ids.to_dict().items()
    }
    given = TensorDict(content, batch_size=[SAMPLES])
    with torch.no_grad():
        expected, found = model.module.bags(ids), model.module.bags(given)
    torch.testing.assert_close(found.values(), expected.values())
    assert found.keys() == expected.keys()


def freed(rank: int, group: dist.ProcessGroup) -> None:
    """The engines, rows and mailboxes are gone with the model, at once."""
    model, optimizer = sharded(group)
    train_step(model, optimizer, batch(rank))
    held: list[weakref.ref[Any]] = [weakref.ref(engine) for engine in engines(model)]
    held += [weakref.ref(engine.heap) for engine in engines(model)]
    held += [weakref.ref(engine.gradients) for engine in engines(model)]
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        assert [reference() for reference in held] == [None] * 9
    finally:
        gc.enable()


def alone() -> None:
    """One process without a process group."""
    model = Model("cpu")
    reference = Reference(Model("cpu"), "sgd", 0.01, DENSE_LR)
    made = oper.shard(model, random_plan(0, tables_of(model), 1))
    optimizer = all_optimizers(made)
    for step in range(STEPS):
        train_step(made, optimizer, batch(step))
        reference.step([batch(step)])
    compare(
        {key: value.double() for key, value in made.state_dict().items()},
        reference_state(reference),
    )
    made.load_state_dict(Model("cpu").state_dict())


def losses_of_different_collections(rank: int, group: dist.ProcessGroup) -> str:
    """Return the error if the loss of rank 1 is of sequences and the losses of others of bags."""
    model, _ = sharded(group, "sgd", deadline_seconds=3.0)
    inputs = batch(rank)
    bags, sequences = model.bags(inputs.ids).values(), model.sequences(inputs.ids)
    first = next(iter(sequences.values())).values()
    loss = first.sum() if rank == 1 else bags.sum()
    with pytest.raises(OperError) as error:
        loss.backward()
    return str(error.value)
