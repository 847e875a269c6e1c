"""What a training step is measured on: Criteo-Kaggle's tables, batches of ids, and plans for them.

26 tables at a scale of their rows, the law and the log of `oper synth`. A bag of several ids has
those of so many samples; ragged ones have up to twice as many. Plans are what `oper plan` makes
from the whole log's counts, for the topology that `oper topology measure` finds, at its own
settings: nothing is tuned.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.common import DATA
from benchmarks.runtime import ranks as processes
from oper.measure.measure_ranks import RankMeasurement
from oper.measure.measurement import Measurement
from oper.runtime.memory.device import device_of
from oper.synth.log_writer import write_log
from oper.synth.profile_writer import write_profile
from oper.synth.recipes import Recipe, load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.tables.table import Table

ZIPF = 1.05
EXTRA_MEMORY = "5%"
BATCHES = 8  # different ones, taken in turn
BATCHES_OF_BAGS = 2  # of bags of several ids
LOG_SAMPLES = BATCHES * 4 * 8192  # the largest cell's


@dataclass(frozen=True)
class Cell:
    """One measurement: W ranks, values per row, samples per rank, the tables' optimizer, and
    what runs: the training step or the lookup of the collection alone, or the DLRM's step; the
    plan's rows and how they are fetched; whether each rank is a node, apart from the others."""

    world_size: int
    dim: int
    batch: int
    optimizer: str = "sgd"
    what: str = "step"
    dtype: str = "fp32"
    fetch: str = "raw"
    bag: int = 1
    ragged: bool = False
    apart: bool = False

    @property
    def training(self) -> bool:
        return self.what != "lookup"

    def describe(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "dim": self.dim,
            "batch": self.batch,
            "optimizer": self.optimizer,
            "bag": f"{self.bag}, ragged" if self.ragged else str(self.bag),
            "fetch": self.fetch,
        }


def recipe_of(cell: Cell, scale: float) -> Recipe:
    """The generator's recipe with the cell's dim, dtype, optimizer and bags."""
    recipe = load_recipe("criteo-kaggle", scale=scale, zipf=ZIPF, dim=cell.dim)
    features = (
        replace(f, table=replace(f.table, optimizer=cell.optimizer, dtype=cell.dtype), ids=cell.bag)
        for f in recipe.features
    )
    return replace(recipe, features=tuple(features))


def make_log(scale: float, cell: Cell | None = None) -> Path:
    """The log that a cell's batches are read from, generated if it is not there."""
    samples = LOG_SAMPLES
    if cell is not None and cell.bag > 1:
        samples = BATCHES_OF_BAGS * cell.world_size * cell.batch * cell.bag
    path = DATA / f"criteo-kaggle-{scale:g}-{samples}.parquet"
    if not path.exists():
        DATA.mkdir(parents=True, exist_ok=True)
        recipe = load_recipe("criteo-kaggle", scale=scale, zipf=ZIPF)
        write_log(Synthesizer(recipe, samples), path)
    return path


def measure_topology(ranks: int, row_bytes: int, folder: Path) -> Path:
    """The file of this machine's topology for so many ranks, measured once per folder."""
    path = folder / f"cpu-{ranks}-{row_bytes}.yaml"
    if not path.exists():
        size = ("--ranks", ranks, "--row-bytes", row_bytes)
        run_oper("topology", "measure", *size, "-o", path)
    return path


def measure_apart(ranks: int, row_bytes: int, folder: Path) -> Path:
    """The same where each rank is a node, apart from the others."""
    path = folder / f"apart-{ranks}-{row_bytes}.yaml"
    if not path.exists():
        measured = processes.run(_measure_rank, ranks, row_bytes)[0]
        path.write_text(measured.to_yaml("ranks apart"), encoding="utf-8")
    return path


def _measure_rank(rank: int, row_bytes: int) -> Measurement:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # for one thread, as a step's ranks have
    store, limit = dist.distributed_c10d._get_default_store(), timedelta(seconds=60)
    return RankMeasurement(store, rank, limit, None, row_bytes, device_of("cpu")).measure()


def make_plan(cell: Cell, scale: float, folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the cell's plan, and what `oper plan --json` says of it."""
    profile = folder / f"profile-{cell.dim}-{cell.dtype}-{cell.optimizer}-{cell.bag}"
    if not profile.exists():
        recipe = recipe_of(cell, scale)
        write_profile(Synthesizer(recipe, recipe.samples // cell.bag), profile)
    mode = "training" if cell.training else "inference"
    batch = cell.world_size * cell.batch
    name = f"{mode}-{cell.fetch}-{'apart-' if cell.apart else ''}{cell.world_size}-{batch}"
    plan = folder / f"plan-{name}-{profile.name.removeprefix('profile-')}"
    measured = measure_apart if cell.apart else measure_topology
    topology = measured(cell.world_size, 4 * cell.dim, folder)
    workload = ("--mode", mode, "--fetch", cell.fetch, "--batch-size", batch)
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


def read_bags(log: Path, tables: Sequence[Table], rank: int, cell: Cell) -> Any:
    """A rank's part of each of the cell's global batches, as KeyedJaggedTensors."""
    if cell.bag == 1:
        return read_batches(log, tables, rank, cell.world_size, cell.batch)
    import torch
    from torchrec import KeyedJaggedTensor

    ids = cell.batch * cell.bag
    parts = read_batches(log, tables, rank, cell.world_size, ids, BATCHES_OF_BAGS)
    rng = np.random.default_rng(rank)
    found = []
    for part in parts:
        keys = part.keys()
        lengths = np.full((len(keys), cell.batch), cell.bag)
        if cell.ragged:  # pairs of bags share their ids in any way
            first = rng.integers(0, 2 * cell.bag + 1, (len(keys), cell.batch // 2))
            lengths = np.stack([first, 2 * cell.bag - first], axis=2).reshape(len(keys), -1)
        given = torch.from_numpy(lengths.ravel())
        found.append(KeyedJaggedTensor(keys, part.values(), lengths=given))
    return found


def read_batches(
    log: Path, tables: Sequence[Table], rank: int, ranks: int, batch: int, count: int = BATCHES
) -> Any:
    """A rank's part of each of `count` global batches of one id a bag, as KeyedJaggedTensors."""
    from oper.logs.row_reader import read

    parts = read(log, tables, batch_size=batch, rows=f"0:{count * ranks * batch}")
    return [part.to_kjt() for index, part in enumerate(parts) if index % ranks == rank]
