"""A labelled log of Criteo-Kaggle's tables, generated once, in arrays that all ranks map."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec import KeyedJaggedTensor

from benchmarks.common import DATA
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.synth.profile_writer import synthesize_counts
from oper.synth.recipes import Recipe, load_recipe
from oper.synth.synthesizer import Synthesizer
from oper.tables.table import Table


class Clicks(NamedTuple):
    """A batch."""

    dense: torch.Tensor  # float32 [n, 13]
    ids: KeyedJaggedTensor
    labels: torch.Tensor  # float32 [n]


@dataclass(frozen=True)
class ClickLog:
    """`samples` of the workload's tables × `scale`, rows of `dim` values, drawn by a seed."""

    scale: float
    samples: int
    dim: int
    seed: int = 0

    @property
    def tables(self) -> tuple[Table, ...]:
        """The log's tables."""
        return tuple(feature.table for feature in self.recipe.features)

    def write(self) -> None:
        """Generate the arrays, unless they are there."""
        parts = {name: DATA / f"{self._name}.{name}.npy" for name in ("ids", "dense", "labels")}
        if all(path.exists() for path in parts.values()):
            return
        DATA.mkdir(parents=True, exist_ok=True)
        ids = np.empty((self.samples, len(self.tables)), dtype=np.int32)
        dense = np.empty((self.samples, 13), dtype=np.float32)
        labels = np.empty(self.samples, dtype=np.float32)
        first = 0
        for batch in Synthesizer(self.recipe, self.samples, seed=self.seed).batches():
            at = slice(first, first + batch.samples)
            for t, jagged in enumerate(batch.features.values()):
                ids[at, t] = jagged.values
            dense[at], labels[at] = batch.dense, batch.label
            first += batch.samples
        for path, array in zip(parts.values(), (ids, dense, labels), strict=True):
            np.save(path, array)

    def plan(self, folder: Path, ranks: int, batch_size: int) -> None:
        """Make a plan that has all tables in the tier of CPU ranks."""
        make_plan(
            synthesize_counts(Synthesizer(self.recipe, self.samples, seed=self.seed)),
            f"cpu:{ranks}",
            Workload("training", "raw", batch_size),
            PlanSettings(tier="all"),
        ).save(folder)

    def open(self) -> "Arrays":
        """The arrays, mapped."""
        return Arrays(
            [table.name for table in self.tables],
            *(
                np.load(DATA / f"{self._name}.{name}.npy", mmap_mode="r")
                for name in ("dense", "ids", "labels")
            ),
        )

    @property
    def recipe(self) -> Recipe:
        """Criteo-Kaggle's, with tables that plain SGD trains."""
        found = load_recipe("criteo-kaggle", scale=self.scale, dim=self.dim)
        features = [
            replace(feature, table=replace(feature.table, optimizer="sgd"))
            for feature in found.features
        ]
        return replace(found, features=tuple(features))

    @property
    def _name(self) -> str:
        return f"criteo-kaggle-{self.scale:g}-{self.samples}-seed-{self.seed}"


class Arrays(NamedTuple):
    """The log's arrays."""

    names: Sequence[str]
    dense: NDArray[np.float32]
    ids: NDArray[np.int32]
    labels: NDArray[np.float32]

    def batch(self, first: int, size: int) -> Clicks:
        """Samples from `first` on."""
        at = slice(first, first + size)
        values = torch.from_numpy(np.ascontiguousarray(self.ids[at].T).astype(np.int64))
        ids = KeyedJaggedTensor(
            keys=list(self.names),
            values=values.flatten(),
            lengths=torch.ones(values.numel(), dtype=torch.int32),
        )
        dense = torch.from_numpy(np.array(self.dense[at]))
        return Clicks(dense, ids, torch.from_numpy(np.array(self.labels[at])))
