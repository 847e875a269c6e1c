"""Serving: latencies and lookups per second of plans for inference, beside TorchRec's shardings.

The tables, the log and the ranks of training_step.py, gradients off, on every rank a request
after the other (`oper.measure_latency`): a KeyedJaggedTensor to its KeyedTensor. Plans read rows
raw or distinct, as fp32 or int8. All sides live in the same ranks and take turns; percentiles are
over the requests of all ranks and rounds.

`links` compares the rows that each of 4 ranks reads from each other with what the plan expects of
the log's one profile: the topology has two nodes, so that some rows have a copy in each, and each
rank reads a fourth of the log. `sigma` is the deviation of a rank's mean over its requests.

    python -m benchmarks.runtime.serving [latency links] [--json] [--scale 0.01]
"""

import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

if not __package__:  # run as a file, from wherever
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch.distributed as dist
from rich.console import Group

from benchmarks.common import parser, publish
from benchmarks.runtime import ranks, step_inputs
from benchmarks.runtime.step_inputs import (
    BATCHES,
    LOG_SAMPLES,
    Cell,
    make_log,
    read_batches,
    recipe_of,
)
from oper.cli.shared.console import new_table
from oper.plan.plan import Plan

PARTS = ("latency", "links")
WARM_UP = 2
LINKS = Cell(world_size=4, dim=16, batch=1024, what="lookup")
LINKS_TOPOLOGY = "2x2-a100"


def cells(world_size: int, dims: str, batches: str) -> list[Cell]:
    """Every dim with every batch, both by commas."""
    return [
        Cell(world_size, int(dim), int(batch), what="lookup")
        for dim in dims.split(",")
        for batch in batches.split(",")
    ]


def variants(cell: Cell) -> list[Cell]:
    """Rows of two dtypes, read in two ways."""
    return [
        replace(cell, dtype=dtype, fetch=fetch)
        for dtype in ("fp32", "int8")
        for fetch in ("raw", "distinct")
    ]


def measure_rank(
    rank: int, plans: dict[str, Path], cell: Cell, log: Path, scale: float, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each request of one rank, by side."""
    import oper
    from benchmarks.runtime import torchrec_and_oper_steps as sides

    sides.quiet()
    tables = recipe_of(cell, scale).tables
    batches = read_batches(log, tables, rank, cell.world_size, cell.batch)
    models = {
        name: sides.torchrec_model(sides.make_module(tables, "lookup"), name, cell.batch)
        for name in sides.SHARDINGS
    }
    for name, plan in plans.items():
        models[name] = sides.oper_model(sides.make_module(tables, "lookup"), plan)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            requests = sides.fresh(batches, 0, WARM_UP + len(batches))
            dist.barrier()
            latencies, _ = oper.measure_latency(model.eval(), requests, WARM_UP)
            seconds[name] += latencies.seconds.tolist()
    return seconds


def measure(cell: Cell, scale: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Percentiles of all sides in ms, and lookups per second of all ranks together."""
    plans = {
        f"{v.fetch} {v.dtype}": step_inputs.make_plan(v, scale, folder)[0] for v in variants(cell)
    }
    found = ranks.run(
        measure_rank, cell.world_size, plans, cell, make_log(scale), scale, rounds,
        deadline_seconds=900.0,
    )  # fmt: skip
    lookups = cell.world_size * cell.batch * len(recipe_of(cell, scale).tables)
    sides = {}
    for name in found[0]:
        ms = 1e3 * np.array([of_rank[name] for of_rank in found])
        p50, p95, p99 = np.percentile(ms, (50, 95, 99))
        sides[name] = {
            "p50_ms": p50, "p95_ms": p95, "p99_ms": p99,
            "lookups_per_second": 1e3 * lookups / ms.mean(),
        }  # fmt: skip
    best = min(side["p50_ms"] for name, side in sides.items() if name not in plans)
    return {
        **cell.describe(),
        "requests": rounds * BATCHES * cell.world_size,
        "sides": sides,
        "speedup": {name: best / sides[name]["p50_ms"] for name in plans},
    }


def read_rank(rank: int, plan: Path, cell: Cell, log: Path, scale: float) -> Any:
    """The rows that one rank read from each for each request of its part of the log, [n, M]."""
    import oper
    from benchmarks.runtime import torchrec_and_oper_steps as sides

    sides.quiet()
    tables = recipe_of(cell, scale).tables
    model = sides.oper_model(sides.make_module(tables, "lookup"), plan).eval()
    counters = sides.engine_of(model).counters
    read = []
    count = LOG_SAMPLES // (cell.world_size * cell.batch)
    for request in read_batches(log, tables, rank, cell.world_size, cell.batch, count):
        before = counters.by_rank["fetched_rows"].copy()
        oper.measure_latency(model, [request], warm_up=0)
        read.append(counters.by_rank["fetched_rows"] - before)
    return np.array(read)


def compare_links(fetch: str, scale: float, folder: Path) -> dict[str, Any]:
    """What each rank reads from each other per request: expected by the plan, and counted."""
    cell = replace(LINKS, fetch=fetch)
    profile, plan = folder / "links-profile", folder / f"links-{fetch}"
    log, batch = make_log(scale), ("--batch-size", cell.world_size * cell.batch)
    if not profile.exists():
        rules = ("--tables", log.with_suffix(".tables.yaml"), "--dim", cell.dim)
        step_inputs.run_oper(
            "profile", log, "-o", profile, *rules, *batch, "--ranks", cell.world_size
        )
    workload = ("--mode", "inference", "--fetch", fetch)
    step_inputs.run_oper(
        *("plan", profile, "-o", plan, "--topology", LINKS_TOPOLOGY, *workload),
        *(*batch, "--extra-memory", "1%"),
    )
    made = Plan.load(plan)
    copies = made.layout.holds.sum(axis=1)
    counted = np.array(
        ranks.run(read_rank, cell.world_size, plan, cell, log, scale)
    )  # [reader, request, source]
    requests = counted.shape[1]
    # Each rank's part is drawn from the whole log without being put back.
    sigma = counted.std(axis=1, ddof=1) * np.sqrt((1 - 1 / cell.world_size) / requests)
    expected = made.cost.link_bytes / made.tables[0].row_bytes
    return {
        **cell.describe(),
        "fetch": fetch,
        "requests": requests,
        "copies": sorted({int(n) for n in copies}),
        "links": [
            {
                "reader": reader,
                "source": source,
                "expected_rows": expected[reader, source],
                "counted_rows": counted[reader, :, source].mean(),
                "sigma_rows": sigma[reader, source],
            }
            for reader, source in itertools.permutations(range(cell.world_size), 2)
        ],
    }


def latency_table(found: list[dict[str, Any]]) -> Any:
    """A line for each side of each cell."""
    head = ("W", "dim", "batch", "p50", "p95", "p99", "M lookups/s", "ratio")
    made = new_table("latency, ms", *head)
    for entry in found:
        for name, side in entry["sides"].items():
            ratio = entry["speedup"].get(name)
            made.add_row(
                name,
                *(str(entry[key]) for key in ("world_size", "dim", "batch")),
                *(f"{side[key]:.3g}" for key in ("p50_ms", "p95_ms", "p99_ms")),
                f"{side['lookups_per_second'] / 1e6:.2f}",
                "-" if ratio is None else f"{ratio:.1f}×",
            )
    return made


def links_table(found: list[dict[str, Any]]) -> Any:
    """A line for each link of each way to fetch."""
    made = new_table("rows a request", "link", "expected", "counted", "off", "off/sigma")
    for entry in found:
        for link in entry["links"]:
            off = link["counted_rows"] - link["expected_rows"]
            made.add_row(
                entry["fetch"],
                f"{link['reader']} < {link['source']}",
                f"{link['expected_rows']:,.1f}",
                f"{link['counted_rows']:,.1f}",
                f"{100 * off / link['expected_rows']:+.2f} %",
                f"{off / link['sigma_rows']:+.1f}",
            )
    return made


def tables(found: dict[str, Any]) -> Group:
    """One table for each part."""
    made = {"latency": latency_table, "links": links_table}
    return Group(*(made[part](entries) for part, entries in found.items()))


def main() -> None:
    options = parser(__doc__, scale=0.1)
    options.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; or all")
    options.add_argument("--world-size", type=int, default=2, help="ranks")
    options.add_argument("--dims", default="16,64", help="values per row, by commas")
    options.add_argument("--batches", default="256,8192", help="samples of a request, by commas")
    options.add_argument("--rounds", type=int, default=7, help="of all sides")
    given = options.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        options.error(f"{min(unknown)}: there are {', '.join(PARTS)}")
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="oper-serving-") as name:
        folder = Path(name)
        if "latency" in (given.parts or PARTS):
            found["latency"] = [
                measure(cell, given.scale, given.rounds, folder)
                for cell in cells(given.world_size, given.dims, given.batches)
            ]
        if "links" in (given.parts or PARTS):
            found["links"] = [compare_links(f, given.scale, folder) for f in ("raw", "distinct")]
    publish(
        given,
        found,
        lambda: tables(found),
        "ratio: TorchRec's best median over OPER's; off/sigma: deviations of the mean",
    )


if __name__ == "__main__":
    main()
