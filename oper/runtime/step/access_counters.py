"""Counters of what a rank read, sent and updated: no row twice, as sorted_accesses.py has them.

All are totals since the start or the last `reset`; vectors are indexed by rank.
"""

from typing import Any

import numpy as np

_SCALARS = (
    "lookups",  # batches read
    "steps",  # updates taken
    "accesses",  # rows that bags name, repeats counted
    "replica_accesses",  # of those, of rows with copies on all ranks
    # Of the batches that were sorted whole: trained without frozen tables, or fetched as distinct
    # rows or from other hosts.
    "distinct_rows",
    "updated_rows",  # that this rank updated, replicas included
    "allreduce_bytes",  # the replicas' AllReduce, as its method's formula counts them
)
_VECTORS = (
    "accessed_rows",  # of the accesses, those of other rows than replicas, by their source
    "fetched_rows",  # read from each rank, itself included: accesses, or distinct ones
    "fetched_bytes",
    "gradient_rows",  # summed gradients for each owner, itself included
    "gradient_bytes",
)


class Counters:
    """Of one engine on one rank, of `ranks`: int64 scalars and vectors [ranks] by name."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self.totals = dict.fromkeys(_SCALARS, 0)
        self.by_rank = {name: np.zeros(self._ranks, dtype=np.int64) for name in _VECTORS}

    def add(self, **counts: Any) -> None:
        """Add to counters by name."""
        for name, count in counts.items():
            (self.totals if name in self.totals else self.by_rank)[name] += count

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds them."""
        return self.totals | {name: vector.tolist() for name, vector in self.by_rank.items()}
