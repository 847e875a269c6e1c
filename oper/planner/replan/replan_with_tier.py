"""Replan of a plan with a tier: its two memories together, tables staying where they are.

In: `Plan` with a tier, a newer `Profile`, a horizon. Out: `Replanned`. Which rows are worth moving
is found for both memories at once (improve_together.py). Moves that pay together with those of the
other memory need not pay without them: so the moves of both, of one, and of none are compared, and
those are made whose gain in the whole iteration, within the horizon, exceeds their cost by most.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from oper.base.arrays import Ints
from oper.plan.certificate import Certificate
from oper.plan.memories import ReplanRecord
from oper.plan.plan import Plan
from oper.plan.plan_parts import join_memories, plans_of_memories
from oper.plan.row_moves import RowMoves
from oper.planner.class_placement.place_classes import by_programme
from oper.planner.make_placement import Planned
from oper.planner.place_together import place_memories
from oper.planner.price_plan import problems_of_memories
from oper.planner.problem.problem import Problem
from oper.planner.replan.check_tables import check_tables
from oper.planner.replan.improve_placement import Counts
from oper.planner.replan.improve_together import better_together
from oper.planner.replan.limited_moves import LimitedMoves, MemoryRows, MoveLimit
from oper.planner.replan.migration.migration_cost import Migration
from oper.planner.replan.migration.relocate import Relocation
from oper.planner.replan.programme_with_moves import FreeMoves
from oper.planner.replan.replan_one_memory import (
    AimedSeconds,
    OldRows,
    Replanned,
    check_horizon,
    migration_of,
)
from oper.planner.row_placement.aim import aimed_of_all
from oper.profiling.profile import Profile
from oper.tables.table import offsets


@dataclass(frozen=True, kw_only=True)
class ReplannedWithTier(Replanned):
    """Both memories of a plan; `fresh` is of the tables on devices, or of the tier if it has all.
    `parts` are the memories' own, without the moves that may have been left out."""

    parts: tuple[Replanned, ...]

    @property
    def fresh_seconds(self) -> float:
        seconds = [part.fresh.cost.rank_seconds for part in self.parts]
        return float(np.sum(seconds, axis=0).max())

    @property
    def fresh_parts(self) -> list[Planned]:
        return [part.fresh for part in self.parts]

    # Each memory's copies take its own links.

    @property
    def migration_seconds(self) -> float:
        return sum(part.migration_seconds for part in self.parts)

    @property
    def fresh_migration_seconds(self) -> float:
        return sum(part.fresh_migration_seconds for part in self.parts)


def replan_with_tier(
    plan: Plan,
    profile: Profile,
    horizon: int,
    limit: MoveLimit,
    old_digest: str,
    report: Callable[[str], None],
) -> Replanned:
    """Replan (`replan`, replan.py) a plan with a tier.

    Raises OperError if plan and profile are of different tables, or `horizon` is below 1.
    """
    check_horizon(horizon)
    check_tables(plan, profile)
    began = time.perf_counter()
    report("the old plan under the new counts")
    numbers = [np.array(m.tables, dtype=np.int64) for m in plan.memories if m.tables]
    same_counts = plan.profile == profile.digest
    problems = problems_of_memories(plan, profile)
    free = [None] * len(problems) if same_counts else _free_moves(problems)
    report("a plan from scratch")
    since = time.perf_counter()
    fresh, certificate = place_memories(problems)
    seconds = {"fresh": time.perf_counter() - since}

    report("moves that pay")
    old = [
        OldRows.of(part, problem, each, placed)
        for part, problem, each, placed in zip(
            plans_of_memories(plan), problems, free, fresh, strict=True
        )
    ]
    best = _Moves.none(old)
    limited = LimitedMoves(_TwoMemories(old, fresh), horizon, limit)
    for candidate in () if same_counts else limited.tries():
        wanted = [of.relocated(counts) for of, counts in zip(old, candidate, strict=True)]
        best = max(
            (
                _Moves.some(old, candidate, wanted, chosen)
                for chosen in itertools.product((False, True), repeat=len(old))
            ),
            key=lambda moves: moves.net_gain(old, horizon),
        )  # the first of equals, which moves least
        if best.any:
            break
    seconds["replan"] = time.perf_counter() - began - seconds["fresh"]
    parts = tuple(
        of.replanned(counts, relocation, planned, horizon, old_digest, seconds)
        for of, counts, relocation, planned in zip(
            old, best.counts, best.relocations, fresh, strict=True
        )
    )
    made = _joined(plan, profile, parts, numbers, certificate, seconds)
    return replace(made, curve=() if same_counts else limited.curve())


def _free_moves(problems: list[Problem]) -> Sequence[FreeMoves | None]:
    """Return the best placement with free moves, of each memory; None if no programme decides the
    moves. With even links as the aim each memory is solved by itself."""
    if problems[0].asked.balance == "link":
        return [FreeMoves.of(problem) if by_programme(problem) else None for problem in problems]
    if any(by_programme(problem) for problem in problems):
        return FreeMoves.together(problems)
    return [None] * len(problems)


@dataclass(frozen=True)
class _TwoMemories:
    """The `OldPlacement` of rows of both memories."""

    old: Sequence[OldRows]
    fresh: Sequence[Planned]

    @property
    def memories(self) -> Sequence[MemoryRows]:
        return [each.memory_rows for each in self.old]

    @property
    def now(self) -> Counts:
        return tuple(each.now for each in self.old)

    @cached_property
    def like_fresh(self) -> Counts:
        return tuple(old.like(fresh) for old, fresh in zip(self.old, self.fresh, strict=True))

    def better(self, horizon: float) -> Sequence[Counts]:
        return better_together(self.old, horizon)

    def link_bytes(self, counts: Counts) -> float:
        return sum(old.link_bytes(of.counts) for old, of in zip(self.old, counts, strict=True))

    def aimed(self, counts: Counts) -> float:
        balance = self.old[0].problem.asked.balance
        return aimed_of_all([each.cost for each in counts], balance)


@dataclass(frozen=True)
class _Moves:
    """Rows of each memory, and the relocations that give them slots."""

    counts: Counts
    relocations: tuple[Relocation, ...]

    @staticmethod
    def none(old: Sequence[OldRows]) -> "_Moves":
        return _Moves(tuple(of.now for of in old), tuple(of.unmoved for of in old))

    @staticmethod
    def some(
        old: Sequence[OldRows],
        counts: Counts,
        relocations: Sequence[Relocation],
        chosen: tuple[bool, ...],
    ) -> "_Moves":
        """Return the moves in the memories that are `chosen`."""
        still = _Moves.none(old)
        return _Moves(
            tuple(
                new if moved else now
                for new, now, moved in zip(counts, still.counts, chosen, strict=True)
            ),
            tuple(
                new if moved else now
                for new, now, moved in zip(relocations, still.relocations, chosen, strict=True)
            ),
        )

    @property
    def any(self) -> bool:
        return any(len(relocation.moves.entries) for relocation in self.relocations)

    def net_gain(self, old: Sequence[OldRows], horizon: int) -> float:
        """Return the seconds gained in the horizon beyond the cost of the moves."""
        balance = old[0].problem.asked.balance
        before = aimed_of_all([of.now.cost for of in old], balance)
        gain = before - aimed_of_all([of.cost for of in self.counts], balance)
        taken = sum(
            migration_of(relocation.moves, of.plan.topology).seconds(of.plan.topology)
            for of, relocation in zip(old, self.relocations, strict=True)
        )
        return gain * horizon - taken


def _joined(
    old: Plan,
    profile: Profile,
    parts: tuple[Replanned, ...],
    numbers: list[Ints],
    certificate: Certificate,
    seconds: dict[str, float],
) -> ReplannedWithTier:
    """Return the parts, of the tables with these numbers, as one; the bound of `certificate` is
    that of the plan from scratch."""
    first, unmoved = parts[0], [part.unmoved() for part in parts]
    moves = RowMoves(
        np.concatenate(
            [_whole_rows(old, part, tables) for part, tables in zip(parts, numbers, strict=True)]
        )
    )
    order = np.lexsort((moves.entries["rank"], moves.entries["row"]))
    moves = RowMoves(moves.entries[order])
    migration = _added([part.migration for part in parts])
    old_seconds = aimed_of_all([part.cost for part in unmoved], "time")
    assert first.plan.record is not None
    replan_record = first.plan.record.replan
    assert replan_record is not None
    record = ReplanRecord(
        old_plan=replan_record.old_plan,
        horizon=replan_record.horizon,
        old_objective_seconds=old_seconds,
        changed_rows=moves.changed_rows,
        moved_rows=migration.rows,
        moved_bytes=migration.link_bytes,
    )

    def joined(plans: list[Plan], record: ReplanRecord) -> Plan:
        devices = plans[0] if len(plans) > 1 else None
        capacity = old.cost.capacity_bytes.astype(np.float64)
        made = join_memories(devices, plans[-1], old.tier, old.topology, capacity)
        main = made.main
        assert main.record is not None
        recorded = replace(main, record=replace(main.record, replan=record))
        return replace(
            made,
            memories=tuple(recorded if m is main else m for m in made.memories),
            profile=profile.digest,
            asked=old.asked,
            limits=old.limits,
            whole_certificate=certificate.of(made.cost.objective_seconds),
        )

    still = replace(record, changed_rows=0, moved_rows=0, moved_bytes=0.0)
    return ReplannedWithTier(
        plan=joined([part.plan for part in parts], record),
        moves=moves,
        horizon=first.horizon,
        old_seconds=old_seconds,
        migration=migration,
        fresh=first.fresh,
        fresh_migration=_added([part.fresh_migration for part in parts]),
        seconds=seconds,
        unmoved=lambda: joined(unmoved, still),
        aimed=AimedSeconds(
            *(
                aimed_of_all(costs, old.asked.balance)
                for costs in (
                    [part.cost for part in unmoved],
                    [part.plan.cost for part in parts],
                    [part.fresh.cost for part in parts],
                )
            )
        ),
        parts=parts,
    )


def _added(of_parts: list[Migration]) -> Migration:
    links = np.sum([each.bytes_by_link for each in of_parts], axis=0)
    return Migration(sum(each.rows for each in of_parts), links)


def _whole_rows(old: Plan, part: Replanned, tables: Ints) -> Any:
    """Return the moves of a part by the global ids of all tables."""
    entries = part.moves.entries.copy()
    before = offsets(part.plan.tables)
    table = np.searchsorted(before, entries["row"], side="right") - 1
    entries["row"] += offsets(old.tables)[tables[table]] - before[table]
    return entries
