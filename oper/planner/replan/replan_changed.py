"""Replan for other tables, ranks, links or limits than those of the old plan.

In: `Plan`, a `Profile`, a `Topology`, `PlanSettings`, a horizon. Out: `Replanned`. A plan is made
from scratch, and the old plan's rows are carried over into its problem (carried_rows.py), which
moves only rows that have to move. From there copies and rows move if that pays within the horizon,
as if counts alone had changed (improve_placement.py). The rows of the plan from scratch are a try
too, on its ranks as far as as many rows of their class are there: if the ranks are so many more
that they must share everything anew, this try is the one that pays.

If a placement's objective is no better than that of the plan from scratch, it moves no more bytes
either: else the rows of that plan are taken.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oper.base.arrays import Ints
from oper.base.errors import OperError
from oper.base.formatting import format_bytes, plural
from oper.base.spoken import option
from oper.plan.memories import ReplanRecord
from oper.plan.plan import Plan
from oper.plan.settings import Limits, PlanSettings
from oper.planner.assemble_plan import assemble
from oper.planner.class_placement.place_classes import by_programme
from oper.planner.make_plan import place_like
from oper.planner.price_plan import price_counts
from oper.planner.replan.carried_rows import CarriedRows, MovedLayout
from oper.planner.replan.check_tables import TableChanges
from oper.planner.replan.improve_placement import (
    Counts,
    PricedCounts,
    better_counts,
    candidate_sets,
)
from oper.planner.replan.improve_pooled import better_pooled_counts
from oper.planner.replan.limited_moves import LimitedMoves, MemoryRows, MoveLimit
from oper.planner.replan.migration.migration_cost import Migration
from oper.planner.replan.programme_with_moves import FreeMoves
from oper.planner.replan.replan_one_memory import (
    AimedSeconds,
    CarriedOver,
    Replanned,
    assemble_replanned,
    check_horizon,
)
from oper.planner.row_placement.aim import aimed_seconds
from oper.profiling.profile import Profile
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology


@dataclass(frozen=True)
class Wanted:
    """Ranks and settings of the new plan, and its limits if they are those of the old plan: these
    may follow from devices whose memory plans do not state."""

    topology: Topology
    asked: PlanSettings
    limits: Limits | None

    def is_of(self, old: Plan) -> bool:
        """Return True if the topology and the settings are those of the old plan."""
        return self.topology is old.topology and self.asked == old.asked

    @property
    def settings(self) -> PlanSettings:
        """Settings of the placement, within the old plan's extra memory if its limits are kept."""
        if self.limits is None:
            return self.asked
        return replace(self.asked, extra_memory=self.limits.extra_memory, reserve=None)

    def stated_in(self, plan: Plan) -> Plan:
        """Return the plan with the settings, and the limits that they led to."""
        return replace(plan, asked=self.asked, limits=self.limits or plan.limits)


def replan_changed(
    old: Plan,
    profile: Profile,
    wanted: Wanted,
    horizon: int,
    limit: MoveLimit,
    old_digest: str,
    report: Callable[[str], None],
) -> Replanned:
    """Replan (`replan`, replan.py) for a profile, ranks and limits that need not be the old plan's.

    Raises OperError if a table's rows are no longer the plan's, the ranks cannot hold the tables,
    the plan has a tier, `horizon` is below 1, or more has to move than the limit allows.
    """
    check_horizon(horizon)
    if old.tier:
        raise OperError(
            f"tables {', '.join(old.tier_names)} are in the hosts' memory, and a plan with a tier "
            "is replanned for new counts alone; make a plan with `oper plan --tier` for other "
            "tables, ranks or limits"
        )
    changes = TableChanges.between(old, profile)
    began = time.perf_counter()
    report("a plan from scratch")
    topology = wanted.topology
    fresh = place_like(old, profile, topology, wanted.settings)
    problem, seconds = fresh.problem, {"fresh": time.perf_counter() - began}
    report("the old plan's rows")
    pooled = isinstance(problem.topology, PooledTopology)
    free = FreeMoves.of(problem) if by_programme(problem) and not pooled else None
    sets = candidate_sets(problem, free, fresh.row_placement.holder_sets)
    from_scratch = wanted.stated_in(assemble(fresh))
    rows = CarriedRows.of(old, problem, sets)
    like_fresh = _priced(rows, rows.counts_of(from_scratch))
    start = rows.start()
    now = like_fresh if start is None else _priced(rows, start)

    report("moves that pay")
    must_move, fresh_migration = rows.moved(now.counts), rows.migration_to(from_scratch)
    _check_limit(limit, must_move.migration)
    best, moved = now, must_move
    placement = _CarriedPlacement(rows, now, like_fresh, free)
    limited = LimitedMoves(placement, horizon, limit)
    for (candidate,) in limited.tries():
        there = rows.moved(candidate.counts)
        gain = aimed_seconds(problem, now.cost) - aimed_seconds(problem, candidate.cost)
        further = there.migration.seconds(topology) - must_move.migration.seconds(topology)
        if gain * horizon > further and limit.allows(there.migration.link_bytes):
            best, moved = candidate, there
            break
    no_better = best.cost.objective_seconds > like_fresh.cost.objective_seconds
    if no_better and moved.migration.link_bytes > fresh_migration.link_bytes:
        best, moved = like_fresh, rows.moved(like_fresh.counts)
    seconds["replan"] = time.perf_counter() - began - seconds["fresh"]

    def made(placed: PricedCounts, by: MovedLayout) -> Plan:
        record = ReplanRecord(
            old_plan=old_digest,
            horizon=horizon,
            old_objective_seconds=now.cost.objective_seconds,
            changed_rows=by.moves.changed_rows,
            moved_rows=by.migration.rows,
            moved_bytes=by.migration.link_bytes,
        )
        return assemble_replanned(
            from_scratch, problem, rows.sets, placed, now, by.layout, fresh, record
        )

    return Replanned(
        made(best, moved),
        moved.moves,
        horizon,
        now.cost.objective_seconds,
        moved.migration,
        fresh,
        fresh_migration,
        seconds,
        lambda: made(now, must_move),
        AimedSeconds(*(aimed_seconds(problem, cost) for cost in (now.cost, best.cost, fresh.cost))),
        carried_over=CarriedOver(changes, old.ranks, must_move.migration),
        curve=limited.curve(),
    )


@dataclass(frozen=True)
class _CarriedPlacement:
    """The `OldPlacement` of rows that were carried over."""

    rows: CarriedRows
    without_moves: PricedCounts
    from_scratch: PricedCounts
    free: FreeMoves | None

    @property
    def memories(self) -> Sequence[MemoryRows]:
        rows = self.rows
        return [MemoryRows(rows.problem, rows.sets, rows.cost_of_moves)]

    @property
    def now(self) -> Counts:
        return (self.without_moves,)

    @property
    def like_fresh(self) -> Counts:
        return (self.from_scratch,)

    def better(self, horizon: float) -> Sequence[Counts]:
        tries = _tries(self.rows, self.without_moves, self.from_scratch, horizon, self.free)
        return [(counts,) for counts in tries]

    def link_bytes(self, counts: Counts) -> float:
        return self.rows.link_bytes(counts[0].counts)

    def aimed(self, counts: Counts) -> float:
        return aimed_seconds(self.rows.problem, counts[0].cost)


def _check_limit(limit: MoveLimit, must_move: Migration) -> None:
    """Raise OperError if more has to move than may."""
    if not limit.allows(must_move.link_bytes):
        most = format_bytes(limit.most_bytes or 0.0)
        raise OperError(
            f"{option('--max-move', most)}: {format_bytes(must_move.link_bytes)} "
            f"({plural(must_move.rows, 'row')}) must move, as their ranks are gone or cannot hold "
            "them any more; allow that, or keep these ranks and their limits"
        )


def _priced(rows: CarriedRows, counts: Ints) -> PricedCounts:
    return PricedCounts(counts, price_counts(rows.problem, rows.sets, counts))


def _tries(
    rows: CarriedRows,
    now: PricedCounts,
    like_fresh: PricedCounts,
    horizon: float,
    free: FreeMoves | None,
) -> list[PricedCounts]:
    """Return placements that gain more in `horizon` iterations than the seconds of the copies over
    links that they add to those of `now`, largest gain first."""
    problem, sets, cost = rows.problem, rows.sets, rows.cost_of_moves
    if isinstance(problem.topology, PooledTopology):
        tries = better_pooled_counts(problem, sets, now, like_fresh.counts, cost, horizon)
    else:
        tries = better_counts(problem, sets, now, cost, horizon, free)
    must_move = rows.moving_seconds(now.counts)

    def net_gain(candidate: PricedCounts) -> float:
        gain = aimed_seconds(problem, now.cost) - aimed_seconds(problem, candidate.cost)
        return gain * horizon - (rows.moving_seconds(candidate.counts) - must_move)

    gains = [(net_gain(candidate), candidate) for candidate in (*tries, like_fresh)]
    gains.sort(key=lambda gained: -gained[0])
    return [candidate for gain, candidate in gains if gain > 0]
