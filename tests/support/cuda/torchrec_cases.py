"""What ranks do in tests of TorchRec's modules on devices, beside the same modules on CPU ranks."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType

import oper
from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.runtime.comm import node
from oper.runtime.memory import device, symmetric_memory
from oper.tables.table import tables_of
from oper.topology.links import LINKED
from oper.topology.transports import NVSHMEM
from oper.torchrec import sharders
from tests.support.cuda.device_engines import EmulatedDevice, device_of
from tests.support.cuda.fake_nvshmem import FakeNvshmem
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec import (
    checkpoint_cases,
    ranks,
    refusal_cases,
    sharder_cases,
    training_cases,
)
from tests.support.torchrec.models import Inputs, Model, batch, plan_tables

STEPS = 3


def place_of(library: str | None) -> torch.device:
    """What a script gives as its device; an emulated one's tensors are the host's."""
    return torch.device("cuda:0" if library is None else "cpu")


@contextmanager
def on_device(library: str | None) -> Iterator[None]:
    """Inside, tables that are sharded for `place_of(library)` are on the device that is meant."""
    if library is None:
        yield
        return
    with patch.object(sharders, "device_of", lambda _: device_of(library)):
        yield


def on_emulated(
    rank: int, group: Any, library: str, function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """What another test's function does on a rank, with all tables on emulated devices and plans
    for inference where it asks for no other."""
    plans = partial(random_plan, mode="inference")
    with ExitStack() as patched:
        patched.enter_context(on_device(library))
        for module in (ranks, sharder_cases, checkpoint_cases, refusal_cases):
            patched.enter_context(patch.object(module, "random_plan", plans))
        planned = partial(plan_tables, mode="inference")
        patched.enter_context(patch.object(sharder_cases, "plan_tables", planned))
        return function(rank, group, *arguments, **named)


def trained_on_emulated(
    rank: int, group: Any, library: str, function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """What another test's function, which trains, does on a rank with all tables on emulated
    devices."""
    with on_device(library):
        return function(rank, group, *arguments, **named)


def trained_between_nodes(
    rank: int, group: Any, library: str, function: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """The same, where each rank is a node of its own and plans fetch distinct rows."""

    def plans(*given: Any, **options: Any) -> Plan:
        return random_plan(*given, **options | {"fetch": "distinct"})

    with ExitStack() as patched:
        patched.enter_context(on_device(library))
        patched.enter_context(patch.object(node, "_node_number", lambda *_: rank))
        for module in (ranks, training_cases, checkpoint_cases):
            patched.enter_context(patch.object(module, "random_plan", plans))
        return function(rank, group, *arguments, **named)


def made(
    group: Any,
    how: str,
    place: torch.device,
    plan: Plan,
    source: str,
    data_type: DataType,
    **options: Any,
) -> Any:
    """The model sharded for a device, by `oper.shard` or by DistributedModelParallel."""
    model = Model(source, data_type)
    env = ShardingEnv.from_process_group(group)
    torch.manual_seed(5)
    if how == "shard":
        return oper.shard(model, plan, env=env, device=place, **options).eval()
    return DistributedModelParallel(
        model,
        env=env,
        device=place,
        plan=oper.torchrec_plan(plan, model),
        sharders=[
            oper.OperEmbeddingBagCollectionSharder(**options),
            oper.OperEmbeddingCollectionSharder(**options),
        ],
    ).eval()


def plan_for(group: Any, dtype: str = "", seed: int = 0) -> Plan:
    """A plan for inference of the model's tables, with replicas."""
    tables = tables_of(Model("meta"))
    if dtype:
        tables = tuple(replace(table, dtype=dtype) for table in tables)
    ranks = dist.get_world_size(group)
    return random_plan(seed, tables, ranks, replicated=0.3, mode="inference")


def outputs(model: Any, inputs: Inputs) -> list[torch.Tensor]:
    """All that the collections of a model and the whole give for a batch, on the host."""
    with torch.no_grad():
        over = model(inputs)
        module = model.module
        bags, weighted = module.bags(inputs.ids), module.weighted(inputs.weighted_ids)
        found = [*over, bags.values(), weighted.values()]
        for _, jagged in sorted(module.sequences(inputs.ids).items()):
            found += [jagged.values(), jagged.lengths(), jagged.offsets(), jagged.weights()]
    return [each.cpu() for each in found]


def engines_on(model: Any) -> set[str]:
    """The kinds of the devices that a model's tables are on."""
    return {engine.device.kind for engine in ranks.engines(model)}


def served_on_both(
    rank: int, group: Any, library: str | None, how: str, source: str, dtype: str
) -> None:
    """Modules on devices give the bits of the same on CPU ranks, and so do their state dicts."""
    plan = plan_for(group, dtype)
    data_type = DataType[dtype.upper()] if dtype in ("fp16", "bf16") else DataType.FP32
    on_cpu = made(group, how, torch.device("cpu"), plan, source, data_type)
    with on_device(library):
        there = made(group, how, place_of(library), plan, source, data_type)
    assert (engines_on(on_cpu), engines_on(there)) == ({"cpu"}, {"cuda"})
    anchors = [p for p in there.parameters() if not p.numel()]
    assert {anchor.device for anchor in anchors} == {place_of(library)}
    assert_same(rank, group, on_cpu, there, place_of(library))


def served_by_nvshmem(
    rank: int, group: Any, library: str, nvshmem: str, how: str, fetch: str
) -> str:
    """Modules on devices of two nodes give the bits of the same on CPU ranks of two nodes."""
    plan = random_plan(
        0, tables_of(Model("meta")), 2, replicated=0.3, mode="inference", fetch=fetch
    )
    memory = (LINKED, LINKED)
    topology = replace(plan.topology, node_of=(0, 1), memory=memory, transport=NVSHMEM)
    plan, cpu = replace(plan, topology=topology), torch.device("cpu")
    on_cpu = made(group, how, cpu, plan, "cpu", DataType.FP32, nodes=(0, 1))
    emulated = EmulatedDevice(library, nvshmem, rank)
    with (
        patch.object(sharders, "device_of", lambda _: emulated),
        patch.object(symmetric_memory, "STAGE_BYTES", 40_000),
    ):
        there = made(group, how, cpu, plan, "cpu", DataType.FP32, nodes=(0, 1))
    assert (engines_on(on_cpu), engines_on(there)) == ({"cpu"}, {"cuda"})
    assert_same(rank, group, on_cpu, there, cpu)
    assert FakeNvshmem(Path(nvshmem)).counts().gets > 0
    for engine in ranks.engines(there):
        engine.close()
    return "the same"


def assert_same(rank: int, group: Any, on_cpu: Any, there: Any, place: torch.device) -> None:
    """Two models say the same of batches, one of them on `place`, and have equal states."""
    samples = (6 + rank, 0, 1)
    for step in range(STEPS):
        inputs = batch(10 * step + rank, samples[step], order=step)
        assert_same_outputs(outputs(there, inputs.to(place)), outputs(on_cpu, inputs))
    assert_equal(state_of(there, group), state_of(on_cpu, group))


def assert_same_outputs(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Compare what `outputs` returns: bits of collections, and to rounding the loss and values of
    the model's dense part, whose sums a device takes in another order."""
    torch.testing.assert_close(found[:2], expected[:2])
    assert len(found) == len(expected) > 2
    assert all(map(torch.equal, found[2:], expected[2:]))


def state_of(model: Any, group: Any) -> dict[str, torch.Tensor]:
    """A model's state dict as whole tensors."""
    return ranks.whole(model.state_dict(), group)


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raise where any value differs in a bit, sixteen-bit ones by their value in 64."""
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def loaded_on_the_other(
    rank: int, group: Any, library: str | None, by: str, folder: Path, from_device: bool
) -> None:
    """What one kind of ranks saves the other loads, by plans that differ: directly, and by
    torch.distributed.checkpoint."""
    places = [torch.device("cpu"), place_of(library)]
    plans = [plan_for(group, seed=seed) for seed in (0, 1)]
    models = [made(group, "shard", places[0], plans[0], "cpu", DataType.FP32)]
    with on_device(library):
        models.append(made(group, "shard", places[1], plans[1], "cpu", DataType.FP32))
    saved, other = models[:: -1 if from_device else 1]
    changed = Model("cpu")
    with torch.no_grad():
        for number, weight in enumerate(changed.parameters()):
            weight.uniform_(number, number + 1)
    expected = {key: value.double() for key, value in changed.state_dict().items()}
    saved.load_state_dict(changed.state_dict())
    assert_equal(state_of(saved, group), expected)
    if by == "checkpoint":
        save_checkpoint(saved.state_dict(), checkpoint_id=folder, process_group=group)
        state = other.state_dict()
        load_checkpoint(state, checkpoint_id=folder, process_group=group)
    else:
        state = saved.state_dict()
    other.load_state_dict(state)
    assert_equal(state_of(other, group), expected)
    inputs = batch(rank)
    given = [inputs.to(place) for place in (places[::-1] if from_device else places)]
    of_both = [outputs(model, each) for model, each in zip((saved, other), given, strict=True)]
    assert_same_outputs(*of_both)


def saved_on_device(rank: int, group: Any, library: str | None, folder: Path) -> dict[str, Any]:
    """Save a model on devices, whose weights are those of a meta module; its tables."""
    with on_device(library):
        model = made(group, "shard", place_of(library), plan_for(group), "meta", DataType.FP32)
    save_checkpoint(model.state_dict(), checkpoint_id=folder, process_group=group)
    return ranks.whole_tables(model, group)


def loaded_on_cpu(rank: int, group: Any, folder: Path) -> dict[str, Any]:
    """Load a checkpoint into a model on CPU ranks that is to be trained, in place; its tables."""
    model, _ = ranks.sharded(group)
    load_checkpoint(model.state_dict(), checkpoint_id=folder, process_group=group)
    return ranks.whole_tables(model, group)


def planned(rank: int, group: Any, library: str | None) -> None:
    """OperShardingPlanner plans for TorchRec's topology of devices, and DistributedModelParallel
    shards by that plan on them."""
    model = Model("meta")
    tables = tables_of(model)
    counts = np.arange(sum(table.rows for table in tables), dtype=np.uint32)
    profile = Profile(tables, 1000, counts, counts[:0], (False,) * len(tables))
    topology = Topology(dist.get_world_size(group), "cuda", hbm_cap=10**9)
    planner = oper.OperShardingPlanner(topology, profile, batch_size=64, mode="inference")
    sharders = [oper.OperEmbeddingBagCollectionSharder(), oper.OperEmbeddingCollectionSharder()]
    plan = planner.collective_plan(model, sharders, group)
    env = ShardingEnv.from_process_group(group)
    with on_device(library):
        model = DistributedModelParallel(
            model, env=env, device=place_of(library), plan=plan, sharders=sharders
        )
    assert engines_on(model) == {"cuda"}
    outputs(model, batch(rank).to(place_of(library)))


def bad_ids(rank: int, group: Any, library: str | None) -> None:
    """An id out of range on one rank is told there with the next batch, and then on the others."""
    plan = plan_for(group)
    with on_device(library), torch.no_grad():
        model = made(group, "parallel", place_of(library), plan, "cpu", DataType.FP32)
    inputs = batch(rank)
    if rank == 1:
        inputs.ids.values()[0] = 10**6
        outputs(model, batch(0).to(place_of(library)))
        model.module.bags(inputs.ids.to(place_of(library)))
        with pytest.raises(OperError, match=r"in an earlier batch: feature .*: id 1000000"):
            model.state_dict()
    else:
        with pytest.raises(OperError, match="rank 1 failed: in an earlier batch: feature"):
            model.state_dict()


def refused(rank: int, group: Any, library: str, what: str, how: str) -> str:
    """Shard in a way that is refused; returns nothing."""
    plan = plan_for(group)
    if what == "tier":
        plan = random_plan(0, tables_of(Model("meta")), 2, tier=(0, 2))

    def chosen(given: Any) -> device.Device:
        if rank == 1 and what == "mixed":
            return device.Cpu()
        if rank == 1 and what == "absent":
            return device.device_of("cuda:7")
        return device_of(library)

    with ExitStack() as patched:
        patched.enter_context(patch.object(sharders, "device_of", chosen))
        if what == "no gloo":
            only = patch.object(dist, "get_backend_config", lambda _: "cuda:nccl")
            patched.enter_context(only)
        nodes = (0, 1) if what == "two nodes" else None
        made(group, how, torch.device("cpu"), plan, "meta", DataType.FP32, nodes=nodes)
    return "nothing was refused"
