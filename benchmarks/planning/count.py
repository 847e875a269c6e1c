"""Counting from arrays in memory: accesses per second into counters of Criteo-Kaggle sizes.

26 tables with 33,762,577 rows together, one id a sample in each, Zipf over scattered rows; then
one table of as many rows alone, and bags, whose rows are also told apart within each sample. Ids
are drawn beforehand and counted once per round, after one round that touches the counters' pages:
neither ids nor counters fit in a cache. The median over rounds is shown.

    python benchmarks/planning/count.py [--rounds 9] [--samples 1000000] [--json]
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator

import numpy as np
import torch

from oper.base import native
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


def measure(tables: tuple[Table, ...], samples: int, bag: int, dtype: str, rounds: int) -> dict:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    kaggle = load_tables("criteo-kaggle")
    alone = (Table("all", sum(t.rows for t in kaggle)),)
    few = given.samples // BAG
    cases = {
        "26 tables, int64": (kaggle, given.samples, 1, "int64"),
        "26 tables, int32": (kaggle, given.samples, 1, "int32"),
        "one table, int64": (alone, given.samples * len(kaggle), 1, "int64"),
        f"26 tables, bags of {BAG}": (kaggle, few, BAG, "int64"),
        f"one table, bags of {BAG}": (alone, few * len(kaggle), BAG, "int64"),
    }
    results = {name: measure(*case, given.rounds) for name, case in cases.items()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if given.json:
        print(json.dumps({"machine": machine, "exponent": EXPONENT, "cases": results}, indent=1))
        return
    print(f"counting, Zipf {EXPONENT}, {alone[0].rows:,} rows; {machine}")
    print(f"{'ids':<26}{'million accesses/s':>20}{'slowest':>10}{'fastest':>10}")
    for name, found in results.items():
        rates = [
            found[key] / 1e6
            for key in (
                "accesses_per_second",
                "slowest_accesses_per_second",
                "fastest_accesses_per_second",
            )
        ]
        print(f"{name:<26}{rates[0]:>20.1f}{rates[1]:>10.1f}{rates[2]:>10.1f}")


if __name__ == "__main__":
    main()
