"""Rows of two memories that are worth moving to, from those of an older plan, together.

In: `OldRows` of each memory, a horizon. Out: `PricedCounts` of each, for each try. Tried are the
starts of improve_placement.py: the rows as they are, with the copies on devices that pay now, and,
if ranks differ, those that one programme of both memories wants (programme_with_moves.py). From
each, rows of both are swapped at once, because a rank's cost in one memory decides its share of the
other. The moves of each memory by itself are tried too, for each of them and for both.
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from oper.base.arrays import Floats, Ints
from oper.planner.class_placement.heterogeneous import keep_budget
from oper.planner.price_plan import price_counts
from oper.planner.replan.improve_placement import (
    FEWEST_MOVES,
    Counts,
    PricedCounts,
    moving_seconds,
    with_copies,
)
from oper.planner.replan.migration.flows import net_flows
from oper.planner.replan.programme_with_moves import MovableRows, counts_by_programme
from oper.planner.replan.replan_one_memory import OldRows
from oper.planner.row_placement.aim import aimed_of_all
from oper.planner.row_placement.capacity_repair import keep_capacity
from oper.planner.row_placement.swap_together import Swappable, swap_together


class _Start(NamedTuple):
    """Rows of each memory to swap from, and the gain that a move must have, in multiples of its
    price."""

    counts: list[Ints]
    times_price: float = 1.0
    worth: float = 1.0  # weight of its gain, compared with other starts


def better_together(memories: Sequence[OldRows], horizon: float) -> list[Counts]:
    """Return counts that gain more in `horizon` iterations than the seconds of their copies over
    links, largest gain first."""
    now = tuple(each.now for each in memories)
    balance = memories[0].problem.asked.balance
    ranks = memories[0].problem.ranks
    old_seconds = aimed_of_all([each.cost for each in now], balance)

    def net_gain(candidate: Counts) -> float:
        moving = 0.0
        for old, new in zip(memories, candidate, strict=True):
            flows = net_flows(old.now.counts, new.counts, old.migration_cost)
            moving += moving_seconds(flows, old.problem.classes, old.migration_cost) / ranks
        gain = old_seconds - aimed_of_all([each.cost for each in candidate], balance)
        return gain * horizon - moving

    by_itself = [(old.now, *old.better_counts(horizon)[:1]) for old in memories]
    better: list[tuple[float, Counts]] = [
        (net_gain(candidate), candidate) for candidate in product(*by_itself)
    ]
    prices = [each.migration_cost.seconds / ranks / horizon for each in memories]
    for start in _starts(memories, prices):
        swapped = _swapped(memories, start, prices)
        if swapped is not None:
            better.append((net_gain(swapped) * start.worth, swapped))
    better.sort(key=lambda priced: -priced[0])
    return [candidate for gain, candidate in better if gain > 0]


def _starts(memories: Sequence[OldRows], prices: list[Floats]) -> list[_Start]:
    sets = [each.locator.holder_sets for each in memories]
    now = [each.now.counts for each in memories]
    each = list(zip(memories, sets, now, prices, strict=True))
    starts = [
        _Start(now),
        _Start([with_copies(old.problem, of, counts, price) for old, of, counts, price in each]),
    ]
    movable = [
        MovableRows(old.problem, of, counts, price, old.free)
        for old, of, counts, price in each
        if old.free is not None
    ]
    even_links = memories[0].problem.asked.balance == "link"
    if len(movable) == len(memories) and not even_links:
        wanted = counts_by_programme(movable)
        for old, of, rows in zip(memories, sets, wanted, strict=True):
            problem = old.problem
            keep_budget(rows.counts, of, problem.classes, problem.budget_bytes, problem.ranks)
        starts.append(_Start([rows.counts for rows in wanted], wanted[0].times_price, FEWEST_MOVES))
    return starts


def _swapped(memories: Sequence[OldRows], start: _Start, prices: list[Floats]) -> Counts | None:
    """Return the rows after the swaps that pay; None if a capacity is exceeded."""
    swappable = []
    for old, counts, price in zip(memories, start.counts, prices, strict=True):
        problem, sets, counts = old.problem, old.locator.holder_sets, counts.copy()
        if not keep_capacity(problem, sets, counts):
            return None
        cost = price_counts(problem, sets, counts)
        swappable.append(Swappable(problem, sets, counts, cost, price * start.times_price))
    swapped = swap_together(swappable)
    return tuple(
        PricedCounts(counts, price_counts(of.problem, of.holder_sets, counts), swapped.rounds)
        for of, counts in zip(swappable, swapped.counts, strict=True)
    )
