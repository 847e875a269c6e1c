"""Steps while rows migrate, beside steps of the same ranks while none do.

26 Criteo-Kaggle tables at a tenth of their rows, one id per bag, Zipf 1.05, a thread a rank. Two
plans: one from the first half of a log in which a share of the accesses moves to other rows, and
what `oper replan` makes of it for the second half, or a plan from scratch. The model trains by the
first, and its rows migrate to the other and back, a step of the migration after each step of
training. A round is the steps before, those on the way, and as many after; its ratio is the median
step on the way over the median of those beside it, of the slowest rank. Times of `oper.migrate`
itself, and of its first step, which makes the map that follows, are apart. With `--tier` all tables
are in the tier, of which each rank caches a tenth; two ranks of dim 16 alone.

    python -m benchmarks.runtime.migration [--tier] [--json] [--scale 0.01]
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import oper
from benchmarks.common import parser, publish
from benchmarks.runtime import ranks
from benchmarks.runtime.step_inputs import (
    EXTRA_MEMORY,
    ZIPF,
    Cell,
    make_log,
    measure_topology,
    read_batches,
    recipe_of,
    run_oper,
)
from oper.base.formatting import format_bytes
from oper.cli.shared.console import new_table

DEADLINE_SECONDS = 1200.0
DRIFT = 0.3
CELLS = (Cell(2, 16, 8192), Cell(2, 64, 8192, "rowwise_adagrad"), Cell(4, 64, 8192))
BYTES_PER_STEP = (1 << 16, 1 << 18, 1 << 20, 1 << 22)
STEPS, ROUNDS = 12, 3


def make_plans(cell: Cell, scale: float, folder: Path, tier: bool) -> list[Path]:
    """The plan of the first half, its replan for the second, and a plan from scratch for that."""
    windows = folder / f"windows-{cell.dim}-{cell.optimizer}"
    if not windows.exists():
        sizes = ("--scale", scale, "--dim", cell.dim, "--zipf", ZIPF)
        run_oper(
            "synth",
            "criteo-kaggle",
            *sizes,
            "--counts",
            "--windows",
            2,
            "--drift",
            DRIFT,
            "-o",
            windows,
        )
    topology: Any = measure_topology(cell.world_size, 4 * cell.dim, folder)
    topology = f"cpu:{cell.world_size}" if tier else topology  # what is measured has no tier
    how: list[Any] = ["--topology", topology, "--mode", "training", "--fetch", cell.fetch]
    how += ["--batch-size", cell.world_size * cell.batch]
    how += ["--tier", "all"] if tier else ["--extra-memory", EXTRA_MEMORY]
    plans = [
        folder / f"{name}-{cell.world_size}-{windows.name}"
        for name in ("first", "again", "scratch")
    ]
    run_oper("plan", f"{windows}@0", *how, "-o", plans[0], "--force")
    run_oper("replan", plans[0], f"{windows}@1", "--horizon", 100_000, "-o", plans[1], "--force")
    run_oper("plan", f"{windows}@1", *how, "-o", plans[2], "--force")
    return plans


def measure_rank(
    rank: int, cell: Cell, plans: tuple[Path, Path], log: Path, scale: float, tier: bool
) -> dict[int, list[dict[str, Any]]]:
    """The steps of one rank on the way to the other plan and back, and those beside them, by the
    bytes of a step of the migration."""
    from benchmarks.runtime import torchrec_and_oper_steps as sides

    sides.quiet()
    tables = recipe_of(cell, scale).tables
    batches = read_batches(log, tables, rank, cell.world_size, cell.batch)
    cache = oper.CacheSettings() if tier else None
    model = oper.shard(sides.make_module(tables, cell.what), plans[0], cache=cache)
    step = sides.step_of(model, cell, sides.fixed_gradient(tables, cell))
    loaded = [oper.Plan.load(plan) for plan in plans]

    def seconds(migration: Any, count: int) -> list[float]:
        found = []
        for batch in sides.fresh(batches, 0, count):
            dist.barrier()
            start = time.perf_counter()
            step(batch)
            if migration is not None:
                migration.step()
            taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            found.append(float(taken))
        return found

    def measure(bytes_per_step: int) -> list[dict[str, Any]]:
        rounds = []
        for turn in range(2 * ROUNDS):
            before = seconds(None, STEPS)
            start = time.perf_counter()
            migration = oper.migrate(model, loaded[1 - turn % 2], bytes_per_step=bytes_per_step)
            made = time.perf_counter() - start
            first, *others = seconds(migration, min(migration.steps, STEPS))
            migration.finish()
            rounds.append(
                {
                    "migrate_seconds": made,
                    "first_step_seconds": first,
                    "beside": before + seconds(None, STEPS),
                    "on_the_way": others,
                    "rows": migration.rows,
                    "steps": migration.steps,
                    "bytes": int(migration.bytes.sum()),
                }
            )
        return rounds

    seconds(None, 3)
    return {most: measure(most) for most in BYTES_PER_STEP}


def line_of(cell: Cell, kind: str, most: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """What is printed and saved of a measurement."""
    moved = [r for r in rounds if r["on_the_way"]]
    ratios = [statistics.median(r["on_the_way"]) / statistics.median(r["beside"]) for r in moved]
    one = rounds[0]
    return {
        "ranks": cell.world_size,
        "dim": cell.dim,
        "optimizer": cell.optimizer,
        "plan": kind,
        "bytes_per_step": most,
        "rows": one["rows"],
        "bytes": one["bytes"],
        "steps": one["steps"],
        "ratio": statistics.median(ratios) if ratios else None,
        "ratios": ratios,
        "step_ms": 1e3 * statistics.median([s for r in rounds for s in r["beside"]]),
        "first_step_ms": 1e3 * statistics.median([r["first_step_seconds"] for r in rounds]),
        "migrate_ms": 1e3 * statistics.median([r["migrate_seconds"] for r in rounds]),
    }


def table(lines: list[dict[str, Any]]) -> Any:
    """A line for each cell, kind of plan and bytes of a step."""
    made = new_table(
        "ranks",
        "dim",
        "plan",
        "rows",
        "bytes",
        "a step",
        "steps",
        "step",
        "on the way",
        "first",
        "migrate()",
    )
    for of in lines:
        ratio = "" if of["ratio"] is None else f"{of['ratio']:.2f}"
        made.add_row(
            str(of["ranks"]),
            str(of["dim"]),
            of["plan"],
            f"{of['rows']:,}",
            format_bytes(of["bytes"]),
            format_bytes(of["bytes_per_step"]),
            f"{of['steps']:,}",
            f"{of['step_ms']:.1f} ms",
            ratio,
            f"{of['first_step_ms']:.0f} ms",
            f"{of['migrate_ms']:.0f} ms",
        )
    return made


def main() -> None:
    made = parser(__doc__, scale=0.1)
    made.add_argument("--tier", action="store_true")
    options = made.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for cell in CELLS[:1] if options.tier else CELLS:
            log = make_log(options.scale)
            first, again, scratch = make_plans(cell, options.scale, Path(name), options.tier)
            for kind, other in (("replanned", again), ("from scratch", scratch)):
                given = (cell, (first, other), log, options.scale, options.tier)
                found = ranks.run(
                    measure_rank, cell.world_size, *given, deadline_seconds=DEADLINE_SECONDS
                )
                lines += [line_of(cell, kind, most, of) for most, of in found[0].items()]
    publish(options, {"lines": lines}, lambda: table(lines))


if __name__ == "__main__":
    main()
