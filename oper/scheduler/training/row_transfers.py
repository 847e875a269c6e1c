"""Transfers of rows and gradients between all ranks' caches and the tier: the moves of a step.

First all pushes go to the owners of the rows, then all pulls come from them, or from other caches.
Every rank derives its messages from the moves.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base.arrays import Ints, as_bytes
from oper.runtime.comm.exchange import Exchange
from oper.scheduler import transmissions as m
from oper.scheduler.training.cache_arenas import CacheArenas
from oper.scheduler.training.tier_shard import TierShard

_KINDS = (m.PUSH_ROW, m.PUSH_GRADIENT, m.PULL, m.PEER)  # in the order of parcels


class Parcels:
    """Packing, as bytes, of the moves between a rank's cache and shard, and those of other ranks.

    Both ends know the moves and their order. A parcel holds, for each kind of move and each bucket,
    only the rows' values and then their states, or gradients. `bounded`: pushed gradients are sums
    of SGD's steps.
    """

    def __init__(self, arenas: CacheArenas, tier: TierShard, bounded: bool) -> None:
        self.arenas, self._tier, self._bounded = arenas, tier, bounded

    def pack(self, moves: NDArray[np.void]) -> torch.Tensor:
        """Return the bytes that this rank sends in these moves, uint8."""
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
        """Write a received parcel into its places."""
        for kind, bucket, of in self._groups(moves):
            description = self.arenas.buckets[bucket]
            if kind == m.PUSH_GRADIENT:
                taken, parcel = _cut(parcel, len(of), 4 * description.dim)
                grads = taken.view(torch.float32)
                if self._bounded:
                    self._tier.subtract(bucket, m.slots(of), grads)
                else:
                    self._tier.add_gradients(bucket, m.slots(of), int(of["worker"][0]), grads)
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
        """Yield (kind, bucket, its moves), in the order of parcels."""
        for kind in _KINDS:
            of_kind = moves[moves["kind"] == kind]
            if not len(of_kind):
                continue
            buckets = m.buckets(of_kind)
            for bucket in range(len(self.arenas.buckets)):
                moves_of_bucket = of_kind[buckets == bucket]
                if len(moves_of_bucket):
                    yield kind, bucket, moves_of_bucket


class RowTransfers:
    """Execution of moves for one rank. `due` are moves of the last step that precede the next
    ones."""

    def __init__(self, rank: int, ranks: int, exchange: Exchange, parcels: Parcels) -> None:
        self._rank, self._ranks = rank, ranks
        self._exchange, self._parcels = exchange, parcels
        self.due = np.zeros(0, dtype=m.MOVES)

    def carry_out(self, moves: NDArray[np.void]) -> None:
        """Send and receive the moves. Collective: all ranks have the same moves."""
        moves = np.concatenate([self.due, moves])
        self.due = moves[:0]
        kinds = moves["kind"]
        pushes = moves[kinds <= m.PUSH_GRADIENT]
        if len(pushes):
            received = self._send(pushes, pushes["worker"], m.owners(pushes), "push rows")
            self._receive(pushes, pushes["worker"], m.owners(pushes), received)
        pulls = moves[(kinds == m.PULL) | (kinds == m.PEER)]
        if len(pulls):
            source = np.where(pulls["kind"] == m.PULL, m.owners(pulls), pulls["other"])
            received = self._send(pulls, source, pulls["worker"], "send rows")
            inserted = moves[(kinds == m.INSERT) & (moves["worker"] == self._rank)]
            self._parcels.arenas.insert(inserted)
            self._receive(pulls, source, pulls["worker"], received)

    def _send(
        self, moves: NDArray[np.void], source: Ints, target: Ints, action: str
    ) -> list[torch.Tensor]:
        """Send the moves, and return the parcel from each rank. Each move has one source and one
        target."""
        outgoing, to = moves[source == self._rank], target[source == self._rank]
        parts = [self._parcels.pack(outgoing[to == rank]) for rank in range(self._ranks)]
        return self._exchange.send(parts, action)

    def _receive(
        self, moves: NDArray[np.void], source: Ints, target: Ints, received: list[torch.Tensor]
    ) -> None:
        incoming, by = moves[target == self._rank], source[target == self._rank]
        for rank, part in enumerate(received):
            self._parcels.unpack(incoming[by == rank], part)


def _cut(parcel: torch.Tensor, rows: int, bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first `rows` rows of `bytes` bytes each, [rows, bytes], and the rest of the
    parcel."""
    size = rows * bytes
    return parcel[:size].clone().view(rows, bytes), parcel[size:]
