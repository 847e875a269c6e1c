"""A model of TorchRec's on devices, whose steps are captured, beside the same one on CPU ranks."""

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

import oper
from oper.runtime.memory.device import Cpu
from oper.runtime.step_graph import StepGraph
from oper.tables.table import tables_of
from oper.torchrec.graph_step import GraphedStep
from tests.support.cuda.torchrec_cases import on_device, place_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import ROWS, Inputs, Model, batch
from tests.support.torchrec.ranks import (
    all_optimizers,
    engines,
    put_optimizer,
    train_step,
    whole_model,
)

STEPS = 21
ODD = (1, 14)  # steps of other batches


class _Coarse(torch.autograd.Function):
    """Values rounded to few bits, and their gradients: sums of products are exact in any order, so
    that a device's matrix kernels, which add in orders of their own, have the CPU's bits."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return torch.round(values * 64) / 64

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.round(gradient * 4096) / 4096


coarse: Callable[[torch.Tensor], torch.Tensor] = _Coarse.apply


class Over(nn.Module):
    """The model's loss with sizes that do not depend on values, as graphs need, and with sums that
    are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(52, 1)

    def forward(self, bags: Any, weighted: Any, sequences: Any) -> tuple[torch.Tensor, ...]:
        """Return the loss of a rank, and values [samples]."""
        inputs = coarse(torch.cat([bags.values(), weighted.values()], dim=1))
        weight, bias = coarse(self.linear.weight), coarse(self.linear.bias)
        pooled = coarse(nn.functional.linear(inputs, weight, bias)).squeeze(1)
        seen = [coarse(part.values()).sum() for _, part in sorted(sequences.items())]
        pooled = coarse(pooled + torch.stack(seen).sum() / 64)
        return coarse((1 + pooled.square()).sqrt()).sum() / 8, pooled


def alike(step: int, rank: int, shape: int = 0) -> Inputs:
    """A rank's batch in a step: as many ids of each key as in all steps, dealt to samples anew."""
    first = batch(1000 * shape + rank, order=0)
    rng = np.random.default_rng((step, rank, shape))
    return Inputs(_alike(first.ids, rng), _alike(first.weighted_ids, rng))


def _alike(given: KeyedJaggedTensor, rng: np.random.Generator) -> KeyedJaggedTensor:
    keys = list(given.keys())
    lengths = rng.permuted(given.lengths().numpy().reshape(len(keys), -1), axis=1)
    ids = [
        rng.integers(0, ROWS.get(key, 9), n)
        for key, n in zip(keys, lengths.sum(axis=1), strict=True)
    ]
    weights = given.weights_or_none()
    made = KeyedJaggedTensor(
        keys,
        torch.from_numpy(np.concatenate(ids)),
        None if weights is None else torch.from_numpy(rng.permutation(weights.numpy())),
        lengths=torch.from_numpy(lengths.ravel()),
    )
    made.length_per_key()
    return made


def model_alone(library: str | None, on_cpu: bool) -> Any:
    """The model on one rank without a process group, so that no DistributedDataParallel has it."""
    made, env = Model("cpu"), ShardingEnv.from_local(1, 0)
    torch.manual_seed(9)
    made.over = Over()  # type: ignore[assignment]
    put_optimizer(made, "adam")
    plan = random_plan(0, tables_of(made), 1, replicated=0.3)
    if on_cpu:
        return oper.shard(made, plan, env=env)
    with on_device(library):
        return oper.shard(made, plan, env=env, device=place_of(library))


def model_on(
    group: Any, kind: str, library: str | None, on_cpu: bool, mode: str, **options: Any
) -> Any:
    """The model on this rank's device, and its optimizers."""
    ranks = dist.get_world_size(group)
    made = Model("cpu")
    torch.manual_seed(9)
    made.over = Over()  # type: ignore[assignment]
    if mode == "training":
        put_optimizer(made, kind)
    plan = random_plan(0, tables_of(made), ranks, replicated=0.3, mode=mode)
    env = ShardingEnv.from_process_group(group)
    if on_cpu:
        return oper.shard(made, plan, env=env, **options)
    with on_device(library):
        return oper.shard(made, plan, env=env, device=place_of(library), **options)


class Script:
    """A training script, whose step is captured on a device."""

    def __init__(self, model: Any) -> None:
        self.model, self.optimizer = model, all_optimizers(model)
        self.step: Any = self.train
        if not isinstance(engines(model)[0].device, Cpu):
            self.step = oper.graph_step(model, self.train)

    def train(self, inputs: Inputs, factor: float) -> dict[str, torch.Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        loss, output = self.model(inputs)
        (loss * factor).backward()
        self.optimizer.step()
        return {"loss": loss.detach(), "output": output.detach()}


def train_captured(rank: int, group: Any, kind: str, library: str | None) -> list[dict[str, Any]]:
    """Losses, outputs, and all of the model in the end: on the device, and on the CPU."""
    place, found = place_of(library), []
    for on_cpu in (False, True):
        script = Script(model_on(group, kind, library, on_cpu, "training"))
        outputs, captured = [], []
        for step in range(STEPS):
            inputs = alike(step, rank, shape=int(step in ODD))
            for part in script.model.fused_optimizer.param_groups:
                part["lr"] = 0.05 / (1 + step)
            given = inputs if on_cpu else inputs.to(place)
            watched = oper.record(script.model) if step == STEPS - 2 else nullcontext()
            with watched:
                result = script.step(given, 2.0)
            outputs += [result["loss"].cpu(), result["output"].cpu()]
            captured.append(isinstance(script.step, GraphedStep) and script.step.captured)
        found.append(
            {
                "outputs": outputs,
                "model": whole_model(script.model, group),
                "counted": oper.counters(script.model),
                "captured": captured,
            }
        )
    return found


def train_eager(rank: int, group: Any, kind: str, library: str | None) -> list[dict[str, Any]]:
    """Return outputs of training steps, and the whole model after them: of the device, and of the
    CPU."""
    found = []
    for on_cpu in (False, True):
        model = model_on(group, kind, library, on_cpu, "training")
        optimizer = all_optimizers(model)
        place = torch.device("cpu") if on_cpu else place_of(library)
        outputs = [
            train_step(model, optimizer, alike(step, rank, shape=step % 2).to(place)).cpu()
            for step in range(4)
        ]
        found.append({"outputs": outputs, "model": whole_model(model, group)})
    return found


def serve_captured(rank: int, group: Any, library: str | None) -> bool:
    """Answers of ranks that serve, which need not wait for each other: one of them has more
    requests. Whether all were those of CPU ranks, and most from a graph."""
    place, captured = place_of(library), 0
    there, here = (
        model_on(group, "sgd", library, on_cpu, "inference").eval() for on_cpu in (False, True)
    )
    with torch.no_grad():
        step = oper.graph_step(there, lambda inputs: there(inputs)[1])
        for number in range(8 + 2 * rank):
            inputs = alike(number, rank)
            assert torch.equal(step(inputs.to(place)).cpu(), here(inputs)[1])
            captured += step.captured
        elsewhere = alike(0, rank).to(torch.device("meta" if library else "cpu"))
        with pytest.raises(oper.OperError, match="expected a step's inputs on"):
            step(elsewhere)
        assert step.captured
    return captured == 5 + 2 * rank


def told(rank: int, group: Any, library: str | None) -> list[str]:
    """What is said of steps that cannot be captured, and of bad batches in one that is."""
    place, said = place_of(library), []

    def says(call: Any) -> None:
        try:
            call()
        except (oper.OperError, RuntimeError) as error:
            said.append(str(error))
        else:
            said.append("")

    on_cpu = model_on(group, "sgd", library, True, "training")
    says(lambda: oper.graph_step(on_cpu, print))
    says(lambda: oper.graph_step(nn.Linear(1, 1), print))
    script = Script(model_on(group, "sgd", library, False, "training"))
    says(lambda: script.step({"batch": {1, 2}}, 1.0))
    unknown = alike(0, 0).to(place)
    for number in range(12):
        unknown.ids = _without_counts(alike(number, 0).to(place).ids)
        if number < 11:
            script.step(unknown, 1.0)
    says(lambda: script.step(unknown, 1.0))
    script.step.release()
    for number in range(13):
        script.step(alike(number, 0).to(place), 1.0)
    assert script.step.captured
    rows, inputs = engines(script.model)[0].steps, alike(6, 0).to(place)
    with torch.no_grad():
        says(lambda: script.step(inputs, 1.0))  # as it is, where nothing can go backward
    with oper.accumulate(script.model):
        script.model(inputs)[0].backward()
    says(lambda: script.step(inputs, 1.0))
    script.model(inputs)[0].backward()
    assert engines(script.model)[0].steps == rows + 1
    bad = alike(7, 0).to(place)
    bad.ids.values()[2] = 10**6
    script.step(bad, 1.0)
    says(lambda: script.step(alike(8, 0).to(place), 1.0))
    looks = oper.graph_step(script.model, lambda inputs: script.model(inputs)[0].item())
    with torch.no_grad():
        for _ in range(11):
            looks(inputs)
        says(lambda: looks(inputs))
        says(lambda: oper.graph_step(script.model, lambda inputs: inputs.ids["f0"])(inputs))
    return said


def _without_counts(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(list(ids.keys()), ids.values(), lengths=ids.lengths())


def late_on_one_rank(rank: int, group: Any, library: str | None) -> None:
    """Rank 1 has a batch of another shape among its first, so that it captures its step later than
    rank 0, and others later, which it runs as they are: the bits of CPU ranks."""
    found = []
    for on_cpu in (False, True):
        script = Script(model_on(group, "sgd", library, on_cpu, "training"))
        place = torch.device("cpu") if on_cpu else place_of(library)
        results = []
        for step in range(20):
            inputs = alike(step, rank, shape=int(rank == 1 and step in (3, 17)))
            results.append(script.step(inputs.to(place), 1.0)["output"])
        found.append(results)
    assert all(map(torch.equal, *found))


def updated_outside(rank: int, group: Any, library: str | None) -> None:
    """The dense part is updated outside of the step, which puts the batch on its device itself and
    returns ids: the bits of CPU ranks, by batches whose keys have other counts of values too."""
    found = []
    for on_cpu in (False, True):
        model = model_on(group, "sgd", library, on_cpu, "training")
        optimizer = all_optimizers(model)
        place = torch.device("cpu") if on_cpu else place_of(library)

        def forward_and_backward(
            inputs: Inputs, model: Any = model, place: Any = place
        ) -> tuple[torch.Tensor, KeyedJaggedTensor]:
            there = Inputs(inputs.ids.to(place), inputs.weighted_ids.to(place))
            loss, output = model(there)
            loss.backward()
            return output.detach(), there.ids

        step: Any = forward_and_backward if on_cpu else oper.graph_step(model, forward_and_backward)
        results = []
        for number in range(18):
            inputs = alike(number, rank)
            if number in (13, 16):
                inputs.ids = _other_counts(inputs.ids)
            optimizer.zero_grad(set_to_none=True)
            output, ids = step(inputs)
            optimizer.step()
            results += [output, ids]
        values = [each if isinstance(each, torch.Tensor) else each.values() for each in results]
        found.append([*values, *whole_model(model, group).values()])
    for n, (there, here) in enumerate(zip(*found, strict=True)):
        assert torch.equal(there, here), n


def _other_counts(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch of as many values, of which two keys have other numbers."""
    lengths = ids.lengths().view(len(ids.keys()), -1).clone()
    names = ["f1", "f2"]  # of one table
    one, other = (list(ids.keys()).index(name) for name in names)
    change = torch.tensor([1, -1]) if lengths[other, 0] else torch.tensor([-1, 1])
    lengths[[one, other], 0] += change
    made = KeyedJaggedTensor(list(ids.keys()), ids.values() % 1, lengths=lengths.flatten())
    made.length_per_key()
    return made


def moved_between(rank: int, group: Any, library: str | None) -> None:
    """Rows migrate while a step is run: it is captured again once they are there, and not before.
    The bits of CPU ranks."""
    found = []
    for on_cpu in (False, True):
        script = Script(model_on(group, "adagrad", library, on_cpu, "training", spare=3.0))
        place = torch.device("cpu") if on_cpu else place_of(library)
        new = random_plan(1, tables_of(Model("meta")), 2, replicated=0.3)
        results, migration = list[torch.Tensor](), None
        for step in range(60):
            if step == 13:
                migration = oper.migrate(script.model, new, bytes_per_step=2000)
            moving = migration is not None and migration.steps_made > 0 and not migration.done
            results.append(script.step(alike(step, rank).to(place), 1.0)["output"])
            assert on_cpu or not (moving and script.step.captured)
            if migration is not None:
                migration.step()
        assert migration is not None
        assert migration.done
        assert on_cpu or script.step.captured
        found.append([*results, *whole_model(script.model, group).values()])
    assert all(map(torch.equal, *found))


def _nothing(script: Script, step: int) -> None:
    pass


def _rates(script: Script, step: int) -> None:
    for part in script.model.fused_optimizer.param_groups:
        part["lr"] = 0.05 / (1 + step)


def _a_part_in_eval(script: Script, step: int) -> None:
    if step == 8:
        script.model.module.over.dropout.eval()


def _trained_later(script: Script, step: int) -> None:
    script.model.module.over.linear.bias.requires_grad_(step >= 8)


def _lies_elsewhere(script: Script, step: int) -> None:
    if step == 8:
        weight = script.model.module.over.linear.weight
        weight.data = weight.data * 2


def _without_gradients(script: Script, step: int) -> None:
    if step == 8:
        for parameter in script.model.module.over.parameters():
            parameter.grad = None


# What changes before steps of a script; and in which order that does its part.
CHANGES = {
    "nothing": (_nothing, "zero first"),
    "rates": (_rates, "zero first"),
    "rates, taken in the end": (_rates, "step last"),
    "rates, and gradients zeroed in the end": (_rates, "zero last"),
    "old gradients used first": (_nothing, "step first"),
    "gradients added up": (_nothing, "never zero"),
    "a part in eval": (_a_part_in_eval, "zero first"),
    "a parameter trained later": (_trained_later, "zero first"),
    "a parameter elsewhere": (_lies_elsewhere, "zero first"),
    "gradients let go": (_without_gradients, "never zero"),
}


def changed_between(rank: int, group: Any, name: str, library: str | None) -> list[int]:
    """Steps between which something changes, by the bits of CPU ranks: which were run as graphs."""
    change, order = CHANGES[name]
    found, graphs, run = [], [], StepGraph.run
    for on_cpu in (False, True):
        script, ran = Script(model_alone(library, on_cpu)), list[int]()
        script.model.module.over.dropout = nn.Dropout(0.0)

        def train(inputs: Inputs, script: Script = script) -> torch.Tensor:
            if order == "step first":
                script.optimizer.step()
            if order in ("zero first", "step first"):
                script.optimizer.zero_grad(set_to_none=True)
            loss, output = script.model(inputs)
            loss.backward()
            if order != "step first":
                script.optimizer.step()
            if order == "zero last":
                script.optimizer.zero_grad(set_to_none=True)
            return output.detach()

        step: Any = train if on_cpu else oper.graph_step(script.model, train)
        place, results = torch.device("cpu") if on_cpu else place_of(library), list[torch.Tensor]()
        for number in range(18):
            change(script, number)

            def noted(graph: StepGraph, *given: Any, number: int = number, ran: Any = ran) -> Any:
                ran.append(number)
                return run(graph, *given)

            with patch.object(StepGraph, "run", noted):
                results.append(step(alike(number, rank).to(place)))
        found.append([*results, *(p.detach() for p in script.model.module.over.parameters())])
        graphs += ran
    for there, here in zip(*found, strict=True):
        assert torch.equal(there.cpu(), here)
    return graphs


def gradients_after_a_failure(rank: int, group: Any, library: str | None) -> None:
    """A capture that fails leaves the gradients that there were; a step that is let go holds none
    of its own."""
    script, place = Script(model_alone(library, False)), place_of(library)
    parameters = list(script.model.module.over.parameters())
    fails = [False]

    def train(inputs: Inputs) -> torch.Tensor:
        result = script.train(inputs, 1.0)["output"]
        if fails[0]:
            raise ValueError("in the user's step")
        return result

    step = oper.graph_step(script.model, train)
    for number in range(3):
        step(alike(number, rank).to(place))
    before, fails[0] = [parameter.grad for parameter in parameters], True
    with pytest.raises(ValueError, match="in the user's step"):
        step(alike(3, rank).to(place))
    assert all(p.grad is grad for p, grad in zip(parameters, before, strict=True))
    fails[0] = False
    step(alike(4, rank).to(place))
    assert step.captured
    left = [weakref.ref(parameter.grad) for parameter in parameters if parameter.grad is not None]
    step.release()
    for parameter in parameters:
        parameter.grad = None
    gc.collect()
    assert len(left) == 2
    assert not any(each() for each in left)
