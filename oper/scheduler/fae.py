"""FAE, a baseline: the most frequently read rows lie on all workers, no other row is cached.

A dense AllReduce sums the gradients of all frequent rows in every iteration, trained or not; in it
a worker sends 2 (M − 1) / M times their number of rows. Every other row that a worker trains is
pulled and pushed in that iteration (Herald, §6).
"""

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base.arrays import Ints
from oper.scheduler.cache import LookedUp
from oper.scheduler.row_addresses import ROW_MASK, width_of
from oper.scheduler.trace import Trace
from oper.scheduler.transmissions import TRANSMISSIONS


class FrequentRows:
    """Transmissions of `workers` workers if the rows at `frequent` lie on all of them.

    `row_bytes` are those of each width, with the optimizer's state, and `gradient_bytes` those of a
    gradient, as in `Caches`, which this class replaces in the simulator.
    """

    def __init__(
        self, workers: int, frequent: Ints, row_bytes: list[int], gradient_bytes: list[int]
    ) -> None:
        self.workers = workers
        self._frequent = np.sort(frequent)
        self._row_bytes, self._gradient_bytes = np.array(row_bytes), np.array(gradient_bytes)
        self._waiting: list[Ints] = []

    def look_up(self, addresses: Ints, offsets: Ints) -> LookedUp:
        """Note the next batch."""
        self._waiting.append(addresses)
        rows = torch.arange(len(addresses), dtype=torch.int32)
        return LookedUp(rows, torch.from_numpy(offsets), rows.long())

    def train(self, batch: LookedUp, assignment: Ints) -> NDArray[np.void]:
        """Train the batch that was looked up first, and return each worker's TRANSMISSIONS [M]."""
        addresses = self._waiting.pop(0)
        worker = np.repeat(assignment, np.diff(batch.offsets.numpy()))
        order = np.lexsort((addresses, worker))
        addresses, worker = addresses[order], worker[order]
        first = np.ones(len(addresses), dtype=bool)
        first[1:] = (addresses[1:] != addresses[:-1]) | (worker[1:] != worker[:-1])
        addresses, worker = addresses[first], worker[first]
        frequent = np.isin(addresses, self._frequent)
        moved = np.zeros(self.workers, dtype=TRANSMISSIONS)
        moved["reads"] = np.bincount(worker, minlength=self.workers)
        moved["hits"] = np.bincount(worker[frequent], minlength=self.workers)
        moved["miss_pull"] = moved["update_push"] = moved["reads"] - moved["hits"]
        exchanged = 2 * (self.workers - 1) / self.workers
        moved["peer_push"] = round(exchanged * len(self._frequent))
        others, width = worker[~frequent], width_of(addresses[~frequent])
        moved["pull_bytes"] = self._sum(others, self._row_bytes[width])
        of_frequent = self._gradient_bytes[width_of(self._frequent)].sum()
        moved["push_bytes"] = self._sum(others, self._gradient_bytes[width])
        moved["push_bytes"] += round(exchanged * float(of_frequent))
        return moved

    def flush(self) -> NDArray[np.void]:
        """Return no transmissions: nothing is left to push."""
        return np.zeros(self.workers, dtype=TRANSMISSIONS)

    def _sum(self, worker: Ints, amount: Ints) -> Ints:
        return np.bincount(worker, amount, self.workers).astype(np.int64)


def most_frequent(trace: Trace, share: float) -> Ints:
    """Return the addresses of the most frequently read share of all rows; the first in ties."""
    counts = np.zeros(int(trace.rows_of_width.sum()), dtype=np.uint32)
    for batch in trace:
        np.add.at(counts, batch.addresses & ROW_MASK, counts.dtype.type(1))
    # Only the most frequent rows are sorted, and stably: most of millions of rows are read once.
    wanted = round(share * len(counts))
    least = np.partition(counts, -wanted)[-wanted] if wanted else 0
    above, equal = np.flatnonzero(counts > least), np.flatnonzero(counts == least)
    return trace.addresses_of(np.r_[above, equal[: wanted - len(above)]]) if wanted else above[:0]
