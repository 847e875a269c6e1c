"""What ranks do in the tests of faults: each returns what went wrong, or None."""

import gc
import os
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from oper.base.errors import OperError
from oper.base.free_memory import FreeMemory
from oper.plan.plan import Plan
from oper.runtime.comm.group import Group
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.initial_values import fill_tables
from oper.runtime.table_io import RowBlock
from tests.support.runtime.engine_cases import Case, batch_of, gradient_of, module_tables, start
from tests.support.runtime.mortal_ranks import lose_this_process


def train(engine: EmbeddingEngine, case: Case, step: int) -> torch.Tensor:
    """A step from the case's gradient; its output."""
    out = engine(batch_of(case, step, engine.rank))
    out.backward(gradient_of(case, step, engine.rank, out))
    return out.detach()


def error_of(action: Callable[[], Any]) -> str | None:
    """The message of the OperError that an action ends with; None, if it does not."""
    try:
        action()
    except OperError as error:
        return str(error)
    return None


def start_each(
    rank: int, group, cases: list[Case], plans: list[Plan], options: list[dict[str, Any]]
) -> str | None:
    """Start engines, each rank with a case, plan and options of its own."""
    tables = module_tables(cases[rank])
    return error_of(lambda: EmbeddingEngine(plans[rank], tables, group=group, **options[rank]))


def lookup_each(
    rank: int, group, case: Case, plan: Plan, batches: list[Any], **options
) -> str | None:
    """Train, each rank from a batch of its own."""

    def step() -> None:
        out = start(case, plan, group, **options)(batches[rank])
        out.backward(torch.ones_like(out))

    return error_of(step)


def train_with_gradients(
    rank: int, group, case: Case, plan: Plan, spoil: int, column: int, value: float
) -> str | None:
    """A step with checked gradients, of which one of the rank `spoil` is not finite."""

    def step() -> None:
        out = start(case, plan, group, check_gradients=True)(batch_of(case, 0, rank))
        grad = torch.ones_like(out)
        if rank == spoil:
            grad[-1, column] = value
        out.backward(grad)

    return error_of(step)


def train_till_lost(
    rank: int, group, case: Case, plan: Plan, phase: str, victim: int, signal: int,
    deadline_seconds: float, nodes: tuple[int, ...] | None,
) -> tuple[str | None, float]:  # fmt: skip
    """Train while the victim sends itself a signal at the phase of a step, and how long it took
    from there to the error."""

    def reach(point: str) -> None:
        if rank == victim and point == phase:
            lose_this_process(signal)

    begun = time.monotonic()

    def work() -> None:
        nonlocal begun
        reach("join")
        engine = start(case, plan, group, deadline_seconds=deadline_seconds, nodes=nodes)
        post = engine.signals.post
        if rank == victim:
            engine.signals.post = lambda name, value: (reach(name), post(name, value))  # type: ignore
            start_exchange = Group.start

            def reach_exchange(self: Group, *arguments: Any, action: str, **others: Any) -> Any:
                reach(action)
                return start_exchange(self, *arguments, action=action, **others)

            Group.start = reach_exchange  # type: ignore[method-assign]
        begun = time.monotonic()
        for step in range(2):
            reach("forward")
            out = engine(batch_of(case, step, rank))
            reach("backward")
            out.backward(gradient_of(case, step, rank, out))
        reach("read tables")
        engine.read_rows([])

    return error_of(work), time.monotonic() - begun


def start_with_room(rank: int, group, case: Case, plan: Plan, room: list[int], nodes) -> str | None:
    """Start where each rank sees this much memory left."""
    left = [FreeMemory(f"the machine of {rank}", f"m{rank}", room[rank])]
    with mock.patch("oper.runtime.memory.device.free_memory", return_value=left):
        return error_of(lambda: start(case, plan, group, nodes=nodes))


def train_with_room(rank: int, group, case: Case, plan: Plan, tight: int) -> str | None:
    """A step in which one rank has no memory for its mailbox."""
    left = [FreeMemory("the machine", "machine", 100)]

    def step() -> None:
        engine = start(case, plan, group)
        none = mock.patch("oper.runtime.comm.shared_segment.free_memory", return_value=left)
        with none if rank == tight else nullcontext():
            train(engine, case, 0)

    return error_of(step)


def fill_wrongly(rank: int, group, case: Case, plan: Plan) -> str | None:
    """Give tables initial values, of which one cannot be made."""

    def refuse(rows: torch.Tensor) -> None:
        raise ValueError("no values for these")

    fills: list[Any] = [torch.nn.init.zeros_, refuse, torch.nn.init.zeros_]
    return error_of(lambda: fill_tables(start(case, plan, group), fills))


def write_wrongly(rank: int, group, case: Case, plan: Plan) -> str | None:
    """Write tables, rank 1 beyond a table's last row; then look up all the same."""
    engine = start(case, plan, group)
    blocks = [RowBlock(1, 1, torch.ones(1, case.dims[1]))] if rank == 1 else []
    error = error_of(lambda: engine.write_rows(blocks))
    with torch.no_grad():
        engine(batch_of(case, 0, rank))
    return error


def use_in_child(rank: int, group, case: Case, plan: Plan) -> list[str]:
    """What a forked child is told at each use; its parent trains on."""
    engine = start(case, plan, group)
    out = engine(batch_of(case, 0, rank))
    batch = engine.prepare(batch_of(case, 0, rank))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        uses = [
            lambda: engine.prepare(batch_of(case, 0, rank)),
            lambda: engine.lookup(batch),
            lambda: engine.read_rows([]),
            lambda: engine.write_rows([]),
        ]
        told = [error_of(use) or "nothing" for use in uses]
        engine.close()
        del engine, uses
        gc.collect()
        os.write(write, "\n".join(told).encode())
        os._exit(0)
    os.waitpid(child, 0)
    told = os.read(read, 1 << 16).decode().split("\n")
    os.close(read)
    os.close(write)
    out.backward(gradient_of(case, 0, rank, out))
    train(engine, case, 1)
    return told


def leftovers(rank: int, group, case: Case, plan: Plan) -> dict[str, Any]:
    """What is left of engines that were closed, and of some that were only dropped."""
    shared = shared_names()
    open_files, mapped, alive = [], [], []
    for number in range(4):
        engine = start(case, plan, group)
        train(engine, case, 0)
        closed = None
        if number % 2:
            engine.close()
            closed = len(os.listdir("/proc/self/fd"))
        told = error_of(lambda e=engine: train(e, case, 1)) if closed else None  # type: ignore
        watched = weakref.ref(engine)
        del engine
        gc.collect()
        alive.append(watched() is not None)
        open_files.append((closed, len(os.listdir("/proc/self/fd"))))
        mapped.append("oper-" in Path("/proc/self/maps").read_text(encoding="utf-8"))
    return {
        "open_files": open_files,
        "mapped": mapped,
        "alive": alive,
        "closed": told,
        "shared": shared_names() - shared,
    }


def shared_names() -> set[str]:
    """Names of shared memory, but for those that torch and multiprocessing take for a moment: tests
    of other processes may use them meanwhile."""
    names = {path.name for path in Path("/dev/shm").iterdir()}
    return {name for name in names if not name.startswith(("torch_", "sem."))}
