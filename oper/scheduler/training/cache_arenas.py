"""Arenas of the rows that this rank caches, with their optimizer's state and waiting gradients.

A bucket's rows lie in the arena of its width, from the bucket's first place on. The caches' states
decide the places: a row takes the place of the row that it replaces, or the next free one.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.runtime.tables.optimizer_buckets import Bucket
from oper.scheduler import transmissions as m
from oper.scheduler.training.host_step import take_step


class CacheArenas:
    """Cache of one rank: `capacity` [B] rows of each of its buckets, whose rows take `row_bytes`
    [B] without their state."""

    def __init__(self, buckets: Sequence[Bucket], capacity: Ints, row_bytes: Sequence[int]) -> None:
        self.buckets = buckets
        self._first: list[int] = []  # place of each bucket in its width's arena
        size: dict[int, int] = {}
        for bucket, rows in zip(buckets, capacity.tolist(), strict=True):
            self._first.append(size.get(bucket.width, 0))
            size[bucket.width] = self._first[-1] + rows
        bytes = {bucket.width: n for bucket, n in zip(buckets, row_bytes, strict=True)}
        self._rows = {w: torch.zeros(n, bytes[w], dtype=torch.uint8) for w, n in size.items()}
        self._states = [
            torch.zeros(n, b.optimizer.state_bytes(b.dim), dtype=torch.uint8)
            for b, n in zip(buckets, capacity.tolist(), strict=True)
        ]
        self._grads = [
            torch.zeros(n, b.dim) for b, n in zip(buckets, capacity.tolist(), strict=True)
        ]
        self._free = [0] * len(buckets)
        self._place_of = np.full(1024, -1, dtype=np.int64)  # by the row's number, in its bucket

    @property
    def bytes(self) -> int:
        """Bytes of rows, states and gradients."""
        parts = (*self._rows.values(), *self._states, *self._grads)
        return sum(part.numel() * part.element_size() for part in parts)

    def value_bytes(self, bucket: int) -> int:
        """Return the bytes of a row of a bucket, without its state."""
        return self._rows[self.buckets[bucket].width].shape[1]

    def pointers(self) -> dict[int, int]:
        """Return the address of the arena of each width."""
        return {width: rows.data_ptr() for width, rows in self._rows.items()}

    def places(self, numbers: Ints) -> Ints:
        """Return the places of rows in their buckets, by their numbers."""
        return self._place_of[numbers]

    def places_in_arena(self, bucket: int, numbers: Ints) -> Ints:
        """Return the places of a bucket's rows in the arena of its width, by the rows' numbers."""
        return self._place_of[numbers] + self._first[bucket]

    def insert(self, inserted: NDArray[np.void]) -> None:
        """Give places to rows, in the order of these moves."""
        if not len(inserted):
            return
        most = int(inserted["row"].max())
        if most >= len(self._place_of):
            grown = np.full(2 * most + 2, -1, dtype=np.int64)
            grown[: len(self._place_of)] = self._place_of
            self._place_of = grown
        # An evicted row is not in the batch, so no place is given twice here.
        replaced = inserted["other"] >= 0
        places = self._place_of[inserted["other"]]
        for b in range(len(self.buckets)):
            new = ~replaced & (m.buckets(inserted) == b)
            count = int(np.count_nonzero(new))
            places[new] = np.arange(self._free[b], self._free[b] + count)
            self._free[b] += count
        self._place_of[inserted["row"]] = places

    def take_rows(self, bucket: int, numbers: Ints) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of rows and of their states, as bytes."""
        places = torch.from_numpy(self._place_of[numbers])
        width = self.buckets[bucket].width
        return self._rows[width][places + self._first[bucket]], self._states[bucket][places]

    def put_rows(
        self, bucket: int, numbers: Ints, rows: torch.Tensor, states: torch.Tensor
    ) -> None:
        """Write rows and their states, given as bytes, into the rows' places."""
        places = torch.from_numpy(self._place_of[numbers])
        width = self.buckets[bucket].width
        self._rows[width][places + self._first[bucket]] = rows
        self._states[bucket][places] = states

    def take_gradients(self, bucket: int, numbers: Ints) -> torch.Tensor:
        """Remove and return the waiting gradients, float32 [n, dim]."""
        places = torch.from_numpy(self._place_of[numbers])
        taken = self._grads[bucket][places]
        self._grads[bucket][places] = 0
        return taken

    def add_gradients(self, bucket: int, places: Ints, grads: torch.Tensor) -> None:
        """Add gradients [n, dim] to the waiting ones."""
        self._grads[bucket][torch.from_numpy(places)] += grads

    def step(
        self, bucket: int, places: Ints, grads: torch.Tensor, rate: float, number: int
    ) -> None:
        """Take the optimizer's step `number` with rows in a bucket's places, [n]."""
        if not len(places):
            return
        of = self.buckets[bucket]
        order = np.argsort(places)
        first = self._first[bucket]
        rows = self._rows[of.width][first : first + len(self._states[bucket])]
        parts = [(places[order], grads[torch.from_numpy(order)])]
        take_step(of, parts, rows, self._states[bucket], rate, number)
