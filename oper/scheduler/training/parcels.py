"""Parcels: what one rank sends another of the moves of a step, as bytes.

Both know the moves and their order: of each kind, and of it each bucket, the rows' values, then
their states; or gradients. Nothing else is in a parcel.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base.arrays import as_bytes
from oper.scheduler import moves as m
from oper.scheduler.training.arenas import CacheArenas
from oper.scheduler.training.tier_shard import TierShard

_KINDS = (m.PUSH_ROW, m.PUSH_GRADIENT, m.PULL, m.PEER)


class Parcels:
    """Packs and unpacks what moves between a rank's cache and its shard, and those of others.

    `bounded`: gradients that are pushed are sums of SGD's steps."""

    def __init__(self, arenas: CacheArenas, tier: TierShard, bounded: bool) -> None:
        self.arenas, self._tier, self._bounded = arenas, tier, bounded

    def pack(self, moves: NDArray[np.void]) -> torch.Tensor:
        """What this rank sends in these moves, uint8 [bytes]."""
        parts = [torch.empty(0, dtype=torch.uint8)]
        for kind, bucket, of in self._groups(moves):
            if kind == m.PUSH_GRADIENT:
                parts.append(as_bytes(self.arenas.take_gradients(bucket, of["row"])))
            elif kind == m.PULL:
                parts += map(as_bytes, self._tier.take_rows(bucket, m.slots(of)))
            else:
                parts += map(as_bytes, self.arenas.take_rows(bucket, of["row"]))
        return torch.cat(parts)

    def unpack(self, moves: NDArray[np.void], parcel: torch.Tensor) -> None:
        """Put what came into its places."""
        for kind, bucket, of in self._groups(moves):
            description = self.arenas.buckets[bucket]
            if kind == m.PUSH_GRADIENT:
                taken, parcel = _cut(parcel, len(of), 4 * description.dim)
                grads = taken.view(torch.float32)
                add = self._tier.subtract if self._bounded else self._tier.add_gradients
                add(bucket, m.slots(of), grads)
                continue
            rows, parcel = _cut(parcel, len(of), self.arenas.value_bytes(bucket))
            state_bytes = description.optimizer.state_bytes(description.dim)
            states, parcel = _cut(parcel, len(of), state_bytes)
            if kind == m.PUSH_ROW:
                self._tier.put_rows(bucket, m.slots(of), rows, states)
            else:
                self.arenas.put_rows(bucket, of["row"], rows, states)
        assert not parcel.numel(), "a rank sent what this one's replay does not know of"

    def _groups(self, moves: NDArray[np.void]) -> Iterator[tuple[int, int, NDArray[np.void]]]:
        """(kind, bucket, its moves), in the order of parcels."""
        for kind in _KINDS:
            of_kind = moves[moves["kind"] == kind]
            if not len(of_kind):
                continue
            buckets = m.buckets(of_kind)
            for bucket in range(len(self.arenas.buckets)):
                found = of_kind[buckets == bucket]
                if len(found):
                    yield kind, bucket, found


def _cut(parcel: torch.Tensor, rows: int, bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first rows of so many bytes each, [rows, bytes], and what follows them."""
    size = rows * bytes
    return parcel[:size].clone().view(rows, bytes), parcel[size:]
