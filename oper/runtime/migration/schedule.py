"""The schedule of a migration: the rows that each step moves, and the slots that they get.

Rows of each kind of change, from one holder set to another, are spread evenly over the steps, so
that on every rank rows leave as others come. A step reads all of its rows before it writes any, so
the slots that its rows leave are free for the rows that come. Slots are given in this order:

    a row that several of its holders keep, and no others get, stays in its slot
    other rows of several holders take slots that are free at all of them, the lowest, or new ones
    beyond the ends of all of their arenas
    rows of one owner take slots that are free there, those first that are not free at all ranks,
    or new ones at its arena's end; so does a row that its owner had as one of several holders,
    because its slot is worth more to a row that comes to all ranks

All follows from the plans alone, so that every rank finds the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np

from oper.base.arrays import Ints
from oper.runtime.migration.changed_rows import ChangedRows

_MOST_CELLS = 1 << 22  # of a matrix of rows by ranks, at a time


class SlotPool:
    """The slots of W arenas on M ranks that no row has: `free` below the ends, ascending."""

    def __init__(self, ends: Ints) -> None:
        self.ends = ends.copy()  # [W, M]
        nothing = np.zeros(0, dtype=np.int64)
        self._free = [[nothing] * ends.shape[1] for _ in ends]

    def copy(self) -> "SlotPool":
        """Return another pool, of the same slots."""
        made = SlotPool(self.ends)
        made._free = [list(of_width) for of_width in self._free]
        return made

    def release(self, w: int, rank: int, slots: Ints) -> None:
        """Take back slots that rows have left."""
        if len(slots):
            self._free[w][rank] = np.sort(np.concatenate([self._free[w][rank], slots]))

    def take(self, w: int, ranks: Sequence[int], rows: int) -> Ints:
        """Return slots for so many rows, the same at all of some ranks, [rows]."""
        free, ends = self._free[w], self.ends[w]
        common: Ints = reduce(_both, (free[r] for r in ranks))
        if len(ranks) == 1 and len(free) > 1 and len(common) > rows:
            everywhere = np.isin(common, reduce(_both, free), assume_unique=True)
            common = np.sort(common[np.argsort(everywhere, kind="stable")[:rows]])
        common = common[:rows]
        end = int(ends[list(ranks)].max())
        new = np.arange(end, end + rows - len(common))
        for r in ranks:
            left = np.setdiff1d(free[r], common, assume_unique=True)
            if len(new):
                left = np.concatenate([left, np.arange(ends[r], end)])
                ends[r] = end + len(new)
            free[r] = left
        return np.concatenate([common, new])

    def trim(self) -> None:
        """End the arenas behind the last slot that a row has."""
        for w, of_width in enumerate(self._free):
            for r, free in enumerate(of_width):
                last = self.ends[w, r] - 1 - np.arange(len(free))
                unused = int(np.cumprod(free[::-1] == last).sum())
                self.ends[w, r] -= unused
                of_width[r] = free[: len(free) - unused]


def _both(slots: Ints, others: Ints) -> Ints:
    return np.intersect1d(slots, others, assume_unique=True)


@dataclass(frozen=True)
class Schedule:
    """N rows in the order in which they move: step s moves order[starts[s] : starts[s + 1]].

    A row gets the same slot at all of its new holders. `most_slots` [W, M] are the largest sizes
    that the arenas reach, and `pool` the slots afterwards.
    """

    order: Ints  # [N] numbers of the changed rows
    starts: Ints  # [S + 1]
    slot: Ints  # [N] by the number of the row
    stays: np.ndarray  # bool [N], true if its new holders keep it in their slot
    most_slots: Ints
    pool: SlotPool

    @property
    def steps(self) -> int:
        return len(self.starts) - 1

    @staticmethod
    def of(rows: ChangedRows, pool: SlotPool, slot_bytes: Ints, bytes_per_step: int) -> "Schedule":
        """Return the schedule by which no rank receives more than `bytes_per_step` in a step,
        except for a single row; `slot_bytes` [W] are those of a row and its state."""
        order, stays = _interleaved(rows), _stays(rows)
        starts = _starts(rows, order, stays, slot_bytes, bytes_per_step)
        pool, slot = pool.copy(), np.full(len(rows), -1, dtype=np.int64)
        most = pool.ends.copy()
        for first, end in pairwise(starts.tolist()):
            moving = order[first:end]
            for w in np.unique(rows.width[moving]):
                _give_slots(rows, moving[rows.width[moving] == w], int(w), stays, pool, slot)
            most = np.maximum(most, pool.ends)
        pool.trim()
        return Schedule(order, starts, slot, stays, most, pool)


def _interleaved(rows: ChangedRows) -> Ints:
    """Return the rows in an order of which every part has about the same share of each kind of
    change."""
    number = (rows.width * len(rows.sets) + rows.before) * len(rows.sets) + rows.after
    _, kind, size = np.unique(number, return_inverse=True, return_counts=True)
    by_kind = np.argsort(kind, kind="stable")
    turn = np.empty(len(rows), dtype=np.int64)
    turn[by_kind] = np.arange(len(rows)) - np.repeat(np.cumsum(size) - size, size)
    return np.argsort((turn + 0.5) / size[kind], kind="stable")


def _stays(rows: ChangedRows) -> np.ndarray:
    """Return a mask of the rows that several new holders, all of them, have already, at one slot,
    [N]."""
    kept = np.zeros(len(rows), dtype=bool)
    for k in np.unique(rows.after[rows.sets.copies[rows.after] > 1]):
        index = np.flatnonzero(rows.after == k)
        holders = np.flatnonzero(rows.sets.holds[k])
        held = rows.sets.holds[rows.before[index]][:, holders].all(axis=1)
        index = index[held]
        slots = [rows.slot(index, np.full(len(index), r)) for r in holders]
        kept[index] = np.all([of_rank == slots[0] for of_rank in slots], axis=0)
    return kept


def _starts(
    rows: ChangedRows, order: Ints, stays: np.ndarray, slot_bytes: Ints, bytes_per_step: int
) -> Ints:
    """Return the starts of the steps in the order, and its end."""
    ranks = rows.sets.holds.shape[1]
    # Every row comes to some rank, unless it stays: about the most rows that a step can have.
    most = ranks * bytes_per_step // int(slot_bytes.min()) + 1
    most = min(most, max(_MOST_CELLS // ranks, 1))
    starts, first = [0], 0
    while first < len(order):
        end, received = first, np.zeros(ranks, dtype=np.int64)
        while end < len(order):
            part = order[end : end + most]
            copied = rows.sets.holds[rows.after[part]] & ~stays[part, None]
            after_each = received + (copied * slot_bytes[rows.width[part]][:, None]).cumsum(axis=0)
            fits = int(np.count_nonzero(after_each.max(axis=1) <= bytes_per_step))
            end += fits
            if fits < len(part):
                break
            received = after_each[-1]
        first = max(end, first + 1)
        starts.append(first)
    return np.array(starts, dtype=np.int64)


def _give_slots(
    rows: ChangedRows, moving: Ints, w: int, stays: np.ndarray, pool: SlotPool, slot: Ints
) -> None:
    """Give slots to the rows of one width that a step moves, once it has released the slots that
    they leave."""
    holds = rows.sets.holds
    for k in np.unique(rows.before[moving]):
        leaving = moving[rows.before[moving] == k]
        for r in np.flatnonzero(holds[k]):
            left = leaving[~(stays[leaving] & holds[rows.after[leaving], r])]
            pool.release(w, int(r), rows.slot(left, np.full(len(left), r)))
    kept = moving[stays[moving]]
    slot[kept] = rows.slot(kept, holds[rows.after[kept]].argmax(axis=1))
    coming = moving[~stays[moving]]
    after, copies = rows.after[coming], holds.sum(axis=1)
    # Rows with the most holders first, because the fewest slots are free for them.
    for k in sorted(np.unique(after), key=lambda k: (-int(copies[k]), k)):
        index = coming[after == k]
        slot[index] = pool.take(w, np.flatnonzero(holds[k]).tolist(), len(index))
