"""Moves: what each transmission of an iteration carries, for the ranks that carry it out.

All ranks have the same moves in the same order, as each replays all caches
(csrc/include/oper/scheduler/transmissions.h).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints
from oper.scheduler.row_addresses import owner_of, slot_of, width_of

MOVES = native.shared(
    "struct Move",
    np.dtype([(name, np.int64) for name in ("kind", "worker", "row", "address", "other")]),
)
# Kinds: a copy or a waiting gradient to the tier; the tier's row, or that of worker `other`, to the
# worker; a place in its cache, that of row `other` or a free one; a row trained by `other` workers.
PUSH_ROW, PUSH_GRADIENT, PULL, PEER, INSERT, JOINT = range(6)


def as_moves(words: torch.Tensor) -> NDArray[np.void]:
    """int64 [n, fields] as MOVES [n]."""
    return words.numpy().view(MOVES).reshape(-1)


def owners(moves: NDArray[np.void]) -> Ints:
    """The ranks whose shards hold the rows that move."""
    return owner_of(moves["address"])


def slots(moves: NDArray[np.void]) -> Ints:
    """Their slots there."""
    return slot_of(moves["address"])


def buckets(moves: NDArray[np.void]) -> Ints:
    """The buckets of the rows."""
    return width_of(moves["address"])
