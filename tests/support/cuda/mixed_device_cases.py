"""What a process does in tests of mixed host and device tensors: TorchRec's modules on one rank, of
tensors that say they are on cuda:0 (pretended.py)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import ShardingEnv

import oper
from oper.base.errors import OperError
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import Cpu
from oper.runtime.memory.prepared_batch import PreparedBatch
from oper.runtime.step.prepare_batch import BatchPreparer
from oper.runtime.table_io import RowRange
from oper.tables.table import tables_of
from oper.torchrec import sharders
from tests.support.cuda.device_engines import batch_on, start
from tests.support.cuda.pretended import DEVICE, MixedDevicesError, OnDevice, pretending
from tests.support.runtime import engine_cases
from tests.support.runtime.engine_cases import Case
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import Inputs, Model, batch
from tests.support.torchrec.ranks import engines

STREAM = (0, 0, 1)  # of torch.Stream: its number, and the number and kind of its device


@contextmanager
def both(library: str, guard: str) -> Iterator[tuple[Any, Any, list[int]]]:
    """A model on the CPU, the same on the device, and where tensors are of which a stream was
    recorded."""
    plan = random_plan(0, tables_of(Model("meta")), 1, mode="inference")
    env = ShardingEnv.from_local(1, 0)
    on_cpu = oper.shard(Model("cpu"), plan, env=env).eval()
    with pretending(library, guard) as (device, recorded), torch.no_grad():
        with patch.object(sharders, "device_of", lambda _: device):
            sharder = oper.OperEmbeddingBagCollectionSharder(plan)
            alone: Any = sharder.shard(Model("meta").bags, {}, env, DEVICE, "bags")
            assert {parameter.device for parameter in alone.parameters()} == {DEVICE}
            made = oper.shard(Model("cpu"), plan, env=env, device="cuda:0").eval()
        yield on_cpu, made, recorded


def put(inputs: Inputs) -> Inputs:
    """A batch on the device, as a script puts it there."""
    return inputs.to(DEVICE)


def served(rank: int, group: Any, library: str, guard: str) -> None:
    """The whole model and each collection, with features in several orders, and an empty batch."""
    with both(library, guard) as (on_cpu, made, _):
        assert {p.device for p in made.parameters()} == {DEVICE}
        for step, samples in enumerate((6, 1, 0)):
            given = batch(step, samples, order=step)
            there = put(given)
            (_, expected), (_, found) = on_cpu(given), made(there)
            assert found.device == DEVICE
            assert torch.equal(found.cpu(), expected)
            of_both = (
                (module.bags(inputs.ids).values(), module.weighted(inputs.weighted_ids).values())
                for module, inputs in ((on_cpu.module, given), (made.module, there))
            )
            for one, other in zip(*of_both, strict=True):
                assert torch.equal(one, other.cpu())
            sequences = on_cpu.module.sequences(given.ids)
            for name, jagged in made.module.sequences(there.ids).items():
                for part in ("values", "lengths", "offsets", "weights"):
                    tensor = getattr(jagged, part)()
                    assert tensor.device == DEVICE, part
                    assert torch.equal(tensor.cpu(), getattr(sequences[name], part)())
        assert {engine.operator.anchor.device for engine in engines(made)} == {DEVICE}
        counted = [[e.counters.to_dict() for e in engines(model)] for model in (on_cpu, made)]
        assert counted[0] == counted[1]


def recorded(rank: int, group: Any, library: str, guard: str) -> None:
    """What is read of batches on the device is counted as of those of the host."""
    with both(library, guard) as (on_cpu, made, _):
        with oper.record(made) as there, oper.record(on_cpu) as here:
            made(put(batch(0)))
            on_cpu(batch(0))
        assert (there.profile().accesses == here.profile().accesses).all()


def trained(rank: int, group: Any, library: str, guard: str) -> None:
    """Steps of an engine, with weights and gradients that are accumulated."""
    case = Case(1, 1, optimizer="adagrad", weighted=True)
    plan = random_plan(1, engine_cases.tables_of(case), 1)
    wanted = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
    found = []
    with pretending(library, guard) as (device, _):
        for place in (Cpu(), device):
            engine = start(case, plan, None, place)
            tables = []
            for step in range(3):
                prepared = engine.prepare(batch_on(place, case, step, 0))
                with torch.no_grad():
                    out = engine.lookup(prepared)
                grad = engine_cases.gradient_of(case, step, 0, out.cpu()).flatten()
                with engine.accumulate() if step == 0 else nullcontext():
                    weights = engine.training_step.backward(
                        prepared, grad.to(place.torch_device), weights_too=True
                    )
                assert weights is not None
                assert {out.device, weights.device} == {place.torch_device}
                tables += [out.cpu(), weights.cpu(), *engine.read_rows(wanted)]
            tables += engine.read_rows(wanted, "momentum1")
            found.append((tables, engine.counters.to_dict()))
            engine.close()
    (on_cpu, counted), (there, counted_there) = found
    assert counted == counted_there
    for one, other in zip(there, on_cpu, strict=True):
        assert torch.equal(one, other)


def bad_batches(rank: int, group: Any, library: str, guard: str) -> None:
    """Bad ids are named with a later batch, lengths that do not fit with their own;
    batches of the host are refused."""
    with both(library, guard) as (_, made, _):
        good, bad_id, bad_length = (put(batch(0)) for _ in range(3))
        bad_id.ids.values()[0] = 10**6
        bad_length.ids.lengths()[0] += 1
        made.module.bags(bad_id.ids)
        with pytest.raises(OperError, match=r"in an earlier batch: feature .*: id 1000000, number"):
            made.module.bags(good.ids)
        with pytest.raises(OperError, match="lengths must sum to that"):
            made.module.bags(bad_length.ids)
        with pytest.raises(OperError, match=r"expected ids, .*, on cuda:0, the .* on cpu"):
            made(batch(0))


def saved_and_loaded(rank: int, group: Any, library: str, guard: str) -> None:
    """State dicts are the host's; those and tensors on the device are loaded."""
    with both(library, guard) as (on_cpu, made, _):
        state = made.state_dict()
        tables = {key for key in state if "embedding" in key}
        assert {state[key].device.type for key in tables} == {"cpu"}
        for key in tables:
            assert torch.equal(state[key], on_cpu.state_dict()[key])
        changed = {key: value + 1 for key, value in state.items()}
        for given in (changed, {key: value.to(DEVICE) for key, value in changed.items()}):
            made.load_state_dict({key: torch.zeros_like(value) for key, value in state.items()})
            made.load_state_dict(given)
            for key in tables:
                assert torch.equal(made.state_dict()[key], changed[key])


def pipelined(rank: int, group: Any, library: str, guard: str) -> None:
    """What TorchRec's pipelines ask of a prepared batch and of its context: all that lies on the
    device is kept for another stream."""
    with both(library, guard) as (_, made, recorded):
        inputs, stream = put(batch(0)), torch.Stream(*STREAM)
        for collection, ids in (
            (made.module.bags, inputs.ids),
            (made.module.weighted, inputs.weighted_ids),
            (made.module.sequences, inputs.ids),
        ):
            context = collection.create_context()
            prepared: KJTList = collection.input_dist(context, ids).wait().wait()
            recorded.clear()
            prepared.record_stream(stream)
            (found,) = prepared
            assert isinstance(found, PreparedBatch)
            assert found.bags is not None
            given = vars(found).values()
            of_batch = [each for each in given if isinstance(each, OnDevice)]
            assert {found.addresses.data_ptr(), found.bags.data_ptr()} <= set(recorded)
            assert set(recorded) == {tensor.data_ptr() for tensor in of_batch}
            collection.compute(context, prepared)
            recorded.clear()
            context.record_stream(stream)
            held = (*of_batch, ids.values(), ids.lengths(), ids.weights_or_none())
            assert {t.data_ptr() for t in held if t is not None} <= set(recorded)


def _prepare(change: Callable[[PreparedBatch], PreparedBatch]) -> Any:
    original = BatchPreparer.prepare
    return patch.object(BatchPreparer, "prepare", lambda self, given: change(original(self, given)))


def planted(rank: int, group: Any, library: str, guard: str, what: str) -> str:
    """A fault by which tensors of the host and of the device are mixed; what is said of it."""
    with both(library, guard) as (_, made, _):
        inputs = put(batch(0))
        original = EmbeddingEngine.lookup
        changes = {
            "offsets": _prepare(lambda b: replace(b, offsets=_host(b.offsets))),
            "descriptors": _prepare(lambda b: replace(b, features=b.features.to(DEVICE))),
            "bases": patch.object(made.module.bags.engine.heap, "bases", torch.zeros(4, 2)),
            "output": patch.object(
                EmbeddingEngine, "lookup", lambda self, b: original(self, b) + torch.zeros(3, 1)
            ),
        }
        with changes[what]:
            try:
                made(inputs)
            except MixedDevicesError as error:
                return str(error)
    return ""


def _host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor.held if isinstance(tensor, OnDevice) else tensor
