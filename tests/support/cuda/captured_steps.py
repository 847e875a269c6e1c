"""What ranks do in tests of steps that are captured, beside engines on the CPU."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from oper.base.errors import OperError
from oper.plan.plan import Plan
from oper.runtime.comm.progress_signals import Signals
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.device import Cpu, Device, OnTheWay
from oper.runtime.memory.step_room import device_segment
from oper.runtime.migration.row_migration import RowMigration
from oper.runtime.step_graph import StepGraph
from oper.runtime.table_io import RowRange
from tests.support.cuda.device_engines import EmulatedDevice, device_of, start
from tests.support.cuda.plain_batch import PlainBatch
from tests.support.runtime.engine_cases import Case, batch_parts, features_of, optimizer_of
from tests.support.runtime.shared_memory import mapped_device_segments

WARM_UP = 2  # steps that are run as they are

Parts = dict[str, Any]


def alike_parts(case: Case, step: int, rank: int, shape: int = 0, by_key: bool = False) -> Parts:
    """A rank's batch in a step, of as many samples and values as those of all steps: the bags of
    one, dealt anew, with other ids; where `by_key`, of each key as many."""
    rng = np.random.default_rng((case.seed, step, rank, shape, 9))
    first = batch_parts(case, 2 * shape, rank)
    tables = [n for n in range(len(case.rows)) for _ in features_of(case, n)]
    samples, lengths = first["stride"], first["lengths"].numpy().reshape(len(tables), -1)
    by_key = by_key or case.pooling == "none"
    dealt = lengths if by_key else lengths.flatten()
    rng.shuffle(dealt.T if by_key else dealt)
    lengths = dealt.reshape(len(tables), samples)
    counts = lengths.sum(axis=1)
    values = [
        rng.integers(0, case.rows[table], count) * (rng.random(count) < 0.6)
        for table, count in zip(tables, counts, strict=True)
    ]
    weights = first["weights"]
    return {
        "keys": first["keys"],
        "values": torch.from_numpy(np.concatenate(values)).to(first["values"].dtype),
        "weights": None if weights is None else torch.from_numpy(rng.permutation(weights.numpy())),
        "stride": samples,
        "lengths": torch.from_numpy(lengths.astype(np.int32).flatten()),
        "length_per_key": counts.tolist(),
    }


class Stepper:
    """Steps of an engine, each from the tensors of a batch and a gradient that are given."""

    def __init__(self, engine: EmbeddingEngine, device: Device, turned: bool = False) -> None:
        self.engine, self._device, self._turned = engine, device, turned
        self._batch: PlainBatch | None = None
        self._grad: torch.Tensor | None = None
        self._graph: StepGraph | None = None
        self.captures = 0

    def step(self, parts: Parts, grad: np.ndarray, captured: bool) -> tuple[Any, Any]:
        """Output and gradients of weights."""
        given, there = self.put(parts), torch.from_numpy(grad).to(self._device.torch_device)
        out_of_date = self._graph is not None and self._graph.out_of_date
        if not captured or out_of_date:
            self._graph = None if out_of_date else self._graph
            return self._run(given, there)
        if self._graph is None:
            self._batch, self._grad = self.put(parts), there.clone()
            batch, like = self._batch, self._grad
            self._graph = StepGraph([self.engine], lambda: self._run(batch, like))
            self.captures += 1
        assert self._batch is not None
        assert self._grad is not None
        static, static_grad = self._batch, self._grad

        def fill() -> dict[int, PlainBatch]:
            _copy(static, given)
            static_grad.copy_(there)
            return {id(static): given}

        return self._graph.run(fill, lambda found: [x if x is None else x.clone() for x in found])

    @property
    def graphs(self) -> int:
        """How many the step was captured as."""
        return 0 if self._graph is None else self._graph.pieces

    def _run(self, batch: PlainBatch, grad: torch.Tensor) -> tuple[Any, Any]:
        weights = batch.weights_or_none()
        if weights is not None:
            weights.grad = None
        out = self.engine(batch)
        if out.requires_grad:
            out.backward(grad.flatten()[: out.numel()].view_as(out))
        return out.detach(), None if weights is None else weights.grad

    def put(self, parts: Parts) -> PlainBatch:
        """A batch on the engine's device, in memory of its own."""
        on = self._device.torch_device
        there: dict[str, Any] = {
            name: part.to(on, copy=True) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        if there["weights"] is not None and self.engine.training:
            there["weights"].requires_grad_()
        batch = PlainBatch(**there)
        if self._turned and self._device.kind != "cpu":
            batch = _with_another_key(batch)
        return batch


def _with_another_key(batch: PlainBatch) -> PlainBatch:
    """The batch with its keys in another order, and one more that the module does not read."""
    counts = batch.length_per_key_or_none()
    assert counts is not None
    order = [0, *range(len(counts) - 1, -1, -1)]
    turned = batch.permute(order)
    turned.keys()[0] = "other"
    weights = turned.weights_or_none()
    return PlainBatch(
        turned.keys(),
        turned.values().detach(),
        None if weights is None else weights.detach().requires_grad_(weights.requires_grad),
        turned.stride(),
        lengths=turned.lengths_or_none(),
        length_per_key=[counts[key] for key in order],
    )


def _copy(into: PlainBatch, batch: PlainBatch) -> None:
    for old, new in zip(_tensors(into), _tensors(batch), strict=True):
        old.detach().copy_(new.detach())


def _tensors(batch: PlainBatch) -> list[torch.Tensor]:
    given = (batch.values(), batch.lengths_or_none(), batch.weights_or_none())
    return [each for each in given if each is not None]


# What happens in a step: (number, shape of its batch, whether it is captured or run again).
Schedule = Sequence[tuple[int, int, bool]]
STEPS = ((0, 0, False), (1, 0, False), (2, 0, True), (3, 0, True), (4, 1, False), (5, 0, True))


def train_captured_on_both(
    rank: int,
    group: Any,
    case: Case,
    plan: Plan,
    library: str | None,
    steps: Schedule = STEPS,
    turned: bool = False,
    between: Callable[[EmbeddingEngine, int], None] = lambda *_: None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Outputs, gradients of weights, rows, states and counters of training on a device, some of
    whose steps are captured, and the same of the CPU."""
    found = []
    for device in (device_of(library), Cpu()):
        engine = start(case, plan, group, device, **options)
        stepper = Stepper(engine, device, turned)
        outputs, weight_grads, counted = [], [], []
        for step, shape, captured in steps:
            between(engine, step)
            parts = alike_parts(case, step, rank, shape, by_key=turned)
            rng = np.random.default_rng((case.seed, step, rank, 10))
            grad = (rng.integers(-16, 17, 100_000) / 8).astype(np.float32)
            if engine.training:
                engine.learning_rates[:] = [rate * 0.9 for rate in engine.learning_rates]
            out, weight_grad = stepper.step(parts, grad, captured and device.kind != "cpu")
            outputs.append(out.cpu())
            weight_grads += [] if weight_grad is None or turned else [weight_grad.cpu()]
            if step == 3:
                counted.append(engine.counters.to_dict())
        wanted = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
        tables, states = engine.read_rows(wanted), []
        for name in ("momentum1", "exp_avg_sq"):
            having = [r for r in wanted if name in optimizer_of(case, r.table).state_slices(1)]
            states += engine.read_rows(having, name) if having and engine.training else []
        assert engine.unequal_replicas() == []
        found.append(
            {
                "outputs": outputs,
                "weight_grads": weight_grads,
                "tables": tables,
                "states": states,
                "counted": [*counted, engine.counters.to_dict()],
                "steps": engine.optimizer_steps if engine.training else 0,
                "captures": stepper.captures,
                "graphs": stepper.graphs,
            }
        )
        engine.close()
    return found


def touch_between(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None
) -> list[dict[str, Any]]:
    """Rows are marked as touched from the fourth step on, in the midst of captured ones."""
    found = list[torch.Tensor]()

    def between(engine: EmbeddingEngine, step: int) -> None:
        if step == 4:
            engine.begin_touched()
        if step == 6:
            wanted = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
            found.append(torch.cat([engine.touched_rows([each] * engine.ranks) for each in wanted]))

    schedule = [(step, 0, step >= 2) for step in range(7)]
    trained = train_captured_on_both(rank, group, case, plan, library, schedule, between=between)
    assert torch.equal(*found)
    assert found[0].any()
    return trained


def move_between(
    rank: int, group: Any, case: Case, plan: Plan, new: Plan, library: str | None
) -> list[dict[str, Any]]:
    """Rows migrate to a new plan while steps are run as graphs."""
    migrations: dict[int, RowMigration] = {}

    def between(engine: EmbeddingEngine, step: int) -> None:
        if step == 3:
            migrations[id(engine)] = engine.migrate(new, 2000)
        if id(engine) in migrations:
            migrations[id(engine)].step()

    schedule = [(step, 0, step >= 2) for step in range(24)]
    given = (rank, group, case, plan, library, schedule)
    with _nothing_let_go_in_captures():
        found = train_captured_on_both(*given, between=between, spare=3.0)
    assert all(migration.done for migration in migrations.values())
    return found


@contextmanager
def _nothing_let_go_in_captures() -> Iterator[None]:
    """AssertionError if shared memory of an emulated device dies while a step is captured: it would
    have to stay mapped until then."""
    captured = EmulatedDevice.captured

    def watched(self: EmulatedDevice, work: Callable[[], Any]) -> Any:
        def counted() -> Any:
            before, result = mapped_device_segments(), work()
            assert mapped_device_segments() == before
            return result

        return captured(self, counted)

    with (
        patch.object(EmulatedDevice, "captured", watched),
        patch("oper.runtime.memory.device._nothing_is_freed", nullcontext),
    ):
        yield


def use_rows_while_captured(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None
) -> list[str]:
    """Errors of steps that read rows, or need new shared memory, while they are captured."""
    engine, said = start(case, plan, group, device_of(library)), []
    stepper = Stepper(engine, engine.device)
    batch = stepper.put(alike_parts(case, 0, rank))
    stepper.step(alike_parts(case, 0, rank), np.ones(100_000, np.float32), False)
    before_use = []

    def read() -> None:
        engine.read_rows([RowRange(0, 0, 1)])

    def grow() -> None:
        device_segment(engine.device, "a test", 1)  # type: ignore[arg-type]

    def copy() -> None:
        engine.device.send(torch.zeros(1))

    for does in (read, grow, copy):

        def step(does: Callable[[], None] = does) -> None:
            engine(batch)
            does()

        engine.before_use = lambda: before_use.append(engine.device.capture)
        with pytest.raises(OperError) as error:
            StepGraph([engine], step)
        said.append(str(error.value))
        assert before_use.pop(0) is None  # held state dicts are written back before the capture
        before_use.clear()
    engine.before_use = None
    for number in range(3):
        stepper.step(alike_parts(case, number, rank), np.ones(100_000, np.float32), number > 0)
    assert stepper.captures == 1
    engine.close()
    return said


def two_batches_captured(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None, accumulated: bool
) -> None:
    """Steps of two batches each, of two updates or, where they are `accumulated`, of one."""
    device, tables = device_of(library), []
    for on in (device, Cpu()):
        engine = start(case, plan, group, on)
        stepper = Stepper(engine, on)
        static = [stepper.put(alike_parts(case, 0, rank)) for _ in range(2)]

        def both(batches: Sequence[PlainBatch], engine: Any = engine) -> None:
            with engine.accumulate() if accumulated else nullcontext():
                engine(batches[0]).square().sum().backward()
            engine(batches[1]).square().sum().backward()

        graph = None
        for step in range(5):
            given = [stepper.put(alike_parts(case, 2 * step + n, rank)) for n in range(2)]
            if step < WARM_UP or on is not device:
                both(given)
                continue
            graph = graph or StepGraph([engine], partial(both, static))
            for one, other in zip(static, given, strict=True):
                _copy(one, other)
            graph.run()
        assert engine.steps == (5 if accumulated else 10)
        tables.append(engine.read_rows([RowRange(n, 0, r) for n, r in enumerate(case.rows)]))
        engine.close()
    for one, other in zip(*tables, strict=True):
        assert torch.equal(one, other)


def die_in_a_captured_step(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None, at: str
) -> str:
    """Rank 1 is killed in the second step that is run as a graph, when it comes to signal `at`;
    what the others say."""
    post, seen = Signals.post, list[str]()

    def posted(self: Signals, counter: str, value: int) -> None:
        seen.append(counter)
        if rank == 1 and seen.count(at) == WARM_UP + 2:
            os.kill(os.getpid(), signal.SIGKILL)
        post(self, counter, value)

    device = device_of(library)
    with patch.object(Signals, "post", posted):
        stepper = Stepper(start(case, plan, group, device), device)
        for step in range(6):
            stepper.step(alike_parts(case, step, rank), np.ones(10_000, np.float32), step >= 2)
    return "nobody died"


def grow_beside_a_captured_step(
    rank: int, group: Any, case: Case, plan: Plan, library: str | None, times: int
) -> str:
    """Rank 1 has a larger batch than any before while rank 0's step is a graph; what is said."""
    device = device_of(library)
    stepper = Stepper(start(case, plan, group, device), device)
    for step in range(4):
        stepper.step(alike_parts(case, step, rank), np.ones(100_000, np.float32), step >= 2)
    larger = alike_parts(case, 4, rank)
    if rank == 1:  # memory is a multiple of 2 MiB
        larger["values"] = larger["values"].repeat_interleave(times)
        larger["lengths"] = times * larger["lengths"]
    try:
        for _ in range(2):  # others learn of it in the step after
            stepper.step(larger, np.ones(100_000, np.float32), rank == 0)
    except OperError as error:
        return str(error)
    return ""


def fail_while_captured(rank: int, group: Any, case: Case, plan: Plan, library: str | None) -> None:
    """A step that fails after it has held gradients back, while it is captured, leaves nothing."""
    tables = []
    for on in (device_of(library), Cpu()):
        engine = start(case, plan, group, on)
        stepper = Stepper(engine, on)
        static = stepper.put(alike_parts(case, 0, rank))

        def fails(engine: Any = engine, batch: PlainBatch = static) -> None:
            with engine.accumulate():
                engine(batch).square().sum().backward()
            raise ValueError("in the user's step")

        for step in range(4):
            if step == 2 and on.kind != "cpu":
                with pytest.raises(ValueError, match="in the user's step"):
                    StepGraph([engine], fails)
            engine(stepper.put(alike_parts(case, step, rank))).square().sum().backward()
        assert engine.steps == 4
        tables.append(engine.read_rows([RowRange(n, 0, r) for n, r in enumerate(case.rows)]))
        engine.close()
    for one, other in zip(*tables, strict=True):
        assert torch.equal(one, other)


def told_later(rank: int, group: Any, case: Case, plan: Plan, library: str | None) -> list[str]:
    """What is said of bad ids in steps 3, 4 and 9 of twelve, where the host looks at reports as
    late as it may."""
    engine, said = start(case, plan, group, device_of(library)), []
    stepper = Stepper(engine, engine.device)
    grad = np.ones(100_000, dtype=np.float32)
    stepper.step(alike_parts(case, 0, rank), grad, False)
    with patch.object(OnTheWay, "there", return_value=False):
        for number in range(12):
            parts = alike_parts(case, number, rank)
            if number in (3, 4, 9):
                parts["values"][1] = 10**6 + number
            try:
                stepper.step(parts, grad, True)
            except OperError as error:
                said.append(f"at {number}: {error}")
        try:
            engine.read_rows([RowRange(0, 0, 1)])
        except OperError as error:
            said.append(f"in the end: {error}")
    engine.close()
    return said


def refused(rank: int, group: Any, case: Case, plan: Plan, library: str | None) -> str:
    """What is said where a step of this plan is to be captured."""
    engine = start(case, plan, group, device_of(library))
    try:
        engine.training_step.to_capture()
    except OperError as error:
        return str(error)
    return ""
