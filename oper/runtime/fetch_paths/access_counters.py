"""Counters of the rows and bytes that a rank read, sent and updated.

All are totals since the start or the last `reset`; vectors are indexed by rank. A row counts once a
batch. Counts on a device are brought here when somebody looks.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from oper.base.errors import OperError
from oper.runtime.memory.device import Cpu, Device
from oper.runtime.memory.stream_order import StreamOrder

_SCALARS = (
    "lookups",  # batches read
    "steps",  # updates taken
    "accesses",  # rows that bags name, repeats counted
    "replica_accesses",  # of those, of rows with copies on all ranks
    # These are counted in batches that were sorted whole: trained without frozen tables, or fetched
    # as distinct rows or from other hosts.
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
    # Of other nodes, by owner: traffic over the network for this rank, or, if distinct rows are
    # fetched, for all ranks of its node whose relay it is. Rows that are fetched again for the
    # gradients of weights count again.
    "relayed_rows",
    "relayed_bytes",
    "relayed_gradient_rows",
    "relayed_gradient_bytes",
    # Of rows with a copy on each node, by the holder in another node that the sums of this rank's
    # node, or totals, were sent to: slots and counts are in neither.
    "node_copy_rows",
    "node_copy_bytes",
    # Of pooled tables, by the rank of another node that the bags were forwarded to: it reads the
    # rows, which are among its accesses and not among this rank's.
    "forwarded_bags",  # parts of bags, each with an access or more
    "forwarded_accesses",
    "forwarded_bytes",  # sent for them: lengths, addresses and weights
    "bag_sum_bytes",  # that came back, a vector a bag
    "bag_gradient_bytes",  # that were sent, a vector a bag
)


# The counters that counts from a kernel are, by name.
_Named = Callable[[np.ndarray], Mapping[str, Any]]


class Counters:
    """The counters of one engine on one of `ranks` ranks: int64 scalars and vectors [ranks] by
    name. Additions on `device`, made in place, happen in one order, whatever the streams."""

    def __init__(self, ranks: int, device: Device | None = None) -> None:
        self._ranks = ranks
        self._order = StreamOrder(device or Cpu())
        # Kept as they are: a step that was captured adds to them.
        self._later: dict[_Named, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        """Start again from zero."""
        self._totals = dict.fromkeys(_SCALARS, 0)
        self._by_rank = {name: np.zeros(self._ranks, dtype=np.int64) for name in _VECTORS}
        with self.adding():
            for counts in self._later.values():
                counts.zero_()
        self._pending: list[tuple[Future[Any], Callable[[Any], Mapping[str, Any]]]] = []

    @property
    def totals(self) -> dict[str, int]:
        """The scalars."""
        self._fetch()
        return self._totals

    @property
    def by_rank(self) -> dict[str, np.ndarray]:
        """The vectors."""
        self._fetch()
        return self._by_rank

    def add(self, **counts: Any) -> None:
        """Add to counters by name."""
        for name, count in counts.items():
            (self._totals if name in self._totals else self._by_rank)[name] += count

    @contextmanager
    def setting_aside(self) -> Iterator[dict[str, Any]]:
        """Set aside all that the host adds inside: the counts of a step that is captured, which are
        added when it is run. Yield a dict that has them in the end. OperError if a device would
        count something that it has not counted before."""
        totals, by_rank = dict(self._totals), {n: v.copy() for n, v in self._by_rank.items()}
        later, added = dict(self._later), dict[str, Any]()
        try:
            yield added
            if self._later.keys() != later.keys():
                raise OperError(
                    "a step was captured that does what the steps before did not: let the step be "
                    "the same each time"
                )
        finally:
            now = self._totals | self._by_rank
            more = {name: now[name] - old for name, old in (totals | by_rank).items()}
            added.update({name: count for name, count in more.items() if np.any(count)})
            self._totals, self._by_rank, self._later = totals, by_rank, later

    def add_later(self, counts: torch.Tensor, named: _Named) -> None:
        """Add the counters that `named` makes of counts once somebody looks: the host does not wait
        before for counts on a device. The counts have one shape every time, and are added to in
        place."""
        with self.adding():
            if named in self._later:
                self._later[named] += counts
            else:
                self._later[named] = counts

    @contextmanager
    def adding(self) -> Iterator[None]:
        """Let this thread's stream add to counts on the device inside: after the additions of other
        streams so far, and before their later ones."""
        self._order.before_write()
        try:
            yield
        finally:
            self._order.after_write()

    def add_when(self, future: Future[Any], named: Callable[[Any], Mapping[str, Any]]) -> None:
        """Add what `named` makes of the result of a future, once it is there."""
        pending, self._pending = [*self._pending, (future, named)], []
        for one in pending:
            if one[0].done():
                self._add_result(*one)
            else:
                self._pending.append(one)

    def _add_result(self, future: Future[Any], named: Callable[[Any], Mapping[str, Any]]) -> None:
        if future.exception() is None:  # otherwise the user of the result gets the error
            self.add(**named(future.result()))

    def _fetch(self) -> None:
        pending, self._pending = self._pending, []
        for one in pending:
            self._add_result(*one)
        with self.adding():
            for named, counts in self._later.items():
                self.add(**named(counts.cpu().numpy()))
                counts.zero_()

    def to_dict(self) -> dict[str, Any]:
        """Return the totals as numbers and lists, which JSON holds."""
        return self.totals | {name: vector.tolist() for name, vector in self.by_rank.items()}
