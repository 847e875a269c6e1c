"""Transmissions between caches and tier: counts, and moves for the ranks that carry them out.

One transmission is one row, or its gradient, one way. A row counts once for a worker and iteration.
A move is the content of one transmission, with sender and receiver. All ranks have the same moves
in the same order, because each replays all caches (csrc/include/oper/scheduler/transmissions.h).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Ints
from oper.scheduler.row_addresses import owner_of, slot_of, width_of

# Transmissions of each worker, as in csrc/include/oper/scheduler/transmissions.h.
TRANSMISSIONS = native.shared(
    "struct Transmissions",
    np.dtype(
        [
            (name, np.int64)
            for name in (
                "miss_pull",  # rows that were absent or outdated, from the tier
                "update_push",
                "evict_push",  # updates of rows that left the cache
                "peer_push",  # rows, straight to another worker
                "pull_bytes",
                "push_bytes",  # of the three kinds
                "reads",  # distinct rows of a worker and iteration
                "hits",  # of present and latest rows
                "wrong_reads",  # reads that lack an update of an earlier iteration
                "lag",  # the most updates that a read lacks
            )
        ]
    ),
)
PUSHES = ["update_push", "evict_push", "peer_push"]
_SUMMED = [name for name in TRANSMISSIONS.names or () if name != "lag"]


def add_to(total: NDArray[np.void], moved: NDArray[np.void]) -> None:
    """Add transmissions to a total, TRANSMISSIONS [M] each."""
    for name in _SUMMED:
        total[name] += moved[name]
    total["lag"] = np.maximum(total["lag"], moved["lag"])


MOVES = native.shared(
    "struct Move",
    np.dtype([(name, np.int64) for name in ("kind", "worker", "row", "address", "other")]),
)
# Kinds of moves. A copy (PUSH_ROW) or a waiting gradient goes to the tier. The tier's row (PULL),
# or that of worker `other` (PEER), comes to the worker. A row gets a place in its cache (INSERT):
# that of row `other`, or a free one. A row was trained by `other` workers (JOINT).
PUSH_ROW, PUSH_GRADIENT, PULL, PEER, INSERT, JOINT = range(6)


def as_moves(words: torch.Tensor) -> NDArray[np.void]:
    """Name the columns of a kernel's answer: int64 [n, fields] becomes MOVES [n]."""
    return words.numpy().view(MOVES).reshape(-1)


def owners(moves: NDArray[np.void]) -> Ints:
    """Return the ranks whose shards hold the moved rows."""
    return owner_of(moves["address"])


def slots(moves: NDArray[np.void]) -> Ints:
    """Return the slots of the moved rows in their shards."""
    return slot_of(moves["address"])


def buckets(moves: NDArray[np.void]) -> Ints:
    """Return the buckets of the rows."""
    return width_of(moves["address"])
