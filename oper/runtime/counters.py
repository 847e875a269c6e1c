"""Counters: what a rank read, sent and updated, counted from the sort's own prefixes, no row twice.

All are totals since the start or the last `reset`; vectors are indexed by rank.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


def _vector() -> Any:
    return field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass
class Counters:
    """Of one engine on one rank, of M ranks."""

    ranks: int
    lookups: int = 0  # batches read
    steps: int = 0  # updates
    accesses: int = 0  # rows that the bags name, repeats counted
    accessed_rows: NDArray[np.int64] = _vector()  # [M] of those, by the rank that holds the row
    fetched_rows: NDArray[np.int64] = _vector()  # [M] read from each rank, as the plan's fetch says
    fetched_bytes: NDArray[np.int64] = _vector()  # [M]
    replica_accesses: int = 0
    distinct_rows: int = 0  # in the batches that were sorted
    gradient_rows: NDArray[np.int64] = _vector()  # [M] sums sent to each owner, own ones included
    gradient_bytes: NDArray[np.int64] = _vector()  # [M]
    updated_rows: int = 0
    allreduce_bytes: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        for each in fields(self)[1:]:
            vector = each.default_factory is not None and not isinstance(each.default, int)
            setattr(self, each.name, np.zeros(self.ranks, dtype=np.int64) if vector else 0)

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds them."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
