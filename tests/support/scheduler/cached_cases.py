"""Training on cached rows, as ranks do it in the tests, to be compared with the unsharded model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from oper.base.free_memory import FreeMemory
from oper.plan.plan import Plan
from oper.runtime.migration.row_migration import RowMigration
from oper.runtime.table_io import RowBlock, RowRange
from oper.scheduler.cache_settings import CacheSettings
from oper.scheduler.training.cached_rows import source_of
from tests.support.runtime.engine_cases import (
    Case,
    batch_of,
    gradient_of,
    prepare,
    start,
)


@dataclass(frozen=True)
class Script:
    """What ranks do beside plain steps."""

    evaluate: tuple[int, ...] = ()  # after these steps: a look-up without gradients
    between: tuple[int, ...] = ()  # the same between forward and backward of these
    save: tuple[int, ...] = ()  # rows are read and written back
    untrained: tuple[int, ...] = ()  # a batch more is looked up, without a backward pass
    ahead: bool = False  # batches are prepared one ahead
    late: tuple[int, ...] = ()  # another batch is looked up between forward and backward
    held: tuple[int, ...] = ()  # the gradients of these are added to those of the next
    rates: tuple[float, ...] = (1.0,)  # by which learning rates are multiplied, in turn
    recount: tuple[int, ...] = ()  # before these the number of the optimizers' steps is set to 0
    moves: tuple[Plan, ...] = ()  # to which rows migrate in turn, a step after each update
    bytes_per_step: int = 1000
    moves_between: bool = False  # and a step between forward and backward

    def rate(self, step: int) -> float:
        return self.rates[step % len(self.rates)]

    def updates(self, steps: int) -> Iterator[list[int]]:
        """The steps of each update."""
        of_update: list[int] = []
        for step in range(steps):
            of_update.append(step)
            if step not in self.held:
                yield of_update
                of_update = []


def run_on_a_full_host(
    rank: int, group: Any, case: Case, plan: Plan, settings: CacheSettings, free: int
) -> Any:
    """`run_cached` where the host has so many bytes left, of which only the replay takes any."""
    left = [FreeMemory("the machine", "machine", free)]
    with patch("oper.scheduler.training.cached_rows.free_memory", return_value=left):
        return run_cached(rank, group, case, plan, settings, Script())


def run_cached(
    rank: int,
    group: Any,
    case: Case,
    plan: Plan,
    settings: CacheSettings,
    script: Script,
    nodes: Any = None,
) -> dict[str, Any]:
    """Outputs of all steps, the tables after them, and what was transmitted."""
    engine = start(case, plan, group, make_source=source_of(settings), nodes=nodes)
    outputs, weight_grads, evaluated = [], [], []
    batches = {}

    def prepared(step: int) -> Any:
        if step not in batches:
            batches[step] = batch_of(case, step, rank)
            if case.weighted:
                batches[step].weights().requires_grad_()
            ready[step] = prepare(engine, case, batches[step])
        return ready[step]

    coming = list(script.moves)
    migrations: list[RowMigration] = []

    def move() -> None:
        if migrations and not migrations[-1].done:
            migrations[-1].step()
        elif coming:
            migrations.append(engine.migrate(coming.pop(0), script.bytes_per_step))

    ready: dict[int, Any] = {}
    for step in range(case.steps):
        engine.learning_rates[:] = [script.rate(step) * b.optimizer.lr for b in engine.buckets]
        if step in script.recount:
            engine.optimizer_steps = 0
        given = prepared(step)
        if script.ahead and step + 1 < case.steps:
            prepared(step + 1)
        out = engine.lookup(given)
        outputs.append(out.detach().clone())
        if step in script.between:
            with torch.no_grad():
                engine(batch_of(case, step + 300, rank))
        if step in script.late:
            engine(batch_of(case, step + 100, rank))
        if script.moves_between and step - 1 not in script.held:
            move()
        grad = gradient_of(case, step, rank, out)
        if step in script.held:
            with engine.accumulate():
                out.backward(grad)
        else:
            out.backward(grad)
        if step not in script.held:
            move()
        weight_grads.append(batches[step].weights().grad if case.weighted else None)
        if step in script.untrained:
            engine(batch_of(case, step + 200, rank))
        if step in script.evaluate:
            with torch.no_grad():
                evaluated.append(engine(batch_of(case, step, rank)).clone())
        if step in script.save:
            wanted = [RowRange(n, 0, rows) for n, rows in enumerate(case.rows)]
            found = engine.read_rows(wanted)
            blocks = [RowBlock(n, 0, rows) for n, rows in enumerate(found)]
            engine.write_rows(blocks if rank == 0 else [])
    counted = engine.source.to_dict() if engine.source else {}
    tables = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    engine.close()
    return {
        "outputs": outputs,
        "weight_grads": weight_grads,
        "evaluated": evaluated,
        "tables": tables,
        "counted": counted,
        "moved": sum(migration.steps_made for migration in migrations),
    }
