"""Swaps of rows in several memories of the same ranks at once, which lower the largest sum.

In: of each memory the problem, its holder sets, rows and cost. Out: rows and rounds. A row is
swapped with one of its own memory, whose widths are no other's in the search: it is one search
(swaps.py) over the classes and the holder sets of all memories, and T of a rank is the sum of all.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.linalg import block_diag

from oper.base.arrays import Floats, Ints
from oper.cost.holder_sets import HolderSets
from oper.cost.objective import Cost
from oper.cost.traffic import Direction
from oper.planner.problem.problem import ClassProblem
from oper.planner.row_placement.aim import aimed_at, aimed_directions
from oper.planner.row_placement.swaps import SwapSearch


class Swappable(NamedTuple):
    """Rows of one memory, by class and holder set: `counts` [C, G], of any rows, and the cost of
    these and all other rows there; and `price` [G, G], seconds per byte of a row's move, if any."""

    problem: ClassProblem
    holder_sets: HolderSets
    counts: Ints
    cost: Cost
    price: Floats | None = None

    @property
    def movable(self) -> Ints:
        """The holder sets whose rows may be swapped, by number: in training a replica's part of T
        is not proportional to its traffic."""
        every = np.arange(len(self.holder_sets))
        training = self.problem.workload.training
        return every[self.holder_sets.copies == 1] if training else every

    @property
    def price_of_widths(self) -> Floats:
        """Seconds that a row of one movable set and one of another must gain to be swapped,
        [W, G', G']."""
        widths = np.array(self.problem.classes.width_memory, dtype=np.float64)
        some = np.ix_(self.movable, self.movable)
        both_ways = np.zeros((len(self.movable),) * 2)
        if self.price is not None:
            both_ways = (self.price + self.price.T)[some]
        return np.asarray(widths[:, None, None] * both_ways)


class Swapped(NamedTuple):
    """Rows [C, G] of each memory, and the rounds of swaps that led there."""

    counts: tuple[Ints, ...]
    rounds: int


def _as_many(of_each: Sequence[tuple[Direction, ...]]) -> list[tuple[Direction, ...]]:
    """Return the directions of memories, with some that move nothing if one has fewer: no relay
    reads rows of the tier."""
    most = max(map(len, of_each))
    padded = []
    for directions in of_each:
        still = Direction(*map(np.zeros_like, directions[0]))
        padded.append((*directions, *[still] * (most - len(directions))))
    return padded


def swap_together(memories: Sequence[Swappable]) -> Swapped:
    """Swap while that lowers the largest T in all memories, or the slowest link if links are to be
    even, by more than the rows' prices."""
    movable = [each.movable for each in memories]
    part = block_diag(*(m.counts[:, sets] for m, sets in zip(memories, movable, strict=True)))
    of_each = [
        aimed_directions(each.problem, each.holder_sets.take(sets))
        for each, sets in zip(memories, movable, strict=True)
    ]
    directions = tuple(
        Direction(
            np.concatenate([direction.bytes for direction in same]),
            np.concatenate([direction.columns for direction in same]),
        )
        for same in zip(*_as_many(of_each), strict=True)
    )
    widths = np.cumsum([0, *(len(each.problem.classes.widths) for each in memories)])
    width = [each.problem.classes.width + w for each, w in zip(memories, widths, strict=False)]
    seconds = sum(aimed_at(each.problem, each.cost) for each in memories)
    price = None
    if any(each.price is not None for each in memories):
        price = np.zeros((int(widths[-1]), part.shape[1], part.shape[1]))
        sets = np.cumsum([0, *map(len, movable)])
        for n, each in enumerate(memories):
            memory_sets = slice(int(sets[n]), int(sets[n + 1]))
            price[widths[n] : widths[n + 1], memory_sets, memory_sets] = each.price_of_widths
    counts = np.asfortranarray(part.astype(np.int64))
    search = SwapSearch(counts, directions, np.concatenate(width), np.asarray(seconds), price)
    search.run()
    swapped, first_class, first_set = [], 0, 0
    for each, sets_of in zip(memories, movable, strict=True):
        after = each.counts.copy()
        last_class, last_set = first_class + len(after), first_set + len(sets_of)
        after[:, sets_of] = counts[first_class:last_class, first_set:last_set]
        swapped.append(after)
        first_class, first_set = last_class, last_set
    return Swapped(tuple(swapped), search.rounds_made)
