"""What moved between the caches and the tier, and what it cost.

One transmission is one row, or its gradient, one way. A row counts once for a worker and iteration.
"""

import numpy as np
from numpy.typing import NDArray

from oper.base import native

# Of each worker, as csrc/include/oper/scheduler/transmissions.h.
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
                "hits",  # of them, present and the latest
                "wrong_reads",  # of them, without an update of an earlier iteration
                "lag",  # the most updates that one of them was without
            )
        ]
    ),
)
PUSHES = ["update_push", "evict_push", "peer_push"]
_SUMMED = [name for name in TRANSMISSIONS.names or () if name != "lag"]


def add_to(total: NDArray[np.void], moved: NDArray[np.void]) -> None:
    """Add what was transmitted to a total, TRANSMISSIONS [M] each."""
    for name in _SUMMED:
        total[name] += moved[name]
    total["lag"] = np.maximum(total["lag"], moved["lag"])
