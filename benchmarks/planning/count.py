"""Counting from arrays in memory: accesses per second into counters of Criteo-Kaggle sizes.

26 tables with 33,762,577 rows together, one id a sample in each, Zipf over scattered rows; then
one table of as many rows alone, and bags, whose rows are also told apart within each sample. Ids
are drawn beforehand and counted once per round, after one round that touches the counters' pages:
neither ids nor counters fit in a cache. The median over rounds is shown.

    python -m benchmarks.planning.count [--rounds 9] [--samples 1000000] [--json]
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.common import parser, publish
from oper.base import native
from oper.cli.shared.console import new_table
from oper.logs import Batch, Jagged
from oper.logs.batches.batch import Location
from oper.profiling.row_counters import RowCounters
from oper.tables.table import Table
from oper.tables.table_file import load_tables

BATCH = 1 << 16
EXPONENT = 1.05
BAG = 10


def draw(rows: int, size: int, key: int, dtype: str) -> np.ndarray:
    """Ids of one table: bounded Zipf by popularity, scattered over its rows."""
    shares = torch.from_numpy(np.random.default_rng(key).random(size))
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64)
    ranks = native.ops().draw_ranks(shares, rows, EXPONENT, *nothing)
    return native.ops().place_ranks(ranks, rows, 0, key, False).numpy().astype(dtype)


def batches(tables: tuple[Table, ...], samples: int, bag: int, dtype: str) -> Iterator[Batch]:
    """Batches as readers give them, each table's ids in an array of its own."""
    for start in range(0, samples, BATCH):
        size = min(BATCH, samples - start)
        lengths = None if bag == 1 else np.full(size, bag, np.int32)
        features = {
            table.name: Jagged(draw(table.rows, size * bag, 1000 * start + t, dtype), lengths)
            for t, table in enumerate(tables)
        }
        yield Batch(size, features, Location("memory", start))


def measure(
    tables: tuple[Table, ...], samples: int, bag: int, dtype: str, rounds: int
) -> dict[str, Any]:
    """Median rate over rounds, and the spread between them."""
    table_of = {table.name: t for t, table in enumerate(tables)}
    counters = RowCounters(tables)
    accesses = samples * bag * len(tables)
    ready = list(batches(tables, samples, bag, dtype))
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for batch in ready:
            counters.add(batch, table_of)
        seconds.append(time.perf_counter() - start)
    del seconds[0]
    assert int(counters.accesses.sum(dtype=np.uint64)) == accesses * (rounds + 1)
    return {
        "accesses": accesses,
        "seconds": statistics.median(seconds),
        "accesses_per_second": accesses / statistics.median(seconds),
        "slowest_accesses_per_second": accesses / max(seconds),
        "fastest_accesses_per_second": accesses / min(seconds),
    }


def table(found: dict[str, dict[str, Any]]) -> Any:
    """Return a table of rates, a line for each case."""
    made = new_table("ids", "million accesses/s", "slowest", "fastest")
    keys = ("accesses_per_second", "slowest_accesses_per_second", "fastest_accesses_per_second")
    for name, case in found.items():
        made.add_row(name, *(f"{case[key] / 1e6:.1f}" for key in keys))
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--samples", type=int, default=1_000_000)
    given = options.parse_args()
    kaggle = load_tables("criteo-kaggle")
    alone = (Table("all", sum(t.rows for t in kaggle)),)
    samples = round(given.samples * given.scale)
    few = samples // BAG
    cases = {
        "26 tables, int64": (kaggle, samples, 1, "int64"),
        "26 tables, int32": (kaggle, samples, 1, "int32"),
        "one table, int64": (alone, samples * len(kaggle), 1, "int64"),
        f"26 tables, bags of {BAG}": (kaggle, few, BAG, "int64"),
        f"one table, bags of {BAG}": (alone, few * len(kaggle), BAG, "int64"),
    }
    found = {name: measure(*case, given.rounds) for name, case in cases.items()}
    rate = found["26 tables, int64"]["accesses_per_second"] / 1e6
    publish(
        given,
        {"exponent": EXPONENT, "cases": found},
        lambda: table(found),
        f"Zipf {EXPONENT}, {alone[0].rows:,} rows, {torch.get_num_threads()} threads",
        timings={"count-million-per-second": rate},
    )


if __name__ == "__main__":
    main()
