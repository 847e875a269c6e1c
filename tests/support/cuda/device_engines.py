"""What ranks with engines on devices do in tests, beside engines on the CPU."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import strategies as st

from oper.base import native
from oper.base.errors import OperError
from oper.base.free_memory import FreeMemory, free_memory, machine_memory_bytes
from oper.plan.plan import Plan
from oper.runtime.comm.group import Group
from oper.runtime.comm.shared_segment import DeviceSegment
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import Cpu, Cuda, Device, OnTheWay, Result
from oper.runtime.memory.step_capture import Piece, StepCapture
from oper.runtime.table_io import RowBlock, RowRange
from tests.support.cuda.fake_nvshmem import FakeNvshmem
from tests.support.cuda.plain_batch import PlainBatch
from tests.support.cuda.recorded_graph import Memory, Recorded, recording
from tests.support.runtime.engine_cases import (
    Case,
    batch_parts,
    gradient_of,
    initial,
    module_tables,
    optimizer_of,
)


@st.composite
def served_cases(draw: st.DrawFn, ranks: list[int], dims: list[int], bags: list[str]) -> Case:
    """Any case for inference, with one of the numbers of ranks, and of the kinds of bags."""
    pooling = draw(st.sampled_from(["sum", "mean", "none"]))
    return Case(
        draw(st.integers(0, 10_000)),
        draw(st.sampled_from(ranks)),
        pooling=pooling,
        weighted=pooling != "none" and draw(st.booleans()),
        dtype=draw(st.sampled_from(["fp32", "fp16", "bf16", "int8"])),
        dims=tuple(draw(st.lists(st.sampled_from(dims), min_size=1, max_size=3))),
        bags=draw(st.sampled_from(bags)),
    )


class EmulatedDevice(Cuda):
    """Host memory stands for a device's, kernels and driver are emulated: all of `Cuda` but what is
    torch's."""

    stream = 0

    def __init__(self, library: str, nvshmem: str = "", node: int = 0) -> None:
        """`nvshmem`: the library of the kernels for it, with the fake, for which this rank is on
        `node`."""
        native.ops().load_device_library(library)
        self._nvshmem, self._node = nvshmem, node
        self.torch_device = torch.device("cpu")
        self.architecture, self.name = "sm_90", "emulated"
        self.kept: list[int] = []  # where the tensors are that were to be kept
        self.captures = False  # whether a graph is captured
        self._recorded = Memory()  # of a step's pieces

    def ops(self) -> Any:
        return torch.ops.oper_emulated  # and none of the CPU's, which would take this memory too

    def load_nvshmem(self) -> None:
        if not self._nvshmem:
            raise OperError("there is no NVSHMEM")
        native.ops().load_nvshmem_library(self._nvshmem, "")
        FakeNvshmem(Path(self._nvshmem)).node(self._node)

    def segment(self, bytes: int, used_bytes: int) -> DeviceSegment:
        segment = DeviceSegment.create(bytes, self.torch_device)
        segment.zero()
        return segment

    def check_no_capture(self) -> None:
        captures = patch("torch.cuda.is_current_stream_capturing", return_value=self.captures)
        with captures:  # torch's own, of a build without CUDA, raises
            super().check_no_capture()

    @contextmanager
    def beside(self) -> Iterator[None]:
        yield

    def _captures_here(self) -> bool:
        return True

    def pieces(self) -> Callable[[], Piece]:
        memory = self._recorded
        return lambda: Recorded(memory)

    def captured(self, work: Callable[[], Result]) -> tuple[StepCapture, Result]:
        self._recorded = Memory()
        with recording(self._recorded):
            return super().captured(work)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        self.kept += [tensor.data_ptr() for tensor in tensors]

    def bring(self, tensor: torch.Tensor) -> OnTheWay:
        self.check_no_copies()
        return OnTheWay(tensor.clone())

    def written_by_it(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        self.check_no_copies()
        return tensor.to(self.torch_device)

    def memory_bytes(self, ranks: int) -> int:
        return machine_memory_bytes()

    def free_memory(self) -> list[FreeMemory]:
        return free_memory()

    def done(self, seconds: float) -> bool:
        return bool(torch.ops.oper.stream_is_done(0, int(1000 * seconds), self.torch_device))

    def point(self) -> Any:
        return None

    def after(self, points: Iterable[Any]) -> None:
        pass

    def synchronize(self) -> None:
        pass


def device_of(library: str | None) -> Device:
    """The first CUDA device; emulated, if a library of emulated kernels is given."""
    return Cuda("cuda:0") if library is None else EmulatedDevice(library)


def start(case: Case, plan: Plan, group: Any, device: Device, **options: Any) -> EmbeddingEngine:
    """An engine whose tables have their initial values."""
    engine = EmbeddingEngine(
        plan, module_tables(case), group=group, weighted=case.weighted, deadline_seconds=60,
        device=device, **options,
    )  # fmt: skip
    mine = [n for n in range(len(case.rows)) if n % engine.ranks == engine.rank]
    engine.write_rows([RowBlock(n, 0, initial(case, n)) for n in mine])
    return engine


def batch_on(device: Device, case: Case, step: int, rank: int, turned: bool = False) -> PlainBatch:
    """A rank's batch in a step; where `turned`, with its features in another order, and one more
    that the module does not read."""
    batch = PlainBatch(**batch_parts(case, step, rank))
    if turned:
        batch = batch.permute([0, *range(len(batch.keys()) - 1, -1, -1)])
        batch.keys()[0] = "other"
    parts = {
        name: None if given is None else given.to(device.torch_device)
        for name, given in (
            ("values", batch.values()),
            ("weights", batch.weights_or_none()),
            ("lengths", batch.lengths_or_none()),
            ("offsets", batch.offsets_or_none()),
        )
    }
    return PlainBatch(batch.keys(), stride=batch.stride(), **parts)  # type: ignore[arg-type]


def serve_on_both(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None, nodes: Any = None
) -> list[dict[str, Any]]:
    """Outputs, rows and counters of an engine on a device, and the same of one on the CPU."""
    devices = (device_of(library), Cpu())
    return [_serve(rank, group, case, plan, device, nodes) for device in devices]


def _serve(
    rank: int, group: Any, case: Case, plan: Plan, device: Device, nodes: Any
) -> dict[str, Any]:
    engine = start(case, plan, group, device, nodes=nodes)
    outputs = [
        engine(batch_on(device, case, step, rank, turned=step % 2 == 1)).detach().cpu()
        for step in range(case.steps)
    ]
    tables = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    assert engine.unequal_replicas() == []
    counted = engine.counters.to_dict()
    engine.close()
    return {"outputs": outputs, "tables": tables, "counted": counted}


def serve_after_a_death(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None
) -> dict[str, Any]:
    """Rank 1 is killed once tables are written; what the others look up then, and the error of what
    ranks do together."""
    device = device_of(library)
    engine = start(case, plan, group, device)
    before = engine(batch_on(device, case, 0, rank)).cpu()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while engine.node.liveness.alive(1):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    after, begun, error = engine(batch_on(device, case, 0, rank)).cpu(), time.monotonic(), ""
    try:
        engine.read_rows([])
    except OperError as lost:
        error = str(lost)
    return {
        "equal": torch.equal(before, after),
        "error": error,
        "seconds": time.monotonic() - begun,
    }


# The steps of an update, of which all but the last are accumulated.
Schedule = Sequence[Sequence[int]]


def train_on_both(
    rank: int,
    group: Any,
    case: Case,
    plan: Plan,
    schedule: Schedule,
    library: str | None,
    nodes: Any = None,
    new_plans: Sequence[Plan] = (),
) -> list[dict[str, Any]]:
    """Outputs, gradients of weights, rows, optimizer states and counters of training on a device,
    and the same of the CPU. Rows migrate to one of the new plans after the other, if there are any,
    between the updates."""
    given = (case, plan, schedule, new_plans, nodes)
    return [_train(rank, group, *given, device) for device in (device_of(library), Cpu())]


def _train(
    rank: int,
    group: Any,
    case: Case,
    plan: Plan,
    schedule: Schedule,
    new_plans: Sequence[Plan],
    nodes: Any,
    device: Device,
) -> dict[str, Any]:
    engine = start(case, plan, group, device, nodes=nodes, spare=3.0 * bool(new_plans))
    outputs, weight_grads = [], []
    migrations = (engine.migrate(new, 2000) for new in new_plans)
    migration = next(migrations, None)
    for steps in schedule:
        if migration is not None and not migration.step():
            migration = next(migrations, None)
        for step in steps:
            batch = batch_on(device, case, step, rank)
            weights = batch.weights_or_none()
            if weights is not None:
                weights.requires_grad_()
            with engine.accumulate() if step != steps[-1] else nullcontext():
                out = engine(batch)
                grad = gradient_of(case, step, rank, out.cpu()).to(out.device)
                out.backward(grad)
            outputs.append(out.detach().cpu())
            if weights is not None:
                assert weights.grad is not None
                weight_grads.append(weights.grad.cpu())
    wanted = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
    tables, states = engine.read_rows(wanted), []
    for name in ("momentum1", "exp_avg_sq"):
        having = [r for r in wanted if name in optimizer_of(case, r.table).state_slices(1)]
        states += engine.read_rows(having, name) if having else []
    assert engine.unequal_replicas() == []
    assert next(migrations, None) is None, "too few steps for all migrations to begin"
    counted = engine.counters.to_dict()
    engine.close()
    return {
        "outputs": outputs,
        "weight_grads": weight_grads,
        "tables": tables,
        "states": states,
        "counted": counted,
    }


@contextmanager
def dying(engine: EmbeddingEngine, at: str, dies: bool) -> Iterator[None]:
    """Inside, this rank is killed where it `dies`: when it comes for the second time to signal
    `at`, or to a collective for that."""
    post, collective = engine.signals.post, Group.start
    seen: list[str] = []

    def reach(what: str) -> None:
        seen.append(what)
        if dies and seen.count(at) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def posted(counter: str, value: int) -> None:
        reach(counter)
        post(counter, value)

    def started(self: Group, *arguments: Any, action: str, **options: Any) -> Any:
        reach(action.partition(" (step")[0])
        return collective(self, *arguments, action=action, **options)

    with patch.object(engine.signals, "post", posted), patch.object(Group, "start", started):
        yield


def train_until_a_death(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None, at: str, nodes: Any = None
) -> str:
    """Rank 1 is killed in its second step, when it comes to `at`; what the others say."""
    engine = start(case, plan, group, device_of(library), nodes=nodes)
    with dying(engine, at, dies=rank == 1):
        for step in range(3):
            out = engine(batch_on(engine.device, case, step, rank))
            out.backward(gradient_of(case, step, rank, out.cpu()).to(out.device))
    return "nobody died"
