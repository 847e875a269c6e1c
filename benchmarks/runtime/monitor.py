"""What `oper.monitor` takes of a training step, at its defaults.

The step of training_step.py, OPER's side alone, on 2 CPU ranks. Blocks of STEPS steps are run in
threes, in random order: without a monitor, with one at its defaults, and with one that counts every
step; monitors are made and closed outside of what is timed. A cost is the mean of the differences
to the block without, over the time without, of the processor time of both ranks, with its 95 %
interval (Student's t). `by parts` is the cost of a step that is counted over the steps of which one
is, and of the look at a step that is not: its interval is narrower, as its noise is divided too.
Merging, in which a step waits, and adding up and judging the plan, in a thread of rank 0, come once
in a period: `in all` has their processor time too, as a share of rank 0's. Stated are
milliseconds of the wall, after as many counted steps as a period has.

    python -m benchmarks.runtime.monitor [--rounds 12] [--json] [--scale 0.1]
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from wherever
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from scipy.stats import t

from benchmarks.common import parser, publish, with_interval
from benchmarks.runtime import ranks
from benchmarks.runtime.step_inputs import Cell, make_log, make_plan, read_bags, recipe_of
from oper.base.formatting import format_bytes
from oper.cli.shared.console import new_table

STEPS = 100  # of a block: one of them is counted at the defaults
CELLS = (Cell(2, 16, 8192), Cell(2, 64, 8192))
LOOKS = 100_000
DEADLINE_SECONDS = 1800.0


def measure_rank(
    rank: int, cell: Cell, plan: Path, log: Path, scale: float, rounds: int
) -> dict[str, Any]:
    """One rank: seconds a step of each block, [rounds], with a monitor and without."""
    import oper
    from benchmarks.runtime import torchrec_and_oper_steps as sides
    from oper.monitoring.monitor import PERIOD, SAMPLE_EVERY

    sides.quiet()
    tables = recipe_of(cell, scale).tables
    batches = read_bags(log, tables, rank, cell)
    model = sides.oper_model(sides.make_module(tables, cell.what), plan)
    step = sides.step_of(model, cell, sides.fixed_gradient(tables, cell))

    def block(every: int | None) -> tuple[float, float]:
        """Processor and wall seconds of a step; one of `every` is counted, or none."""
        monitor = None if every is None else oper.monitor(model, sample_every=every, period=None)
        taken = sides.fresh(batches, 0, STEPS)
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        for batch in taken:
            step(batch)
        dist.barrier()
        found = torch.tensor([time.process_time() - cpu, time.perf_counter() - wall]) / STEPS
        dist.all_reduce(found)  # processor time of all ranks
        if monitor is not None:
            monitor.close()
        return float(found[0]), float(found[1]) / cell.world_size

    block(None)
    random = np.random.default_rng(0)  # the same order on all ranks
    turns = {"without": None, "default": SAMPLE_EVERY, "counted": 1}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name in random.permutation(list(turns)).tolist():
            seconds[name].append(block(turns[name]))
    with oper.monitor(model, sample_every=1 << 30, period=None) as monitor:
        start = time.process_time()
        for _ in range(LOOKS):
            monitor._read(0, None)  # a step that is not counted
        look = (time.process_time() - start) / LOOKS
    with oper.monitor(model, sample_every=1, period=None) as monitor:
        ends: dict[str, list[tuple[float, float]]] = {"merge": [], "report": []}
        for end in ("report", "merge") * 2:
            for batch in sides.fresh(batches, 0, PERIOD // SAMPLE_EVERY):
                step(batch)
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            monitor.report() if end == "report" else monitor._gather()
            ends[end].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        "seconds": seconds,
        "ends": ends,
        "period": PERIOD,
        "sample_every": SAMPLE_EVERY,
        "look_seconds": look,
    }


def paired(seconds: dict[str, Any], name: str, which: int = 0) -> Any:
    """The cost of blocks of that name as a share of a step, and its 95 % interval: [3]."""
    without, having = (np.array(seconds[n])[:, which] for n in ("without", name))
    shares = (having - without) / without.mean()
    half = t.ppf(0.975, len(shares) - 1) * shares.std(ddof=1) / np.sqrt(len(shares))
    return shares.mean() + np.array([0.0, -half, half])


def measure(cell: Cell, scale: float, rounds: int, folder: Path) -> dict[str, Any]:
    plan, _ = make_plan(cell, scale, folder)
    arguments = (cell, plan, make_log(scale), scale, rounds)
    found = ranks.run(measure_rank, cell.world_size, *arguments, deadline_seconds=DEADLINE_SECONDS)
    first = found[0]
    seconds = first["seconds"]
    cpu, wall = (np.array(seconds["without"])[:, which].mean() for which in (0, 1))
    look = cell.world_size * first["look_seconds"] / cpu
    by_parts = paired(seconds, "counted") / first["sample_every"] + look
    ends = {name: np.median(first["ends"][name], axis=0) for name in ("merge", "report")}
    in_periods = ends["report"][0] / (first["period"] * cpu / cell.world_size)
    return {
        **cell.describe(),
        "rows": sum(table.rows for table in recipe_of(cell, scale).tables),
        "cpu_ms": 1e3 * float(cpu),
        "wall_ms": 1e3 * float(wall),
        "default_share": paired(seconds, "default").tolist(),
        "counted_share": paired(seconds, "counted").tolist(),
        "by_parts": by_parts.tolist(),
        "in_all": (by_parts + in_periods).tolist(),
        "merge_ms": (1e3 * ends["merge"]).tolist(),
        "report_ms": (1e3 * ends["report"]).tolist(),
        "seconds": seconds,
    }


def table(cells: list[dict[str, Any]]) -> Any:
    made = new_table("dim", "step", "counted step", "by parts", "in all", "merge; judge")
    for cell in cells:
        made.add_row(
            f"{cell['dim']}",
            f"{cell['wall_ms']:.1f} ms",
            *(with_interval(cell[name]) for name in ("counted_share", "by_parts", "in_all")),
            f"{cell['merge_ms'][1]:.0f}; {cell['report_ms'][1]:.0f} ms",
        )
    return made


def main() -> None:
    made = parser(__doc__, scale=0.1)
    made.add_argument("--rounds", type=int, default=12)
    given = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cells = [measure(cell, given.scale, given.rounds, Path(folder)) for cell in CELLS]
    rows = cells[0]["rows"]
    direct = ", ".join(with_interval(c["default_share"]) for c in cells)
    publish(
        given,
        {"cells": cells},
        lambda: table(cells),
        f"{rows:,} rows, whose counters take {format_bytes(4 * rows)} of a rank; blocks at the "
        f"defaults took {direct} longer",
    )


if __name__ == "__main__":
    main()
