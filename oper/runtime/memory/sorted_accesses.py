"""Runs: the accesses of a batch sorted by the row that they read, and which rows are whose.

All accesses of one row stand together: a RUN. Rows are ordered by bucket, then by owner, then by
slot. The replicas of a bucket, which every rank holds, come before the rows of rank 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class SortedRows:
    """Distinct rows in order of bucket, owner and slot; of each bucket the replicas first.

    `before` counts the rows before those of each bucket and owner: replicas and `ranks` owners of
    the first bucket, of the second, and so on, and then all rows.
    """

    slots: torch.Tensor  # int64 [rows]
    before: torch.Tensor  # int64 [buckets · (1 + ranks) + 1]
    ranks: int

    def __len__(self) -> int:
        return len(self.slots)

    def range(self, bucket: int, owner: int) -> slice:
        """The rows of a bucket that a rank owns."""
        return self._slice(bucket, 1 + owner, 2 + owner)

    def replicas(self, bucket: int) -> slice:
        """The rows of a bucket that every rank holds."""
        return self._slice(bucket, 0, 1)

    def bucket(self, bucket: int) -> slice:
        """All rows of a bucket."""
        return self._slice(bucket, 0, 1 + self.ranks)

    @property
    def buckets(self) -> int:
        return (len(self.before) - 1) // (1 + self.ranks)

    def row_counts(self) -> np.ndarray:
        """Rows by bucket and owner, int64 [buckets, 1 + ranks], replicas first."""
        return np.diff(self.before.numpy()).reshape(-1, 1 + self.ranks)

    @cached_property
    def _before(self) -> list[int]:
        found: list[int] = self.before.tolist()
        return found

    def _slice(self, bucket: int, first: int, last: int) -> slice:
        base = bucket * (1 + self.ranks)
        return slice(self._before[base + first], self._before[base + last])


@dataclass(frozen=True, eq=False)
class Runs(SortedRows):
    """The rows of a batch, with the accesses of each: run i is
    positions[starts[i] : starts[i + 1]]. Where they go `by_bag`, those are not the accesses'
    positions but their bags, which is all that unweighted sums of gradients must know."""

    positions: torch.Tensor  # int32 [accesses], in the batch
    starts: torch.Tensor  # int32 [rows + 1]
    by_bag: bool

    @classmethod
    def of_tensors(cls, tensors: Sequence[torch.Tensor], ranks: int, by_bag: bool) -> "Runs":
        """From what the operator oper::sort_accesses returns."""
        positions, starts, slots, before = tensors
        return cls(slots, before, ranks, positions, starts, by_bag)

    def tensors(self) -> list[torch.Tensor]:
        """The reverse of `of_tensors`."""
        return [self.positions, self.starts, self.slots, self.before]

    @property
    def accesses(self) -> int:
        """How many accesses were sorted; those of frozen tables may be left out."""
        return len(self.positions)

    def access_counts(self) -> np.ndarray:
        """Accesses by bucket and owner, int64 [buckets, 1 + ranks], replicas first."""
        counts = np.diff(self.starts.numpy()[self.before.numpy()]).astype(np.int64)
        return counts.reshape(-1, 1 + self.ranks)
