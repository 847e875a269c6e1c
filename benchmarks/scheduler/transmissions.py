"""Transmissions between caches and the host tier, by dispatch and synchronisation.

8 workers of 128 samples, caches of a share of all rows, ten iterations of warm-up: the real logs,
and Criteo-Kaggle's tables × 0.02 with 400 global batches of generated samples, which fill each
cache more than five times. Links are equal, or four of 5 and four of 0.5 Gbit/s. `saved` is against
random dispatch with every update pushed; `beyond` against LAIA on demand.

    python -m benchmarks.scheduler.transmissions [LOG …] [--cache 0.1] [--evict lru] [--json]
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Group

from benchmarks.common import DATA, LOGS, REAL_LOGS, parser, percent, publish
from oper.base.formatting import format_duration
from oper.cli.shared.console import new_table
from oper.logs import LogOptions, RowReader, open_log, prepare
from oper.scheduler.dispatch import assign_exactly
from oper.scheduler.simulator import Methods, Simulation, SimulationSettings, replay
from oper.scheduler.trace import Trace
from oper.synth.log_writer import write_log
from oper.synth.recipes import load_recipe
from oper.synth.synthesizer import Synthesizer

GENERATED = "generated"
POLICIES = ("random", "laia", "laia:4", "esd:0", "esd", "grouped")
SYNCS = ("bsp", "on-demand")
WORKERS, SAMPLES, BATCHES, DIM = 8, 128, 400, 512
LINKS = {"equal": (100.0,), "unequal": (5.0,) * 4 + (0.5,) * 4}  # Gbit/s
ASSIGNED = (128, 1024)  # samples a worker, of the exact assignment alone


def traces(names: list[str], scale: float) -> Iterator[tuple[str, Trace]]:
    """The logs that are there."""
    size = WORKERS * SAMPLES
    for name, (path, options) in REAL_LOGS.items():
        if name in names and (LOGS / path).exists():
            log = open_log(LOGS / path, LogOptions.of(options))
            yield name, Trace(RowReader(log, prepare(log, dim=DIM, optimizer="sgd")), size)
    if GENERATED in names:
        recipe = load_recipe("criteo-kaggle", scale=0.02 * scale)
        samples = round(BATCHES * scale) * size
        drawn = DATA / f"criteo-kaggle-{0.02 * scale:g}-{samples}.parquet"
        if not drawn.exists():
            DATA.mkdir(parents=True, exist_ok=True)
            write_log(Synthesizer(recipe, samples), drawn)
        log = open_log(drawn, LogOptions())
        tables = tuple(feature.table for feature in recipe.features)
        yield GENERATED, Trace(RowReader(log, prepare(log, tables)), size)


def assignment_times() -> dict[str, float]:
    """Milliseconds of the exact assignment of random costs, medians of 9, by samples a worker."""
    random = np.random.default_rng(0)
    found = {}
    for samples in ASSIGNED:
        costs = random.random((WORKERS * samples, WORKERS))
        spent = []
        for _ in range(9):
            began = time.perf_counter()
            assign_exactly(costs, np.full(WORKERS, samples))
            spent.append(time.perf_counter() - began)
        found[str(samples)] = 1e3 * float(np.median(spent))
    return found


def table(found: dict[str, dict[str, Simulation]]) -> Any:
    """A line for each log, links and combination."""
    columns = ("total", "saved", "beyond", "link time", "wrong", "ms")
    made = new_table("", "links", "", *columns, left=3)
    for log, by_links in found.items():
        for links, content in by_links.items():
            runs = content.runs
            vanilla, laia = runs["random+bsp"].total, runs["laia+on-demand"].total
            for name, run in runs.items():
                made.add_row(
                    log,
                    links,
                    name,
                    f"{run.total:,}",
                    f"{percent(1 - run.total / vanilla, 1)}%",
                    f"{percent(1 - run.total / laia, 1)}%" if "on-demand" in name else "",
                    format_duration(run.cost_seconds),
                    str(run.wrong_reads),
                    f"{run.dispatch.total:.2f}",
                )
    return made


def main() -> None:
    options = parser(__doc__)
    everything = [*REAL_LOGS, GENERATED]
    options.add_argument("names", nargs="*", default=everything, help=", ".join(everything))
    options.add_argument("--cache", type=float, default=0.1, help="share of all rows")
    options.add_argument("--evict", default="lru", help="lru, lfu, light-lfu or emark")
    given = options.parse_args()
    methods = Methods.parse(POLICIES, SYNCS, given.evict)
    found: dict[str, dict[str, Simulation]] = {}
    for name, trace in traces(given.names, given.scale):
        for links, gigabits in LINKS.items():
            bandwidth = tuple(1e9 / 8 * number for number in gigabits)
            settings = SimulationSettings(WORKERS, WORKERS * SAMPLES, given.cache, bandwidth)
            found.setdefault(name, {})[links] = replay(trace, settings, methods)
    times = assignment_times()
    said = ", ".join(f"{WORKERS} x {samples}: {ms:.2f} ms" for samples, ms in times.items())
    content = {
        name: {links: simulated.to_json() for links, simulated in of_links.items()}
        for name, of_links in found.items()
    }
    publish(
        given,
        {"logs": content, "assignment_ms": times},
        lambda: Group(table(found)),
        f"exact assignment alone, random costs: {said}",
    )


if __name__ == "__main__":
    main()
