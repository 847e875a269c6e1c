"""What a training step is measured on: Criteo-Kaggle's tables, batches of ids, and plans for them.

26 tables at a scale of their rows, one id per bag, the law and the log of `oper synth`. Plans are
what `oper plan` makes from the whole log's counts, for the topology that `oper topology measure`
finds, at its own settings: nothing is tuned.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import DATA
from oper.synth.log_writer import write_log
from oper.synth.recipes import Recipe, load_recipe
from oper.synth.row_counts import write_profile
from oper.synth.synthesizer import Synthesizer
from oper.tables.table import Table

ZIPF = 1.05
EXTRA_MEMORY = "5%"
BATCHES = 8  # different ones, taken in turn
LOG_SAMPLES = BATCHES * 4 * 8192  # the largest cell's


@dataclass(frozen=True)
class Cell:
    """One measurement: W ranks, values per row, samples per rank, the tables' optimizer, and
    what runs: the training step or the lookup of the collection alone, or the DLRM's step; the
    plan's rows and how they are fetched."""

    world_size: int
    dim: int
    batch: int
    optimizer: str = "sgd"
    what: str = "step"
    dtype: str = "fp32"
    fetch: str = "raw"

    @property
    def training(self) -> bool:
        return self.what != "lookup"

    def describe(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "dim": self.dim,
            "batch": self.batch,
            "optimizer": self.optimizer,
        }


def recipe_of(cell: Cell, scale: float) -> Recipe:
    """The generator's recipe with the cell's dim, dtype and optimizer."""
    recipe = load_recipe("criteo-kaggle", scale=scale, zipf=ZIPF, dim=cell.dim)
    features = (
        replace(f, table=replace(f.table, optimizer=cell.optimizer, dtype=cell.dtype))
        for f in recipe.features
    )
    return replace(recipe, features=tuple(features))


def make_log(scale: float) -> Path:
    """The log that batches are read from, generated if it is not there."""
    path = DATA / f"criteo-kaggle-{scale:g}-{LOG_SAMPLES}.parquet"
    if not path.exists():
        DATA.mkdir(parents=True, exist_ok=True)
        recipe = load_recipe("criteo-kaggle", scale=scale, zipf=ZIPF)
        write_log(Synthesizer(recipe, LOG_SAMPLES), path)
    return path


def measure_topology(ranks: int, row_bytes: int, folder: Path) -> Path:
    """The file of this machine's topology for so many ranks, measured once per folder."""
    path = folder / f"cpu-{ranks}-{row_bytes}.yaml"
    if not path.exists():
        size = ("--ranks", ranks, "--row-bytes", row_bytes)
        run_oper("topology", "measure", *size, "-o", path)
    return path


def make_plan(cell: Cell, scale: float, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the cell's plan, and what `oper plan --json` says of it."""
    profile = folder / f"profile-{cell.dim}-{cell.dtype}-{cell.optimizer}"
    if not profile.exists():
        recipe = recipe_of(cell, scale)
        write_profile(Synthesizer(recipe, recipe.samples), profile)
    mode = "training" if cell.training else "inference"
    name = f"{mode}-{cell.fetch}-{cell.world_size}-{cell.batch}"
    plan = folder / f"plan-{name}-{profile.name.removeprefix('profile-')}"
    topology = measure_topology(cell.world_size, 4 * cell.dim, folder)
    workload = ("--mode", mode, "--fetch", cell.fetch, "--batch-size", cell.world_size * cell.batch)
    said = run_oper(
        *("plan", profile, "--topology", topology, *workload),
        *("--extra-memory", EXTRA_MEMORY, "-o", plan, "--force", "--json"),
    )
    return plan, json.loads(said)


def run_oper(*arguments: Any) -> str:
    """What `oper ARGUMENTS` prints."""
    command = [sys.executable, "-c", "from oper.cli import main; main()", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise RuntimeError(f"oper {' '.join(map(str, arguments))}: {done.stderr.strip()}")
    return done.stdout


def read_batches(
    log: Path, tables: Sequence[Table], rank: int, ranks: int, batch: int, count: int = BATCHES
) -> Any:
    """A rank's part of each of `count` global batches, as KeyedJaggedTensors."""
    from oper.logs import LogOptions
    from oper.logs.row_reader import read

    options = LogOptions(rows=f"0:{count * ranks * batch}")
    parts = read(log, tables, options, batch_size=batch)
    return [part.to_kjt() for index, part in enumerate(parts) if index % ranks == rank]
