"""Best placements within a limit on moved bytes.

In: the rows of an older plan, the counts worth moving to, a horizon, bytes. Out: `Counts`, best
first, and the points of a curve. In a shorter horizon every byte is dearer: horizons from the given
one down to one in which nothing pays lead to placements for fewer and fewer bytes, each by the
moves with the largest gain for their bytes. Between two of these a part of every class's moves is
made. Memory is proportional to the part, so capacities hold, and T is convex in the rows, so at
least this part of the gain is reached.

The moves to a plan from scratch, CUT to the bytes, are tried too, a part of every class's and the
hottest rows first: a limited plan is never worse than a new plan as far as the bytes go.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from oper.base.arrays import Ints
from oper.cost.holder_sets import HolderSets
from oper.planner.class_placement.heterogeneous import keep_budget
from oper.planner.price_plan import price_counts
from oper.planner.problem.problem import ClassProblem
from oper.planner.replan.improve_placement import Counts, PricedCounts
from oper.planner.replan.migration.flows import Flows, net_flows
from oper.planner.replan.migration.migration_cost import MigrationCost
from oper.planner.row_placement.capacity_repair import keep_capacity

_STEP = 4.0  # from one horizon to the next shorter one
_HORIZONS = 16
_HALVINGS = 10  # of the part of the moves that is made
_POINTS = 7  # of a curve, each of half the bytes of the next


class MoveLimit(NamedTuple):
    """The most bytes over links that a replan may move, and whether its curve is wanted."""

    most_bytes: float | None = None
    curve: bool = False

    def allows(self, link_bytes: float) -> bool:
        """Return True if so many bytes may be moved."""
        return self.most_bytes is None or link_bytes <= self.most_bytes


ALL_MOVES = MoveLimit()


class MemoryRows(NamedTuple):
    """Possible moves of the rows of one memory: their possible holder sets, and the cost to bring
    rows from one set to another."""

    problem: ClassProblem
    sets: HolderSets
    cost: MigrationCost


class OldPlacement(Protocol):
    """The rows of an older plan, of one memory or of two."""

    @property
    def memories(self) -> Sequence[MemoryRows]: ...

    @property
    def now(self) -> Counts:
        """Counts after only the moves that must be made."""

    @property
    def like_fresh(self) -> Counts:
        """Counts of a plan from scratch."""

    def better(self, horizon: float) -> Sequence[Counts]:
        """Return the counts worth moving to within so many iterations, best first."""

    def link_bytes(self, counts: Counts) -> float:
        """Return the bytes over links that lead there from the old plan."""

    def aimed(self, counts: Counts) -> float:
        """Return the objective of a plan with these counts, in seconds."""


@dataclass(frozen=True)
class CurvePoint:
    """Objective that a limit on moved bytes reaches, in seconds. `cut_aimed_seconds` is None if the
    moves to a plan from scratch, cut to the limit, exceed the limits of memory."""

    most_bytes: float
    moved_bytes: float
    aimed_seconds: float
    cut_aimed_seconds: float | None


class _Found(NamedTuple):
    """Placement: the bytes over links that lead to it, and its objective."""

    link_bytes: float
    aimed: float
    counts: Counts


class LimitedMoves:
    """The placements between an older plan's and one to which all moves lead that pay."""

    def __init__(self, old: OldPlacement, horizon: int, limit: MoveLimit) -> None:
        self._old, self._horizon, self._limit = old, horizon, limit
        self._cuts: dict[float, list[Counts]] = {}  # by the bytes that they may take
        self._between: dict[float, list[Counts]] = {}

    def tries(self) -> Sequence[Counts]:
        """Return the counts worth moving to within the horizon and the limit, best first."""
        if self._limit.most_bytes is None:
            return self._old.better(self._horizon)
        return self._within(self._limit.most_bytes)

    @cached_property
    def _found(self) -> list[_Found]:
        """Placements by their bytes, each better than all with fewer bytes."""
        placements = [self._priced(self._old.now)]
        for step in range(_HORIZONS):
            tried = self._old.better(self._horizon / _STEP**step)
            placements.extend(self._priced(best) for best in tried[:1])
            if not tried or placements[-1].link_bytes <= placements[0].link_bytes:
                break
        placements.sort(key=lambda placement: placement[:2])
        kept = placements[:1]
        for placement in placements[1:]:
            if placement.aimed < kept[-1].aimed:
                kept.append(placement)
        return kept

    def _priced(self, counts: Counts) -> _Found:
        return _Found(self._old.link_bytes(counts), self._old.aimed(counts), counts)

    def _within(self, most_bytes: float) -> list[Counts]:
        """Return placements better than the one without moves, for at most `most_bytes`, best
        first."""
        least, aimed = self._least_bytes, self._old.aimed
        fit = [each.counts for each in self._found if each.link_bytes <= most_bytes]
        # With few rows a part of the moves may gain more, because loads are uneven on the way.
        for halved in range(_POINTS):
            limit = least + (most_bytes - least) / 2**halved
            fit.extend((*self._parts_between(limit), *self._cut(limit)))
        return sorted((e for e in fit if aimed(e) < aimed(self._old.now)), key=aimed)

    def curve(self) -> tuple[CurvePoint, ...]:
        """Return the points for limits from a few of the bytes to all bytes of the moves that pay;
        none if no curve is asked for."""
        if not self._limit.curve:
            return ()
        before = self._least_bytes
        pays = self._found[-1].link_bytes - before
        return tuple(
            self._point(before + pays / 2**halved) for halved in reversed(range(_POINTS)) if pays
        )

    def _point(self, most_bytes: float) -> CurvePoint:
        best = next(iter(self._within(most_bytes)), self._old.now)
        cut = [self._old.aimed(each) for each in self._cut(most_bytes)]
        return CurvePoint(
            most_bytes, self._old.link_bytes(best), self._old.aimed(best), min(cut, default=None)
        )

    @cached_property
    def _least_bytes(self) -> float:
        """Bytes that must move under any limit."""
        return self._old.link_bytes(self._old.now)

    def _parts_between(self, most_bytes: float) -> list[Counts]:
        """Return a part of the moves from the last placement that takes no more bytes to the
        next."""
        if most_bytes not in self._between:
            self._between[most_bytes] = [
                part
                for fewer, more in pairwise(self._found)
                if fewer.link_bytes <= most_bytes < more.link_bytes
                for part in self._parts(fewer.counts, more.counts, most_bytes)
            ]
        return self._between[most_bytes]

    def _cut(self, most_bytes: float) -> list[Counts]:
        """Return the moves to the plan from scratch, cut to so many bytes."""
        if most_bytes not in self._cuts:
            parts = self._parts(self._old.now, self._old.like_fresh, most_bytes)
            self._cuts[most_bytes] = list(parts)
        return self._cuts[most_bytes]

    def _parts(self, before: Counts, after: Counts, most_bytes: float) -> Iterator[Counts]:
        """Yield the most of the moves from one placement to another, evenly and hottest rows
        first."""
        if self._old.link_bytes(after) <= most_bytes:
            yield after
            return
        for hottest_first in (False, True):
            moves = [
                _Moves(rows, old.counts, new.counts, hottest_first)
                for rows, old, new in zip(self._old.memories, before, after, strict=True)
            ]
            best, few, many = None, 0.0, 1.0
            for _ in range(_HALVINGS):
                share = (few + many) / 2
                made = tuple(each.part(share) for each in moves)
                part = tuple(each for each in made if each is not None)
                if len(part) == len(made) and self._old.link_bytes(part) <= most_bytes:
                    best, few = part, share
                else:
                    many = share
            if best is not None:
                yield best


class _Moves:
    """The moves of one memory between two placements, in the order in which parts take them."""

    def __init__(self, rows: MemoryRows, before: Ints, after: Ints, hottest_first: bool) -> None:
        self._memory, self._before = rows, before
        flows, classes = net_flows(before, after, rows.cost), rows.problem.classes
        heat = (classes.traffic_bytes(rows.problem.workload) / classes.m)[flows.row_class]
        # A part of the moves between the same holders takes as many hotter as colder rows.
        order = np.lexsort((-heat,) if hottest_first else (-heat, flows.after, flows.before))
        self._flows = Flows(*(getattr(flows, f.name)[order] for f in fields(Flows)))
        self._hottest_first = hottest_first

    def part(self, share: float) -> PricedCounts | None:
        """Return the rows after a share of the moves; None if a capacity is exceeded."""
        problem, sets, _ = self._memory
        rows = self._flows.rows
        ends = np.cumsum(rows)
        if self._hottest_first:
            taken = np.clip(np.rint(share * rows.sum()) - (ends - rows), 0, rows)
        else:
            taken = np.diff(np.floor(share * ends), prepend=0)
        taken = taken.astype(np.int64)
        counts = self._before.copy()
        np.subtract.at(counts, (self._flows.row_class, self._flows.before), taken)
        np.add.at(counts, (self._flows.row_class, self._flows.after), taken)
        keep_budget(counts, sets, problem.classes, problem.budget_bytes, problem.ranks)
        if not keep_capacity(problem, sets, counts):
            return None
        return PricedCounts(counts, price_counts(problem, sets, counts))
