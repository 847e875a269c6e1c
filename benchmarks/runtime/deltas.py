"""Incremental saves: how much of a whole save ten of them write each, and what both take.

The tables of checkpoint.py, 8 of 1 million rows, dim 64, row-wise Adagrad (2.08 GB), on ranks of
one process each, are trained by a Zipf log (exponent 1.05, one id of each table a sample): a base,
and ten deltas upon it after as many steps each. Then the same moment is saved whole, and the newest
delta and the whole save are loaded in turn. A share is that of the bytes of the whole save's files.
Memory is as in checkpoint.py.

    python -m benchmarks.runtime.deltas [--ranks 2] [--folder .] [--scale 1]
"""

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

import oper
from benchmarks.common import parser, publish
from benchmarks.runtime.checkpoint import DIM, ROWS, TABLES, Growth, make_model
from benchmarks.runtime.ranks import run
from oper.base.formatting import format_bytes
from oper.cli.shared.console import new_table

ZIPF = 1.05
BATCH = 8192  # samples of a rank
STEPS = (4, 16, 64)  # between two deltas, at scale 1
DELTAS, LOADS = 10, 3
DEADLINE_SECONDS = 1800.0


def main() -> None:
    """Measure, and print a table."""
    made = parser(__doc__)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--folder", type=Path, default=Path(), help="on the disk to be measured")
    asked = made.parse_args()
    rows = max(round(ROWS * asked.scale), 1)
    lines = []
    for steps in (max(round(n * asked.scale), 1) for n in STEPS):
        with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
            given = (rows, steps, Path(folder))
            lines.append(run(measure, asked.ranks, *given, deadline_seconds=DEADLINE_SECONDS)[0])
    table = new_table(
        "steps", "accesses", "touched", "1st delta", "10th", "save, whole", "load, whole", "memory"
    )
    for line in lines:
        first, tenth = line["shares"][0], line["shares"][-1]
        table.add_row(
            str(line["steps"]),
            f"{line['accesses'] / (TABLES * rows):.2f} of rows",
            f"{line['touched_share']:.1%}",
            f"{first:.1%}",
            f"{tenth:.1%}",
            f"{line['delta_seconds']:.2f} s, {line['save_seconds']:.2f} s",
            f"{line['chain_seconds']:.2f} s, {line['load_seconds']:.2f} s",
            format_bytes(line["grown_bytes"]),
        )
    publish(asked, {"ranks": asked.ranks, "rows": rows, "lines": lines}, lambda: table)


def measure(rank: int, rows: int, steps: int, folder: Path) -> dict[str, Any]:
    """What one rank saves and loads, and how long that takes."""
    model, run_folder = make_model(rows), folder / "run"
    random = np.random.default_rng(rank)
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -ZIPF
    law = np.cumsum(weights) / weights.sum()
    places = np.random.default_rng(99).permutation(rows)  # hot rows lie anywhere

    def train() -> None:
        for _ in range(steps):
            ranked = np.minimum(np.searchsorted(law, random.random(TABLES * BATCH)), rows - 1)
            features = [f"f{n}" for n in range(TABLES)]
            lengths = torch.ones(TABLES * BATCH, dtype=torch.int32)
            batch = KeyedJaggedTensor(features, torch.from_numpy(places[ranked]), lengths=lengths)
            model(batch).values().sum().backward()

    def timed(do: Any) -> float:
        os.sync()
        dist.barrier()
        begin = time.perf_counter()
        do()
        taken = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    oper.save(model, run_folder / "0", step=0, deltas=True)
    seconds, grown, updated = [], 0, 0
    for number in range(1, DELTAS + 1):
        train()
        with Growth() as growth:
            path = run_folder / str(number)
            seconds.append(timed(lambda p=path, n=number: oper.save_delta(model, p, step=n)))
        grown = max(grown, growth.bytes)
    save = timed(lambda: oper.save(model, folder / "whole"))
    chain, whole = [], []
    for _ in range(LOADS):
        with Growth() as growth:
            chain.append(timed(lambda: oper.load(model, run_folder)))
        grown = max(grown, growth.bytes)
        whole.append(timed(lambda: oper.load(model, folder / "whole")))
    size = size_of(folder / "whole")
    sizes = [size_of(run_folder / str(number)) for number in range(1, DELTAS + 1)]
    updated = rows_of(run_folder / str(DELTAS))
    return {
        "steps": steps,
        "accesses": steps * dist.get_world_size() * BATCH * TABLES,
        "touched_share": updated / (TABLES * rows),
        "shares": [each / size for each in sizes],
        "delta_seconds": statistics.median(seconds),
        "save_seconds": save,
        "chain_seconds": statistics.median(chain),
        "load_seconds": statistics.median(whole),
        "grown_bytes": grown,
        "row_bytes": 4 * DIM + 4,
    }


def size_of(checkpoint: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in checkpoint.iterdir())


def rows_of(delta: Path) -> int:
    """The rows that a delta has."""
    from oper.checkpoint.describe import describe

    return sum(table.weight.shape[0] for table in describe(delta).tables)


if __name__ == "__main__":
    main()
