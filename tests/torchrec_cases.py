"""What ranks do in tests of the TorchRec side: functions that a RankPool runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import oper
from oper.errors import OperError
from oper.runtime.embedding import Embedding
from oper.runtime.mailbox import Mailboxes
from oper.tables import tables_of
from tests.runtime_plans import random_plan
from tests.torchrec_models import (
    SAMPLES,
    Inputs,
    Model,
    Reference,
    batch,
    embedding_weights,
)

OPTIMIZERS = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
LR, DENSE_LR, STEPS = 0.5, 0.05, 3


def sharded(
    group: dist.ProcessGroup, kind: str = "sgd", copies: float = 0.3, device: str = "cpu"
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model sharded over a group, and the optimizer of all of it."""
    model = Model(device)
    if kind == "none":
        for weight in embedding_weights(model).values():
            weight.requires_grad_(False)
    else:
        weights = list(embedding_weights(model).values())
        _apply_optimizer_in_backward(OPTIMIZERS[kind], weights, {"lr": LR})
    plan = random_plan(0, tables_of(model), dist.get_world_size(group), replicated=copies)
    torch.manual_seed(3 + dist.get_rank(group))
    made = oper.shard(model, plan, env=ShardingEnv.from_process_group(group))
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
        if reference.kind == "adam":
            found[f"{key}/{name}.iter"] = torch.tensor([reference.steps])
    return found


def train_and_compare(
    rank: int, group: dist.ProcessGroup, kind: str, copies: float, mutant: str | None = None
) -> float:
    """Outputs, tables and optimizer states against the reference after three steps; how far the
    tables moved."""
    with mutated(mutant):
        ranks = dist.get_world_size(group)
        model, optimizer = sharded(group, kind, copies)
        reference = Reference(Model("cpu"), kind, LR, DENSE_LR)
        start = reference_state(reference)
        pairs = []
        for step in range(STEPS):
            batches = [batch(100 * step + r, SAMPLES + r) for r in range(ranks)]
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
    update, read, start = Embedding._update, Mailboxes.read, Embedding.__init__

    def two_updates(self: Embedding, *arguments: Any) -> None:
        update(self, *arguments)
        update(self, *arguments)

    def undivided(self: Embedding, *arguments: Any, **named: Any) -> None:
        start(self, *arguments, **named | {"gradient_scale": 1.0})

    changed: dict[str, tuple[Any, str, Any]] = {
        "no update": (Embedding, "_update", lambda *_: None),
        "two updates": (Embedding, "_update", two_updates),
        "no division": (Embedding, "__init__", undivided),
        # An owner takes its own gradients for everyone's.
        "wrong exchange": (Mailboxes, "read", lambda self, _, code: read(self, self._rank, code)),
    }
    if mutant is None:
        yield
    else:
        with patch.object(*changed[mutant]):
            yield


def pipelined(rank: int, group: dist.ProcessGroup, name: str) -> None:
    """A pipeline of TorchRec's trains (or reads, in evaluation) as a plain loop does."""
    batches = [batch(100 * step + rank) for step in range(5)]
    model, optimizer = sharded(group, "rowwise_adagrad")
    plain, plain_optimizer = sharded(group, "rowwise_adagrad")
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


def written_in_place(rank: int, group: dist.ProcessGroup) -> list[str]:
    """What is written into a state dict reaches the tables, whoever writes; what is written after
    the tables were used does not, and is warned of."""
    caught: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: caught.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("oper").addHandler(handler)
    model, optimizer = sharded(group, "adagrad")
    train_step(model, optimizer, batch(rank))
    before = whole_model(model, group)
    key, state = "bags.embedding_bags.wide.weight", "wide.momentum1"
    held = model.state_dict()
    if rank == 0:  # others have only read it
        held[key].local_shards()[0].tensor[2:4] = 5.0
    states = model.fused_optimizer.state_dict()["state"]
    if rank == 1:
        states[key][state].local_shards()[0].tensor.mul_(2)
    with torch.no_grad():
        model(batch(rank))
    after = whole_model(model, group)
    held[key].local_shards()[0].tensor.zero_()
    with torch.no_grad():
        model(batch(rank))
    later = whole_model(model, group)
    expected = {k: v.clone() for k, v in before.items()}
    expected[key][2:4] = 5.0
    expected[f"{key}/{state}"][25:] *= 2
    compare(after, expected, 0)
    compare(later, after, 0)
    return caught


def loaded(rank: int, group: dist.ProcessGroup) -> None:
    """State dicts of the unsharded model, of TorchRec's shardings and of ours are loaded directly,
    and the unsharded model loads ours."""
    plain = Model("cpu")
    with torch.no_grad():
        for number, weight in enumerate(plain.parameters()):
            weight.uniform_(number, number + 1)
    expected = plain.state_dict()
    model, _ = sharded(group, device="meta")
    assert not model.load_state_dict(plain.state_dict()).missing_keys
    compare(whole(model.state_dict(), group), expected, 0)
    for sharding in ("row_wise", "table_wise"):
        other = stock("sgd", sharding, group)
        held = other.state_dict()
        for key, value in held.items():
            for shard in value.local_shards() if isinstance(value, ShardedTensor) else []:
                rows = shard.metadata.shard_offsets[0]
                shard.tensor.copy_(expected[key][rows : rows + len(shard.tensor)])
        model, _ = sharded(group, device="meta")
        model.load_state_dict(other.state_dict())
        compare(whole_tables(model, group), {k: v for k, v in expected.items() if "embed" in k}, 0)
    again = Model("cpu")
    again.load_state_dict({k: v.float() for k, v in whole(model.state_dict(), group).items()})
    strange = {"bags.embedding_bags.wide.weight": torch.zeros(51, 16)}
    with pytest.raises(OperError, match=r"'wide': the state dict's weight is \(51, 16\)"):
        model.load_state_dict(strange, strict=False)
    assert model.load_state_dict({}, strict=False).missing_keys
    # A module of torch's own around it goes another way.
    outer = nn.ModuleDict({"inner": model.module})
    outer.load_state_dict({f"inner.{key}": value for key, value in expected.items()})
    compare(whole(model.state_dict(), group), expected, 0)


def whole_tables(model: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    """The tables alone."""
    return {k: v for k, v in whole(model.state_dict(), group).items() if "embed" in k}


def initial(rank: int, group: dist.ProcessGroup, copies: float) -> dict[str, Any]:
    """Tables of a model made on the meta device, by the seed of rank 0."""
    model, _ = sharded(group, copies=copies, device="meta")
    found = whole_tables(model, group)
    train_step(model, all_optimizers(model), batch(rank))
    for path in ("bags", "weighted", "sequences"):
        torch.manual_seed(3 + rank)  # as when it was sharded
        getattr(model.module, path).reset_parameters()
    compare(whole_tables(model, group), found, 0)
    return found


def rank_zeros_weights(rank: int, group: dist.ProcessGroup) -> None:
    """A model with weights keeps those of rank 0."""
    model = Model("cpu")
    expected = {k: v.clone() for k, v in embedding_weights(model).items()}
    with torch.no_grad():
        for weight in embedding_weights(model).values():
            weight.add_(rank)
    plan = random_plan(0, tables_of(model), dist.get_world_size(group))
    made = oper.shard(model, plan, env=ShardingEnv.from_process_group(group))
    compare(whole_tables(made, group), expected, 0)


def scheduled(rank: int, group: dist.ProcessGroup) -> None:
    """Learning rates follow the parameter groups, and warm-up stages through them."""
    model, _ = sharded(group)
    fused = model.fused_optimizer
    warmed = WarmupOptimizer(fused, [WarmupStage(WarmupPolicy.LINEAR, 4, 0.25)], lr=LR)
    key = "bags.embedding_bags.tiny.weight"
    moved = []
    for _ in range(3):
        before = whole_tables(model, group)[key]
        train_step(model, warmed, batch(rank))
        moved.append(whole_tables(model, group)[key] - before)
        rates = {engine.learning_rates[0] for engine in engines(model)}
        assert rates == {fused.param_groups[0]["lr"]} or moved
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


def engines(model: Any) -> list[Embedding]:
    """The engines of a sharded model."""
    return [module.engine for module in model.modules() if hasattr(module, "engine")]


def stock(kind: str, sharding: str, group: dist.ProcessGroup) -> DistributedModelParallel:
    """The model sharded by TorchRec itself: "row_wise" or "table_wise"."""
    model = Model("meta")
    weights = list(embedding_weights(model).values())
    _apply_optimizer_in_backward(OPTIMIZERS[kind], weights, {"lr": LR})

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


def checkpoint(
    rank: int,
    group: dist.ProcessGroup,
    sharding: str,
    kind: str,
    load: str | None,
    save: str | None = None,
) -> dict[str, Any]:
    """Sharded by "oper" or as TorchRec does: load a checkpoint or train two steps, save one, and
    train a step more. What was loaded or saved, and what came after."""
    if sharding == "oper":
        model, _ = sharded(group, kind, device="meta")
    else:
        model = stock(kind, sharding, group)
    optimizer = all_optimizers(model)
    # All ranks have the same batch, so that gradients do not depend on their number.
    if load is None:
        for step in range(2):
            train_step(model, optimizer, batch(step))
    else:
        state = _state(model, kind)
        load_checkpoint(state, checkpoint_id=load, process_group=group)
        model.load_state_dict(state["model"])
        if "optim" in state:
            model.fused_optimizer.load_state_dict(state["optim"])
    found = whole_model(model, group)
    if save is not None:
        save_checkpoint(_state(model, kind), checkpoint_id=save, process_group=group)
    train_step(model, optimizer, batch(9))
    return found | {f"after {key}": value for key, value in whole_model(model, group).items()}


def _state(model: DistributedModelParallel, kind: str) -> dict[str, Any]:
    """What scripts save. SGD has no state, and TorchRec's ranks without tables not even the key."""
    state = {"model": model.state_dict()}
    if kind != "sgd":
        state["optim"] = model.fused_optimizer.state_dict()
    return state
