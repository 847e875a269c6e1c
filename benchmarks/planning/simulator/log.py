"""The samples that are replayed: of each table the ids of every sample's bag, in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oper.logs.batches.batch import Batch

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Log:
    """Sample s has the ids `values[t][offsets[t][s] : offsets[t][s + 1]]` of table t."""

    values: Sequence[NDArray[np.integer]]
    offsets: Sequence[Ints]

    @staticmethod
    def of(batches: Iterable[Batch], tables: Sequence[str]) -> "Log":
        """The ids of the named tables in a log's batches."""
        values: list[list[NDArray[np.int32]]] = [[] for _ in tables]
        lengths: list[list[Ints]] = [[] for _ in tables]
        for batch in batches:
            for t, name in enumerate(tables):
                ids = batch.features[name]
                values[t].append(ids.values.astype(np.int32))
                of_samples = np.ones(batch.samples) if ids.lengths is None else ids.lengths
                lengths[t].append(of_samples.astype(np.int64))
        return Log(
            [np.concatenate(of_table) for of_table in values],
            [np.concatenate([[0], np.cumsum(np.concatenate(n))]) for n in lengths],
        )

    @property
    def samples(self) -> int:
        return len(self.offsets[0]) - 1

    def bags(self, table: int, samples: Ints) -> tuple[NDArray[np.integer], Ints]:
        """The ids of a table in these samples, and the number of each one's bag among them."""
        offsets = self.offsets[table]
        first, length = offsets[samples], offsets[samples + 1] - offsets[samples]
        before = np.cumsum(length) - length
        places = np.repeat(first - before, length) + np.arange(int(length.sum()))
        return self.values[table][places], np.repeat(np.arange(len(samples)), length)

    def draw(self, ranks: int, batch: int, random: np.random.Generator) -> Ints:
        """The samples of each rank's part of a global batch, [ranks, batch]: no sample twice where
        the log has as many, and else each as if it were the first."""
        size = ranks * batch
        if size <= self.samples:
            return random.permutation(self.samples)[:size].reshape(ranks, batch)
        return random.integers(self.samples, size=(ranks, batch))
