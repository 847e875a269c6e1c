"""What moved between the caches and the tier, and what it cost.

One transmission is one row, or its gradient, one way. A row counts once for a worker and iteration.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Floats

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
_PUSHES = ["update_push", "evict_push", "peer_push"]
_SUMMED = [name for name in TRANSMISSIONS.names or () if name != "lag"]


def add_to(total: NDArray[np.void], moved: NDArray[np.void]) -> None:
    """Add what was transmitted to a total, TRANSMISSIONS [M] each."""
    for name in _SUMMED:
        total[name] += moved[name]
    total["lag"] = np.maximum(total["lag"], moved["lag"])


@dataclass
class Totals:
    """Sums over iterations of what each worker transmitted.

    `barrier_cost`: rows, the largest push and the largest pull of each iteration (Herald).
    `cost_seconds`: link time, of all workers together (ESD).
    """

    workers: int
    moved: NDArray[np.void] = field(init=False)  # TRANSMISSIONS [M]
    iterations: int = 0
    barrier_cost: int = 0
    cost_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.moved = np.zeros(self.workers, dtype=TRANSMISSIONS)

    def add(self, moved: NDArray[np.void], seconds_per_byte: Floats) -> None:
        """Count an iteration's transmissions [M]."""
        add_to(self.moved, moved)
        self.iterations += 1
        pushes = np.sum([moved[name] for name in _PUSHES], axis=0)
        self.barrier_cost += int(pushes.max() + moved["miss_pull"].max())
        moved_bytes = moved["pull_bytes"] + moved["push_bytes"]
        self.cost_seconds += float(moved_bytes @ seconds_per_byte)

    @property
    def total(self) -> int:
        """All transmissions."""
        return sum(int(self.moved[name].sum()) for name in ("miss_pull", *_PUSHES))

    def to_json(self) -> dict[str, Any]:
        """All figures by name."""
        sums = {name: int(self.moved[name].sum()) for name in _SUMMED}
        return {
            **sums,
            "most_lag": int(self.moved["lag"].max()),
            "total": self.total,
            "cost_seconds": self.cost_seconds,
            "barrier_cost": self.barrier_cost,
            "hit_ratio": sums["hits"] / sums["reads"] if sums["reads"] else None,
        }
