"""What it takes of a training step to mark the rows that it touches, for incremental saves.

The step of training_step.py, OPER's side alone, on 2 CPU ranks of one thread each. Blocks of STEPS
steps are run in pairs, in random order: with rows marked, and without. A cost is the mean of the
differences within pairs, over the time without, of the processor time of both ranks, with its 95 %
interval (Student's t).

    python -m benchmarks.runtime.marking [--rounds 30] [--json] [--scale 0.1]
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import parser, publish, with_interval
from benchmarks.runtime import ranks
from benchmarks.runtime.monitor import paired
from benchmarks.runtime.step_inputs import Cell, make_log, make_plan, read_bags, recipe_of
from oper.cli.shared.console import new_table

STEPS = 40  # of a block
CELLS = (Cell(2, 16, 8192), Cell(2, 64, 8192, "rowwise_adagrad"))
DEADLINE_SECONDS = 1800.0


def measure_rank(
    rank: int, cell: Cell, plan: Path, log: Path, scale: float, rounds: int
) -> tuple[dict[str, list[tuple[float, float]]], float]:
    """Processor and wall seconds a step of each block, with rows marked and without; the rows that
    a step of both ranks updates."""
    from benchmarks.runtime import torchrec_and_oper_steps as sides

    sides.quiet()
    tables = recipe_of(cell, scale).tables
    batches = read_bags(log, tables, rank, cell)
    model = sides.oper_model(sides.make_module(tables, cell.what), plan)
    step = sides.step_of(model, cell, sides.fixed_gradient(tables, cell))
    engine = sides.engine_of(model)

    def block(marks: bool) -> tuple[float, float]:
        if marks:
            engine.begin_touched()
        taken = sides.fresh(batches, 0, STEPS)
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        for batch in taken:
            step(batch)
        dist.barrier()
        found = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall]) / STEPS
        dist.all_reduce(found)
        engine.end_touched()
        return float(found[0]), float(found[1]) / cell.world_size

    block(True)
    random = np.random.default_rng(0)  # the same order on all ranks
    turns = {"without": False, "marked": True}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name in random.permutation(list(turns)).tolist():
            seconds[name].append(block(turns[name]))
    rows = torch.tensor(engine.counters.to_dict()["updated_rows"] / engine.steps)
    dist.all_reduce(rows)
    return seconds, float(rows)


def measure(cell: Cell, scale: float, rounds: int, folder: Path) -> dict[str, Any]:
    """A cell's costs."""
    plan, _ = make_plan(cell, scale, folder)
    given = (cell, plan, make_log(scale), scale, rounds)
    each = ranks.run(measure_rank, cell.world_size, *given, deadline_seconds=DEADLINE_SECONDS)
    found, rows = each[0]
    without = np.array(found["without"])
    return {
        **cell.describe(),
        "step_ms": 1e3 * float(np.median(without[:, 1])),
        "marked_rows": rows,
        "processor": paired(found, "marked").tolist(),
        "seconds": found,
    }


def table(cells: list[dict[str, Any]]) -> Any:
    """A line for each cell."""
    made = new_table("dim", "optimizer", "step", "rows marked", "of processor time")
    for cell in cells:
        rows, step = f"{cell['marked_rows']:,.0f}", f"{cell['step_ms']:.1f} ms"
        made.add_row(
            str(cell["dim"]),
            cell["optimizer"],
            step,
            rows,
            with_interval(cell["processor"]),
        )
    return made


def main() -> None:
    """Measure, and print a table."""
    made = parser(__doc__, scale=0.1)
    made.add_argument("--rounds", type=int, default=30)
    given = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cells = [measure(cell, given.scale, given.rounds, Path(folder)) for cell in CELLS]
    publish(given, {"cells": cells}, lambda: table(cells))


if __name__ == "__main__":
    main()
