"""The training step beside TorchRec's: forward, backward, update, on CPU ranks that share 2 cores.

26 Criteo-Kaggle tables at a tenth of their rows, one id per bag, Zipf 1.05, one thread per rank:
the EmbeddingBagCollection alone under DistributedModelParallel, KeyedJaggedTensor in, backward
from a fixed gradient (no loss is timed), the update in it. All sides live in the same ranks and
take turns: a block is a step that is not timed and then STEPS in a row, its time the slowest
rank's; medians over the rounds. A sharding far behind TorchRec's best after two rounds is not
repeated. `floor` is OPER's native step on the same ids without autograd and TorchRec around it.

More parts: `bags`, the same with bags of 5 to 80 ids, measured at --scale 0.02; `dlrm`, the whole
model's step; `lookup`, inference with gradients off; `memory`, how much the ranks grow against what
the plan predicts.

    python -m benchmarks.runtime.training_step [PART ...] [--json] [--scale 0.01]
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from wherever
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from rich.console import Group

from benchmarks.common import parser, publish
from benchmarks.runtime import ranks
from benchmarks.runtime.step_inputs import (
    Cell,
    make_log,
    make_plan,
    read_bags,
    read_batches,
    recipe_of,
)
from oper.base.formatting import format_bytes
from oper.cli.shared.console import new_table

DEADLINE_SECONDS = 900.0
STEPS = {1024: 20, 4096: 4, 8192: 8}  # timed in a row, by batch per rank
BAGS = ((4096, 5, False), (4096, 20, False), (4096, 20, True), (1024, 80, False))
FAR_BEHIND = 1.5  # times TorchRec's best
ROUNDS_OF_ALL = 2
BEYOND_BYTES = 64_000_000  # a rank may grow by, beyond what was predicted

WORLDS, DIMS = (2, 4), (16, 64)
PARTS = ("step", "bags", "apart", "dlrm", "lookup", "memory")


def cells(part: str, worlds: Sequence[int], dims: Sequence[int]) -> list[Cell]:
    """What is measured for a part."""
    if part == "lookup":
        return [Cell(2, dim, 8192, "sgd", "lookup") for dim in dims if 2 in worlds]
    if part == "bags":
        return [
            Cell(w, dim, batch, bag=bag, ragged=ragged)
            for batch, bag, ragged in BAGS
            for w in worlds
            for dim in dims
        ]
    if part == "apart":
        bags = [(8192, 1, "distinct"), (4096, 5, "distinct"), (4096, 20, "distinct")]
        bags += [(4096, 5, "auto"), (4096, 20, "auto")]
        return [
            Cell(w, dim, batch, fetch=fetch, bag=bag, apart=True)
            for batch, bag, fetch in bags
            for w in worlds
            for dim in dims
        ]
    if part != "step":
        what = "dlrm" if part == "dlrm" else "step"
        return [Cell(w, dim, 8192, "sgd", what) for w in worlds for dim in dims]
    batches = ((1024, "sgd"), (8192, "sgd"), (8192, "rowwise_adagrad"))
    return [Cell(w, dim, b, o) for b, o in batches for w in worlds for dim in dims]


def bar(cell: Cell) -> float | None:
    """The ratio aimed at; none for the whole DLRM, whose layers are the same on both sides."""
    if cell.what == "lookup":
        return 5.0
    if cell.what == "dlrm":
        return None
    if cell.apart:
        return 1.0 if cell.fetch != "auto" else 2.0 if cell.dim == 64 else 1.3
    if cell.bag > 1:
        return 3.0 if cell.dim == 64 else 2.0
    if cell.dim == 64 and cell.batch == 8192:
        return 8.0
    return 3.0 if cell.dim == 16 and cell.batch == 1024 else 4.0


def measure_rank(
    rank: int, cell: Cell, plan: Path, log: Path, scale: float, rounds: int
) -> dict[str, Any]:
    """One rank of a cell: seconds per iteration of all sides, equal on all ranks, and phases."""
    from benchmarks.runtime import torchrec_and_oper_steps as sides

    sides.quiet()
    tables = recipe_of(cell, scale).tables
    batches = read_bags(log, tables, rank, cell)

    def module() -> Any:
        return sides.make_module(tables, cell.what)

    models = {name: sides.torchrec_model(module(), name, cell.batch) for name in sides.SHARDINGS}
    models["oper"] = sides.oper_model(module(), plan, cell.apart)
    gradient = sides.fixed_gradient(tables, cell)
    steps = {name: sides.step_of(model, cell, gradient) for name, model in models.items()}
    if cell.what == "step":
        steps["floor"] = sides.native_step(models["oper"], gradient)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    count = STEPS[cell.batch]
    for turn in range(rounds):
        behind = far_behind(seconds, sides.SHARDINGS) if turn >= ROUNDS_OF_ALL else set()
        for name, step in steps.items():
            if name not in behind:
                taken = sides.fresh(batches, turn * (count + 1), count + 1)
                seconds[name].append(block_seconds(step, taken))
    phases = sides.profile_phases(steps["oper"], sides.fresh(batches, 0, len(batches)))
    return {"seconds": seconds, "phases": phases}


def block_seconds(step: Any, batches: Sequence[Any]) -> float:
    """Seconds per iteration of the slowest rank; the first batch is not timed."""
    first, *others = batches
    step(first)
    dist.barrier()
    start = time.perf_counter()
    for batch in others:
        step(batch)
    elapsed = torch.tensor((time.perf_counter() - start) / len(others), dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def far_behind(seconds: dict[str, list[float]], names: Iterable[str]) -> set[str]:
    """Those whose least time is FAR_BEHIND times the least of all; the same on every rank."""
    least = {name: min(seconds[name]) for name in names}
    return {name for name, t in least.items() if t > FAR_BEHIND * min(least.values())}


def measure(cell: Cell, scale: float, rounds: int, folder: Path) -> dict[str, Any]:
    """One cell: medians in ms."""
    plan, figures = make_plan(cell, scale, folder)
    arguments = (cell, plan, make_log(scale, cell), scale, rounds)
    found = ranks.run(measure_rank, cell.world_size, *arguments, deadline_seconds=DEADLINE_SECONDS)[
        0
    ]
    ms = {name: 1e3 * statistics.median(times) for name, times in found["seconds"].items()}
    oper_ms, floor_ms = ms.pop("oper"), ms.pop("floor", None)
    return {
        **cell.describe(),
        "oper_ms": oper_ms,
        "torchrec_ms": ms,
        "floor_ms": floor_ms,
        "speedup": min(ms.values()) / oper_ms,
        "bar": bar(cell),
        "phases_ms": found["phases"],
        "seconds": found["seconds"],
        "predicted_ms": 1e3 * figures["objective_seconds"],
    }


def growth_of_rank(
    rank: int, cell: Cell, plan: Path, log: Path, scale: float
) -> dict[str, dict[str, int]]:
    """By how many bytes one rank grew from before sharding until it has trained on all batches,
    pages that it shares counted by their share; and what the engine says of its shared memory."""
    from benchmarks.runtime import torchrec_and_oper_steps as sides

    sides.quiet()
    tables = recipe_of(cell, scale).tables
    batches = read_batches(log, tables, rank, cell.world_size, cell.batch)
    module, gradient = sides.make_module(tables, cell.what), sides.fixed_gradient(tables, cell)
    dist.barrier()
    before = proportional_bytes()
    dist.barrier()
    model = sides.oper_model(module, plan)
    step = sides.step_of(model, cell, gradient)
    for n in range(len(batches)):
        step(*sides.fresh(batches, n, 1))  # which dies with the step, as a loader's batches do
    dist.barrier()
    after = proportional_bytes()
    dist.barrier()
    growth = {kind: after[kind] - size for kind, size in before.items()}
    return {"growth": growth, "shared": sides.engine_of(model).shared_bytes}


def proportional_bytes() -> dict[str, int]:
    """This process's memory by kind, pages shared by n processes counted as a n-th each: "Pss" is
    all, of which "Pss_Anon", "Pss_Shmem", and "Pss_File", mostly the code of libraries."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    fields = (line.split() for line in lines if line.startswith("Pss"))
    return {name.rstrip(":"): 1024 * int(size) for name, size, *_ in fields}


def measure_growth(cell: Cell, scale: float, folder: Path) -> dict[str, Any]:
    """Growth over all ranks against what the plan predicts: rows and states, and for the distinct
    rows that it expects of a batch the mailboxes and the replicas' AllReduce."""
    plan, figures = make_plan(cell, scale, folder)
    found = ranks.run(
        growth_of_rank,
        *(cell.world_size, cell, plan, make_log(scale), scale),
        deadline_seconds=DEADLINE_SECONDS,
    )
    growth, shared = (
        {name: sum(rank[part][name] for rank in found) for name in found[0][part]}
        for part in ("growth", "shared")
    )
    of_step = figures["mailbox_bytes"] + figures["allreduce_memory_bytes"]
    predicted = sum(figures["memory_bytes"]) + cell.world_size * of_step
    columns = sum(table.dim * len(table.columns) for table in recipe_of(cell, scale).tables)
    return {
        **cell.describe(),
        "growth_bytes": growth["Pss"],
        "growth_by_kind": growth,
        "predicted_bytes": predicted,
        "predicted_mailbox_bytes": figures["mailbox_bytes"],
        "predicted_allreduce_bytes": figures["allreduce_memory_bytes"],
        "shared_bytes": shared,
        "beyond_bytes_per_rank": (growth["Pss"] - predicted) / cell.world_size,
        "output_bytes": 4 * cell.batch * columns,
        "bar_bytes_per_rank": BEYOND_BYTES,
    }


def timings(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Return how many times as long TorchRec's best step takes in each cell of fixed bags."""
    names = ("bag", "optimizer", "world_size", "dim", "batch")
    return {
        "-".join(map(str, (part, *(entry[name] for name in names)))): entry["speedup"]
        for part in ("step", "bags", "dlrm", "lookup")
        for entry in found.get(part, ())
        if "ragged" not in entry["bag"]
    }


def times_table(part: str, found: list[dict[str, Any]]) -> Any:
    """A line for each cell."""
    sharding = [name.removesuffix("_wise") for name in found[0]["torchrec_ms"]]
    head = ("W", "dim", "batch", "bag", "fetch", "OPER", "floor", *sharding, "ratio", "bar")
    made = new_table(f"{part}, ms", *head)
    for entry in found:
        ms = [entry["oper_ms"], entry["floor_ms"], *entry["torchrec_ms"].values()]
        made.add_row(
            entry["optimizer"],
            *(str(entry[name]) for name in ("world_size", "dim", "batch", "bag", "fetch")),
            *("-" if value is None else f"{value:.3g}" for value in ms),
            f"{entry['speedup']:.1f}×",
            "-" if entry["bar"] is None else f"{entry['bar']:g}×",
        )
    return made


def phases_table(found: list[dict[str, Any]]) -> Any:
    """Where OPER's time goes, a column for each cell."""
    names = list(dict.fromkeys(name for entry in found for name in entry["phases_ms"]))
    cells = (f"{e['world_size']}/{e['dim']}/{e['batch']}/{e['optimizer'][0]}" for e in found)
    made = new_table("ms of rank 0", *cells)
    for name in names:
        made.add_row(name, *(f"{entry['phases_ms'].get(name, 0):.2f}" for entry in found))
    return made


def growth_table(found: list[dict[str, Any]]) -> Any:
    """A line for each cell."""
    head = ("W", "dim", "batch", "growth", "predicted", "beyond, a rank", "of it output")
    made = new_table("memory", *head)
    for entry in found:
        names = ("growth_bytes", "predicted_bytes", "beyond_bytes_per_rank", "output_bytes")
        sizes = [entry[name] for name in names]
        made.add_row(
            entry["optimizer"],
            *(str(entry[name]) for name in ("world_size", "dim", "batch")),
            *map(format_bytes, sizes),
        )
    return made


def tables(found: dict[str, list[dict[str, Any]]]) -> Group:
    """One table for each part, and the phases of the steps."""
    made: list[Any] = []
    for part, entries in found.items():
        if entries:
            made.append(growth_table(entries) if part == "memory" else times_table(part, entries))
        if entries and part == "step":
            made.append(phases_table(entries))
    return Group(*made)


def main() -> None:
    options = parser(__doc__, scale=0.1)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or all")
    options.add_argument("--world-sizes", default="2,4", help="ranks, by commas")
    options.add_argument("--dims", default="16,64", help="values per row, by commas")
    options.add_argument("--rounds", type=int, default=7, help="blocks of each side")
    given = options.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        options.error(f"{min(unknown)}: there are {', '.join(PARTS)}")
    worlds, dims = (
        [int(number) for number in text.split(",")] for text in (given.world_sizes, given.dims)
    )
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(prefix="oper-step-") as folder:
        for part in given.parts or PARTS:
            found[part] = []
            for cell in cells(part, worlds, dims):
                print(f"{part}: {cell}", file=sys.stderr)
                found[part].append(
                    measure_growth(cell, given.scale, Path(folder))
                    if part == "memory"
                    else measure(cell, given.scale, given.rounds, Path(folder))
                )
    content = {"cells" if part == "step" else part: entries for part, entries in found.items()}
    publish(
        given,
        content,
        lambda: tables(found),
        "ratio: TorchRec's best over OPER; floor: OPER's step without autograd and TorchRec",
        timings=timings(found),
    )


if __name__ == "__main__":
    main()
