"""Caches of M workers and their synchronisation with the tier, one batch per call.

The state of all caches follows from the batches and their assignment, so every rank can keep it
without communication (Herald's snapshots). The kernels decide the transmissions:
csrc/include/oper/scheduler/bulk_synchronous.h (Herald, App. A) and bounded_staleness.h (HET).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from oper.base import native
from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.base.spoken import option
from oper.scheduler.cache_settings import EVICTIONS, ON_DEMAND, PUSHES, Synchronisation
from oper.scheduler.row_addresses import width_of
from oper.scheduler.transmissions import TRANSMISSIONS, as_moves

MOST_WORKERS = 64


class CacheTooSmallError(OperError):
    """Error of a batch of which a worker's rows exceed its cache; `needed` [W] are the most rows of
    each width that any worker trains."""

    def __init__(self, message: str, needed: Ints) -> None:
        super().__init__(message)
        self.needed = needed


class LookedUp(NamedTuple):
    """Batch whose rows have numbers: the distinct rows of sample s are `rows[offsets[s] : offsets[s
    + 1]]`."""

    rows: torch.Tensor  # int32
    offsets: torch.Tensor  # int64 [samples + 1]
    positions: torch.Tensor  # int64, of the rows among the addresses that were looked up

    def only(self, rows: NDArray[np.bool_]) -> "LookedUp":
        """Return the batch with only the rows that `rows` marks, for scoring."""
        positions = np.flatnonzero(rows)
        offsets = torch.from_numpy(np.searchsorted(positions, self.offsets.numpy()))
        chosen = torch.from_numpy(positions)
        return LookedUp(self.rows[chosen], offsets, self.positions[chosen])

    def first(self, samples: int) -> "LookedUp":
        """Return the batch with only its first `samples` samples, for scoring."""
        end = int(self.offsets[samples])
        return LookedUp(self.rows[:end], self.offsets[: samples + 1], self.positions[:end])


class Caches:
    """Caches of `workers` workers, each with room for `capacity[c]` rows of width c.

    Batches are trained in the order in which they were looked up. `row_bytes` and `gradient_bytes`
    are those of each width, with and without the optimizer's state.
    """

    def __init__(
        self,
        workers: int,
        capacity: Sequence[int],
        row_bytes: Sequence[int],
        gradient_bytes: Sequence[int],
        eviction: str = "lru",
        sync: Synchronisation = ON_DEMAND,
    ) -> None:
        if not 1 <= workers <= MOST_WORKERS:
            raise OperError(f"{option('--workers', workers)}: expected 1 to {MOST_WORKERS}")
        if eviction not in EVICTIONS:
            raise OperError(
                f"{option('--evict', eviction[:40])}: expected one of {', '.join(EVICTIONS)}"
            )
        self.workers, self.capacity, self.sync = workers, np.array(capacity), sync
        rows = torch.tensor(list(capacity), dtype=torch.int64)
        sizes = torch.tensor([list(row_bytes), list(gradient_bytes)], dtype=torch.int64)
        common: tuple[Any, ...] = (workers, rows, sizes.T.contiguous(), EVICTIONS.index(eviction))
        native.ops()
        kinds = torch.classes.oper
        self._states: Any = (
            kinds.BulkSynchronous(*common, PUSHES.index(sync.kind))
            if sync.kind in PUSHES
            else kinds.BoundedStaleness(
                *common, sync.bound, sync.kind != "het-printed", sync.batch_weight
            )
        )

    def look_up(self, addresses: Ints, offsets: Ints) -> LookedUp:
        """Number the rows of the next batch: sample s reads the rows at `addresses[offsets[s] :
        offsets[s + 1]]`, each of the form width << 56 | row."""
        numbered = self._states.look_up(torch.from_numpy(addresses), torch.from_numpy(offsets))
        return LookedUp(*numbered)

    def cached(self) -> tuple[Ints, Ints]:
        """Return the addresses of the cached rows, and the number of workers that cache each, [R]
        each."""
        addresses, copies = self._states.cached()
        return addresses.numpy(), copies.numpy()

    def latest_rows(self, batch: LookedUp) -> Floats:
        """Return the number of rows of each sample that are the latest in each cache, [samples, M]
        (LAIA)."""
        numbers: NDArray[np.float64] = self._states.latest_rows(*batch[:2]).numpy()
        return numbers

    def expected_costs(self, batch: LookedUp, seconds_per_byte: Floats) -> Floats:
        """Return the seconds of link time that each sample would cost on each worker, [samples, M]
        (ESD)."""
        seconds = torch.from_numpy(np.ascontiguousarray(seconds_per_byte, dtype=np.float64))
        costs: NDArray[np.float64] = self._states.expected_costs(*batch[:2], seconds).numpy()
        return costs

    def group(self, batch: LookedUp, room: Ints, seconds_per_byte: Floats, rounds: int = 1) -> Ints:
        """Assign samples that share rows to the same worker, in `rounds` rounds; worker w gets at
        most `room[w]` of them, which sum to at least the samples."""
        seconds = torch.from_numpy(np.ascontiguousarray(seconds_per_byte, dtype=np.float64))
        limits = torch.from_numpy(np.ascontiguousarray(room, dtype=np.int64))
        assignment: Ints = self._states.group(*batch[:2], seconds, limits, rounds).numpy()
        return assignment

    def train(self, batch: LookedUp, assignment: Ints) -> NDArray[np.void]:
        """Train a batch, sample s by worker `assignment[s]`, and return each worker's TRANSMISSIONS
        [M].

        Raise CacheTooSmallError, with the caches unchanged, if a worker's rows of the batch do not
        fit.
        """
        return self._checked(self._states.train, batch, assignment)

    def record_moves(self) -> None:
        """Record moves from now on (`take_moves`)."""
        self._states.record()

    def take_moves(self) -> NDArray[np.void]:
        """Take the moves recorded since the last call, MOVES [n]."""
        return as_moves(self._states.moves())

    def read(self, batch: LookedUp, assignment: Ints) -> NDArray[np.void]:
        """Do the first half of `train`: the transmissions before the batch is trained. A batch that
        was read but not trained is dropped. Raise the errors of `train`."""
        return self._checked(self._states.read, batch, assignment)

    def update(self) -> NDArray[np.void]:
        """Do the second half of `train`: train the batch that was read."""
        return _by_name(self._states.update())

    def settle(self, addresses: Ints) -> NDArray[np.void]:
        """Push all pending updates of these rows, which the tier then trains itself, so that no
        copy is the latest."""
        return _by_name(self._states.settle(torch.from_numpy(addresses)))

    def move(self, before: Ints, after: Ints) -> NDArray[np.void]:
        """Move rows of the tier from addresses `before` to `after`, [n] each. Their pending updates
        are pushed to the old addresses; copies stay unchanged."""
        moved = self._states.move(torch.from_numpy(before), torch.from_numpy(after))
        return _by_name(moved)

    def numbers(self, addresses: Ints) -> Ints:
        """Return the numbers of the rows at these addresses, -1 for rows that nobody caches or
        reads."""
        numbers: Ints = self._states.numbers(torch.from_numpy(addresses)).numpy()
        return numbers

    def _checked(
        self, train: Callable[..., torch.Tensor], batch: LookedUp, assignment: Ints
    ) -> NDArray[np.void]:
        try:
            moved = train(*batch[:2], torch.from_numpy(assignment))
        except ValueError as error:
            raise self._too_small(batch, assignment) or error from None
        return _by_name(moved)

    def _too_small(self, batch: LookedUp, assignment: Ints) -> CacheTooSmallError | None:
        """Return the error if a worker's rows do not fit; None if they do."""
        worker_of = np.repeat(assignment, np.diff(batch.offsets.numpy()))
        trained = np.unique(np.stack([worker_of, batch.rows.numpy()]), axis=1)
        widths = self._states.widths_of(batch.rows).numpy()
        width_of = dict(zip(batch.rows.tolist(), widths.tolist(), strict=True))
        needed = np.zeros((self.workers, len(self.capacity)), dtype=np.int64)
        np.add.at(needed, (trained[0], [width_of[row] for row in trained[1].tolist()]), 1)
        worker, width = np.unravel_index((needed - self.capacity).argmax(), needed.shape)
        rows, room = int(needed[worker, width]), int(self.capacity[width])
        if rows <= room:
            return None
        kind = " of one width" if len(self.capacity) > 1 else ""
        return CacheTooSmallError(
            f"worker {worker} trains {rows:,} rows{kind} in one batch, and its cache has room for "
            f"{room:,}{' of them' * bool(kind)}",
            needed.max(axis=0),
        )

    def flush(self) -> NDArray[np.void]:
        """Push all pending updates to the tier, as before a checkpoint; return TRANSMISSIONS
        [M]."""
        return _by_name(self._states.flush())


def _by_name(moved: torch.Tensor) -> NDArray[np.void]:
    """Name the columns of a kernel's answer: [M, fields] becomes TRANSMISSIONS [M]."""
    return moved.numpy().view(TRANSMISSIONS).ravel()


def rows_that_fit(total_bytes: float, addresses: Ints, rows: Ints, row_bytes: Ints) -> Ints:
    """Return the rows of each of W widths that a cache of `total_bytes` holds, [W], given the
    `addresses` of the first batch; see `split`."""
    return split(total_bytes, rows_asked(addresses, len(row_bytes)), rows, row_bytes)


def rows_asked(addresses: Ints, widths: int) -> Ints:
    """Return the number of distinct rows of each width among a batch's addresses, [W]."""
    return np.bincount(width_of(np.unique(addresses)), minlength=widths)


def split(total_bytes: float, asked: Ints, rows: Ints, row_bytes: Ints) -> Ints:
    """Return the rows of each of W widths that a cache of `total_bytes` holds, [W].

    The bytes are divided in proportion to the bytes of the rows that a batch reads, `asked` [W]; no
    width gets more than all of its `rows` [W], of `row_bytes` [W] each.
    """
    asked_or_one = np.maximum(asked, 1)
    return np.minimum(
        rows, np.ceil(asked_or_one * (total_bytes / int(asked_or_one @ row_bytes))).astype(np.int64)
    )


def least_bytes(needed: Ints, asked: Ints, row_bytes: Ints) -> int:
    """Return the fewest bytes of a cache in which `split` leaves room for `needed` [W] rows of each
    width."""
    each = np.maximum(asked, 1)
    return math.ceil((needed / each).max() * int(each @ row_bytes))


class CacheDivision:
    """Division of a cache of `total_bytes` among W widths with `rows` [W] rows of `row_bytes` [W].
    It changes if a batch does not fit.

    Training and the loader's replay of its caches divide by the same rule, so they agree.
    """

    def __init__(self, total_bytes: float, rows: Ints, row_bytes: Ints) -> None:
        self._bytes, self._rows, self._row_bytes = total_bytes, rows, row_bytes
        self._asked = np.zeros(len(rows), dtype=np.int64)  # the most in a batch so far

    def capacity(self, addresses: Ints) -> Ints:
        """Return the rows of each width, [W], for this batch and the batches of earlier
        divisions."""
        self._asked = np.maximum(self._asked, rows_asked(addresses, len(self._rows)))
        return split(self._bytes, self._asked, self._rows, self._row_bytes)

    def least_bytes(self, needed: Ints) -> int:
        """Return the fewest bytes that leave room for `needed` [W] rows by the last division."""
        return least_bytes(needed, self._asked, self._row_bytes)
