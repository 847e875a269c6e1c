"""Synthetic logs: samples drawn from a recipe, batch by batch, in the form of a log's reader.

Each table's popularity law holds exactly. An id is drawn by inverting the law's distribution
function, rank = F⁻¹(u) with u uniform, and a seeded bijection of the table's rows turns its rank
into a row. The samples of a latent class (recipes.CoAccess) draw their first ids' u from one of
equally likely strata of (0, 1).

Drift D: the id of sample s of N has moved with probability D · s / (N - 1). A moved id's rank goes
through a second bijection first, so that a share D of the accesses at the end of the log belongs
to an order of popularity that is independent of the one at its beginning, and none at the
beginning.

Churn: a table with more rows than its law has ranks gives the ranks to new rows, one after the
other in a random order, evenly over the log. A new row is accessed as often as the row that it
replaces was, which is not accessed again.

Every number is a function of the seed, the table and the batch, so threads do not change it.
"""

import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.cost.workload import MOST_SAMPLES
from oper.logs.batches.batch import Batch, Jagged, Location
from oper.synth.label_model import DENSE_COLUMNS, BayesAuc, LabelModel
from oper.synth.recipes import Feature, Recipe

Order = Literal["scattered", "frequency", "age"]
ORDERS: tuple[Order, ...] = ("scattered", "frequency", "age")
for _number, _order in enumerate(ORDERS):
    native.shared(f"order {_order}", _number)

# Largest batch in samples, and in ids if it has several samples. Random streams are per batch, so
# other values would generate other logs.
_BATCH_SAMPLES = 1 << 16
_BATCH_IDS = 1 << 22


def stream_key(seed: int, *what: str | int) -> int:
    """Return a 63-bit key for one purpose; different purposes get independent random numbers."""
    digest = hashlib.blake2b(repr((seed, *what)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Synthesizer:
    """A log to generate: `samples` of a recipe with a drift, a seed and an order of the ids.

    `order`: row ids scattered over each table (as hashes are), by frequency (hottest row 0), or by
    age (in order of first appearance, roughly: hot rows come early).
    """

    recipe: Recipe
    samples: int
    drift: float = 0.0
    seed: int = 0
    order: Order = "scattered"

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise OperError(f"{option('--samples', self.samples)}: expected 1 to {MOST_SAMPLES:,}")
        if not 0 <= self.seed < 1 << 63:
            raise OperError(f"{option('--seed', self.seed)}: expected 0 to 2^63 - 1")
        if not 0 <= self.drift <= 1:
            raise OperError(f"{option('--drift', self.drift)}: expected a share from 0 to 1")
        if self.order not in ORDERS:
            raise OperError(f"{option('--order', self.order)}: expected one of {', '.join(ORDERS)}")

    @property
    def batch_samples(self) -> int:
        """Samples of each batch except the last."""
        by_ids = int(_BATCH_IDS / max(self.recipe.ids_per_sample, 1e-9))
        return max(1, min(_BATCH_SAMPLES, by_ids))

    @property
    def source(self) -> dict[str, Any]:
        """Settings that the log was generated from, for the profile."""
        return {
            **self.recipe.source,
            "samples": self.samples,
            "drift": self.drift,
            "seed": self.seed,
            "order": self.order,
        }

    def batches(self, auc: BayesAuc | None = None) -> Iterator[Batch]:
        """Yield the log's samples in order, with label and dense values; add their logits to
        `auc`."""
        model = LabelModel(self.recipe, stream_key(self.seed, "model"))
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            for index, first in enumerate(range(0, self.samples, self.batch_samples)):
                batch, logits = self._batch(index, first, model, pool)
                if auc is not None:
                    auc.add(logits)
                yield batch

    def row_key(self, table: int) -> int:
        """Return the key of the bijection from ranks to rows of a table."""
        return stream_key(self.seed, "rows", table)

    def moved_share(self, begin: int, end: int) -> float:
        """Return the share of accesses of samples begin … end - 1 that have moved, on average."""
        return self.drift * (begin + end - 1) / 2 / max(1, self.samples - 1)

    def _batch(
        self, index: int, first: int, model: LabelModel, pool: ThreadPoolExecutor
    ) -> tuple[Batch, NDArray[np.float64]]:
        samples = min(self.batch_samples, self.samples - first)
        random = np.random.default_rng([self.seed, 0, index])
        coaccess = self.recipe.coaccess
        in_class = random.random(samples) < coaccess.share
        classes = np.where(in_class, random.integers(coaccess.classes, size=samples), -1)
        passed = np.arange(first, first + samples) / max(1, self.samples - 1)

        def draw(table: int) -> tuple[Jagged, NDArray[np.float64]]:
            feature = self.recipe.features[table]
            random = np.random.default_rng([self.seed, 1 + table, index])
            ids = self._draw(table, feature, random, classes, passed)
            return ids, model.effect(table, ids)

        drawn = list(pool.map(draw, range(len(self.recipe.features))))
        dense = random.standard_normal((samples, len(DENSE_COLUMNS)), dtype=np.float32)
        logits = model.logits(dense, [effect for _, effect in drawn])
        names = (f.table.name for f in self.recipe.features)
        chances = 1 / (1 + np.exp(-logits))
        batch = Batch(
            samples=samples,
            features={name: ids for name, (ids, _) in zip(names, drawn, strict=True)},
            location=Location(self.recipe.name, first),
            label=(random.random(samples) < chances).astype(np.float32),
            dense=dense,
        )
        return batch, logits

    def _draw(
        self,
        table: int,
        feature: Feature,
        random: np.random.Generator,
        classes: NDArray[np.int64],
        passed: NDArray[np.float64],
    ) -> Jagged:
        """Draw the ids of one feature: `classes` int64 [n], -1 for none; `passed` float64 [n], the
        share of the log that lies before each sample."""
        import torch

        ops, samples = native.ops(), len(classes)
        rows, key = feature.table.rows, self.row_key(table)
        if feature.varying:
            lengths = random.poisson(feature.ids, samples).astype(np.int32)
        else:
            lengths = np.full(samples, feature.ids, np.int32)
        shares = random.random(int(lengths.sum()))
        if self.recipe.coaccess.share > 0:
            followers = np.flatnonzero((classes >= 0) & (lengths > 0))
            first_ids = (np.cumsum(lengths) - lengths)[followers]
            count = self.recipe.coaccess.classes
            stratum = ops.place_ranks(
                torch.from_numpy(classes[followers]), count, 0, stream_key(key, "strata"), False
            )
            shares[first_ids] = (stratum.numpy() + shares[first_ids]) / count
        in_use = feature.law.rows
        ranks = ops.draw_ranks(torch.from_numpy(shares), in_use, *feature.law.arguments)
        if in_use < rows:
            turn = ops.place_ranks(ranks, in_use, 0, stream_key(key, "churn"), False)
            replaced = turn.numpy() < (rows - in_use) * np.repeat(passed, lengths)
            ranks = torch.where(torch.from_numpy(replaced), in_use + turn, ranks)
        order = ORDERS.index(self.order)
        values = ops.place_ranks(ranks, rows, order, key, False).numpy()
        if self.drift:
            moved = random.random(len(values)) < np.repeat(self.drift * passed, lengths)
            values[moved] = ops.place_ranks(ranks[moved], rows, order, key, True).numpy()
        return Jagged(values, lengths if feature.bagged else None)
