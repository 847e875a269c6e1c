"""Batches of accesses as the kernels take them, and the sort of accesses in NumPy."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from oper.plan.layout import LOCAL, SLOT_BITS, SLOT_MASK
from oper.runtime.memory.runtime_plan import REPLICA
from oper.runtime.tables.kernel_structs import FEATURE, as_words


@dataclass
class Accesses:
    """F features of B buckets, N accesses."""

    rank: int
    ranks: int
    bucket_slots: list[int]  # [B]: what the arenas have
    features: NDArray[Any]  # FEATURE [F]
    segment_offset: NDArray[np.int64]  # [F + 1]
    addresses: NDArray[np.int64]  # [N]

    def tensors(self) -> tuple[Any, ...]:
        """The arguments of sort_accesses."""
        addresses, segment_offset = map(torch.from_numpy, (self.addresses, self.segment_offset))
        return (addresses, segment_offset, self.words, self.rank, self.ranks, self.bucket_slots)

    @property
    def buckets(self) -> int:
        return len(self.bucket_slots)

    @property
    def words(self) -> torch.Tensor:
        """The features as the kernels take them."""
        return as_words(self.features)

    def keys(self) -> tuple[Any, Any, Any, Any]:
        """Position, bucket, owner code and slot of each access that is sorted, in order."""
        position = np.arange(len(self.addresses))
        feature = np.searchsorted(self.segment_offset, position, side="right") - 1
        bucket = self.features["bucket"][feature]
        field, slot = self.addresses >> SLOT_BITS, self.addresses & SLOT_MASK
        owner = np.where(field == LOCAL, self.rank, field) + 1
        owner[field == REPLICA] = 0
        kept = self.features["has_gradient"][feature] != 0
        return position[kept], bucket[kept], owner[kept], slot[kept]


def sorted_runs(accesses: Accesses) -> tuple[Any, Any, Any, Any]:
    """What sort_accesses returns."""
    position, bucket, owner, slot = accesses.keys()
    order = np.lexsort((position, slot, owner, bucket))
    rows = np.stack([bucket, owner, slot], axis=1)[order]
    new = np.ones(len(rows), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]).any(axis=1)
    start = np.append(np.flatnonzero(new), len(rows))
    codes = accesses.ranks + 1
    runs_of = np.bincount(rows[new, 0] * codes + rows[new, 1], minlength=accesses.buckets * codes)
    return position[order], start, rows[new, 2], np.append(0, np.cumsum(runs_of))


def random_accesses(
    rng: np.random.Generator,
    ranks: int,
    sizes: list[int],
    buckets: int,
    slots: int,
    replicas: int,
    frozen: bool,
) -> Accesses:
    """Features of `sizes` accesses in random buckets; slots follow a power law, replicas first."""
    features = np.zeros(len(sizes), dtype=FEATURE)
    features["bucket"] = rng.integers(0, buckets, len(sizes))
    features["has_gradient"] = rng.integers(0, 2, len(sizes)) if frozen else 1
    segment_offset = np.append(0, np.cumsum(sizes)).astype(np.int64)
    n = int(segment_offset[-1])
    rank = int(rng.integers(ranks))
    rank_of = rng.integers(0, ranks, n)
    slot = np.minimum(rng.zipf(1.2, n), slots) - 1
    held = rng.integers(0, replicas + 1, buckets)
    most = held[np.repeat(features["bucket"], sizes)]
    field = np.where(rank_of == rank, LOCAL, rank_of)
    field = np.where(slot < most, REPLICA, field)
    addresses = field << SLOT_BITS | slot
    return Accesses(rank, ranks, [slots] * buckets, features, segment_offset, addresses)
