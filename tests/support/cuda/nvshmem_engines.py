"""What ranks of two nodes with engines on devices do in tests, by the fake NVSHMEM, beside engines
on the CPU whose ranks are of two nodes too."""

import os
import signal
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import Mock, patch

import torch

from oper.base import native
from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.comm.group import Group
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.fetch_paths.gradient_gets import GradientGets
from oper.runtime.memory import symmetric_memory
from oper.runtime.memory.device import Cpu, Device
from oper.runtime.step.apply_gradients import Gradients
from oper.runtime.table_io import RowBlock, RowRange
from oper.topology.links import LINKED
from tests.support.cuda.device_engines import EmulatedDevice, batch_on, dying
from tests.support.cuda.fake_nvshmem import FakeNvshmem
from tests.support.cuda.nvshmem_lookups import node_of
from tests.support.runtime.engine_cases import (
    Case,
    gradient_of,
    initial,
    module_tables,
    tables_of,
)
from tests.support.runtime.runtime_plans import random_plan


def nodes_of(ranks: int) -> list[int]:
    """The node of each rank: two halves."""
    return [node_of(rank, ranks) for rank in range(ranks)]


def plan_of(case: Case, transport: Any = "nvshmem", **options: Any) -> Plan:
    """A random plan for ranks of two nodes, for inference unless said."""
    given: dict[str, Any] = {"mode": "inference", "replicated": 0.3} | options
    plan = random_plan(case.seed, tables_of(case), case.ranks, **given)
    node, memory = tuple(nodes_of(case.ranks)), (LINKED,) * min(case.ranks, 2)
    topology = replace(plan.topology, node_of=node, memory=memory, transport=transport)
    return replace(plan, topology=topology)


def start(
    case: Case,
    plan: Plan,
    group: Any,
    device: Device,
    deadline_seconds: float = 20,
    bounds: str = "fatal",
) -> EmbeddingEngine:
    """An engine of a rank of two nodes whose tables have their initial values."""
    with patch.object(symmetric_memory, "STAGE_BYTES", 40_000):  # of a few rows a group
        engine = EmbeddingEngine(
            plan, module_tables(case), group=group, weighted=case.weighted,
            deadline_seconds=deadline_seconds, device=device, nodes=nodes_of(case.ranks),
            bounds=bounds,
        )  # fmt: skip
    mine = [n for n in range(len(case.rows)) if n % engine.ranks == engine.rank]
    engine.write_rows([RowBlock(n, 0, initial(case, n)) for n in mine])
    return engine


def device_of(kernels: str, nvshmem: str, rank: int, ranks: int) -> EmulatedDevice:
    """The emulated device of a rank of two nodes."""
    return EmulatedDevice(kernels, nvshmem, node_of(rank, ranks))


def serve_on_both(
    rank: int, group: Any, cases: list[tuple[Case, Plan]], kernels: str, nvshmem: str
) -> list[list[dict[str, Any]]]:
    """Of each case outputs, rows and counters of an engine on a device, with the gets it made, and
    the same of one on the CPU."""
    found = []
    for case, plan in cases:
        devices = (device_of(kernels, nvshmem, rank, case.ranks), Cpu())
        found.append([_serve(rank, group, case, plan, nvshmem, device) for device in devices])
    return found


def _serve(
    rank: int, group: Any, case: Case, plan: Plan, nvshmem: str, device: Device
) -> dict[str, Any]:
    engine = start(case, plan, group, device)
    fake = FakeNvshmem(nvshmem)  # type: ignore[arg-type]
    before, outputs = fake.counts().gets, []
    for step in range(case.steps):
        fake.order(case.seed + step)
        outputs.append(engine(batch_on(device, case, step, rank)).detach().cpu())
    gets = fake.counts().gets - before
    tables = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    counted = engine.counters.to_dict()
    elsewhere = sum(
        count
        for owner, count in enumerate(counted["accessed_rows"])
        if node_of(owner, case.ranks) != node_of(rank, case.ranks)
    )
    engine.close()
    return {
        "outputs": outputs,
        "tables": tables,
        "counted": counted,
        "gets": gets,
        "elsewhere": elsewhere,
        "left": fake.counts().left,
    }


def train_on_both(
    rank: int, group: Any, cases: list[tuple[Case, Plan]], kernels: str, nvshmem: str
) -> list[list[dict[str, Any]]]:
    """Of each case what training made on a device, and on CPU ranks whose gradients go to their
    owners each by itself, as here."""
    found = []
    for case, plan in cases:
        raw = replace(plan, workload=replace(plan.workload, fetch="raw"))
        on_device = device_of(kernels, nvshmem, rank, case.ranks)
        given = ((plan, on_device), (raw, Cpu()))
        by_weights = plan.workload.fetch == "distinct"  # whose rows can be had again in backward
        found.append(
            [_train(rank, group, case, of, nvshmem, device, by_weights) for of, device in given]
        )
    return found


def _train(
    rank: int,
    group: Any,
    case: Case,
    plan: Plan,
    nvshmem: str,
    device: Device,
    by_weights: bool,
) -> dict[str, Any]:
    engine = start(case, plan, group, device)
    fake, outputs, weight_grads = FakeNvshmem(nvshmem), [], []  # type: ignore[arg-type]
    for step in range(case.steps):
        fake.order(case.seed + step)
        batch = batch_on(device, case, step, rank)
        weights = batch.weights_or_none()
        if weights is not None and by_weights:
            weights.requires_grad_()
        with engine.accumulate() if step == 1 else nullcontext():
            out = engine(batch)
            out.backward(gradient_of(case, step, rank, out))
        with torch.no_grad():
            outputs += [out.detach().clone(), engine(batch_on(device, case, step + 7, rank))]
        if weights is not None and weights.grad is not None:
            weight_grads.append(weights.grad)
    tables = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    assert engine.unequal_replicas() == []
    counted = engine.counters.to_dict()
    engine.close()
    return {
        "outputs": outputs,
        "weight_grads": weight_grads,
        "tables": tables,
        "counted": counted,
        "left": fake.counts().left,
    }


def train_after_late_updates(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str
) -> bool:
    """Whether a rank looks up what was updated, where the first rank takes its time for that."""
    raw = replace(plan, workload=replace(plan.workload, fetch="raw"))
    found = []
    update = Gradients._update

    def late(self: Gradients, *arguments: Any) -> None:
        time.sleep(0.05)
        update(self, *arguments)

    on_device = device_of(kernels, nvshmem, rank, case.ranks)
    given: list[tuple[Plan, Device]] = [(plan, on_device), (raw, Cpu())]
    for of, device in given:
        engine, outputs = start(case, of, group, device), []
        with patch.object(Gradients, "_update", late if rank == 0 else update):
            for step in range(case.steps):
                out = engine(batch_on(device, case, step, rank))
                out.backward(gradient_of(case, step, rank, out))
                outputs.append(out.detach())
        found.append(torch.cat(outputs))
        engine.close()
    return torch.equal(*found)


def told_nodes(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str
) -> list[str]:
    """What a rank does in a step that orders it against other nodes."""
    device = device_of(kernels, nvshmem, rank, case.ranks)
    engine, done = start(case, plan, group, device), list[str]()
    collective, update = Group.start, Gradients._update

    def updated(self: Gradients, *arguments: Any) -> None:
        done.append("update")
        update(self, *arguments)

    def started(self: Group, *arguments: Any, action: str, **options: Any) -> Any:
        done.append(action)
        return collective(self, *arguments, action=action, **options)

    out = engine(batch_on(device, case, 0, rank))
    with (
        patch.object(device, "synchronize", lambda: done.append("device is done")),
        patch.object(Group, "start", started),
        patch.object(Gradients, "_update", updated),
    ):
        out.backward(gradient_of(case, 0, rank, out))
    engine.close()
    return done


def train_until_a_death(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str, at: str
) -> str:
    """The last rank is killed in its second step, when it comes to `at`."""
    engine = start(case, plan, group, device_of(kernels, nvshmem, rank, case.ranks), 6)
    with dying(engine, at, dies=rank == case.ranks - 1):
        for step in range(3):
            out = engine(batch_on(engine.device, case, step, rank))
            out.backward(gradient_of(case, step, rank, out))
    return "nobody died"


def die_before_gradients_are_brought(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str, said: str
) -> str:
    """The last rank is killed in its second step, after all were told that gradients are there and
    before the others bring its own; what they say on stderr is in a file of their own."""
    os.dup2(os.open(f"{said}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    engine, times = start(case, plan, group, device_of(kernels, nvshmem, rank, case.ranks), 3), 0

    def late(self: GradientGets, *arguments: Any) -> Any:
        nonlocal times
        times += 1
        if times == 2:
            if rank == case.ranks - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1)
        return brought(self, *arguments)

    brought = GradientGets._bring
    with patch.object(GradientGets, "_bring", late):
        for step in range(3):
            out = engine(batch_on(engine.device, case, step, rank))
            out.backward(gradient_of(case, step, rank, out))
    return "nobody died"


def train_without_room(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str
) -> str:
    """NVSHMEM has no memory left when the first gradients are to be left for others."""
    engine = start(case, plan, group, device_of(kernels, nvshmem, rank, case.ranks))
    out = engine(batch_on(engine.device, case, 0, rank))
    operators = Mock(wraps=native.ops())
    operators.allocate_symmetric.side_effect = RuntimeError("no memory")
    with patch("oper.runtime.memory.symmetric_memory.native.ops", lambda: operators):
        out.backward(gradient_of(case, 0, rank, out))
    return "there was room"


def serve_until_a_death(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str, said: str
) -> str:
    """The last rank is killed when tables are written; the others look up until they are told, what
    they say on stderr in a file of their own under `said`."""
    os.dup2(os.open(f"{said}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    engine = start(case, plan, group, device_of(kernels, nvshmem, rank, case.ranks), 3)
    if rank == case.ranks - 1:
        engine(batch_on(engine.device, case, 0, rank))
        os.kill(os.getpid(), signal.SIGKILL)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        engine(batch_on(engine.device, case, 0, rank))
        time.sleep(0.01)
    return "nobody told"


def wait_for_a_death(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str
) -> str:
    """The last rank is killed while nobody looks up; then the others do."""
    engine = start(case, plan, group, device_of(kernels, nvshmem, rank, case.ranks), 3)
    if rank == case.ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(6)
    engine(batch_on(engine.device, case, 0, rank))
    return "nobody told"


def refused(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str
) -> torch.Tensor:
    """An engine that cannot be made."""
    engine = start(case, plan, group, device_of(kernels, nvshmem, rank, case.ranks))
    return engine(batch_on(engine.device, case, 0, rank))


def start_of_version(
    rank: int,
    group: Any,
    case: Case,
    plan: Plan,
    kernels: str,
    nvshmem: str,
    versions: list[int],
) -> str:
    """Start where each rank's NVSHMEM says that it is of this version."""
    device = device_of(kernels, nvshmem, rank, case.ranks)
    device.load_nvshmem()
    FakeNvshmem(nvshmem).version(versions[rank])  # type: ignore[arg-type]
    start(case, plan, group, device).close()
    return ""


def bad_ids(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str
) -> tuple[bool, str]:
    """A batch with an id out of range on rank 0 reads row 0 there instead, as it does where that is
    allowed; and what is said of it with the next batch."""
    device = device_of(kernels, nvshmem, rank, case.ranks)
    found, said = [], ""
    for bounds in ("ignore", "fatal"):
        engine = start(case, plan, group, device, bounds=bounds)
        batch = batch_on(device, case, 0, rank)
        if rank == 0:
            batch.values()[3] = 10**6
        found.append(engine(batch))
        if bounds == "ignore":
            engine.close()
    try:
        engine(batch_on(device, case, 1, rank))
    except OperError as error:
        said = str(error)
    return torch.equal(*found), said


def two_engines(
    rank: int, group: Any, case: Case, plan: Plan, kernels: str, nvshmem: str
) -> list[bool]:
    """Two engines at once, and a third after one is closed: whether each says the same."""
    device = device_of(kernels, nvshmem, rank, case.ranks)
    first, second = (start(case, plan, group, device) for _ in range(2))
    batch = batch_on(device, case, 0, rank)
    expected = first(batch)
    same = [torch.equal(second(batch), expected)]
    first.close()
    third = start(case, plan, group, device)
    same += [torch.equal(engine(batch), expected) for engine in (second, third)]
    second.close()
    third.close()
    return same
