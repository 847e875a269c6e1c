"""Carrier: the moves of a step between all ranks' caches and the tier, carried out.

First everything that is pushed goes to the owners of the rows, then what is pulled comes from them,
or from other caches. Every rank knows from the moves what it sends to whom and what comes.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.runtime.comm.exchange import Exchange
from oper.scheduler import moves as m
from oper.scheduler.training.parcels import Parcels


class Carrier:
    """Carries moves out for one rank. `due` are moves of the last step that come before the next
    ones."""

    def __init__(self, rank: int, ranks: int, exchange: Exchange, parcels: Parcels) -> None:
        self._rank, self._ranks = rank, ranks
        self._exchange, self._parcels = exchange, parcels
        self.due = np.zeros(0, dtype=m.MOVES)

    def carry_out(self, moves: NDArray[np.void]) -> None:
        """Send and receive what moves. Collective: all ranks have the same moves."""
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
        """What came from each rank, of moves from one rank to one each."""
        mine, to = moves[source == self._rank], target[source == self._rank]
        parts = [self._parcels.pack(mine[to == rank]) for rank in range(self._ranks)]
        return self._exchange.send(parts, action)

    def _receive(
        self, moves: NDArray[np.void], source: Ints, target: Ints, received: list[torch.Tensor]
    ) -> None:
        mine, by = moves[target == self._rank], source[target == self._rank]
        for rank, part in enumerate(received):
            self._parcels.unpack(mine[by == rank], part)
