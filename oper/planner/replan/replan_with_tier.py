"""Replan of a plan with a tier: its two memories one by one, tables staying where they are.

In: `Plan` with a tier, a newer `Profile`, a horizon. Out: `Replanned`. Moves that pay for the
slowest rank of one memory need not pay for the slowest of both together. So of the moves of both,
of one, and of none, those are made whose gain in the whole iteration, within the horizon, exceeds
what they take by most.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oper.base.arrays import Ints
from oper.cost.objective import Cost
from oper.plan.memories import ReplanRecord
from oper.plan.plan import Plan
from oper.plan.plan_parts import join_memories, plans_of_memories
from oper.plan.row_moves import RowMoves
from oper.planner.bounds.tier_bound import Certified, certify_together
from oper.planner.make_placement import Planned
from oper.planner.replan.check_tables import check_tables
from oper.planner.replan.migration.migration_cost import Migration
from oper.planner.replan.replan_one_memory import AimedSeconds, Replanned, replan_one_memory
from oper.profiling.profile import Profile
from oper.tables.table import offsets


@dataclass(frozen=True, kw_only=True)
class ReplannedWithTier(Replanned):
    """Both memories of a plan; `fresh` is of the tables on devices, or of the tier where it has
    all. `parts` are the memories' own, of which moves may have been left out."""

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
    old_digest: str,
    report: Callable[[str], None],
) -> Replanned:
    """`replan` (replan.py) of a plan with a tier.

    Raises OperError where plan and profile are of different tables, or `horizon` is below 1.
    """
    check_tables(plan, profile)
    old = plans_of_memories(plan)
    numbers = [np.array(m.tables, dtype=np.int64) for m in plan.memories if m.tables]
    tried = []
    for part, tables in zip(old, numbers, strict=True):
        counts = profile.select(tables.tolist())
        digest = counts.digest if plan.profile == profile.digest else plan.profile
        part = replace(part, profile=digest)
        tried.append(replan_one_memory(part, counts, horizon, old_digest, report))
    unmoved = [part.unmoved() for part in tried]
    balance = plan.asked.balance
    old_seconds = aimed_of_both([part.cost for part in unmoved], balance)

    def net_gain(moves: tuple[bool, ...]) -> float:
        chosen = [
            part.plan if moved else still
            for part, still, moved in zip(tried, unmoved, moves, strict=True)
        ]
        gain = old_seconds - aimed_of_both([part.cost for part in chosen], balance)
        taken = (
            part.migration.seconds(part.plan.topology)
            for part, moved in zip(tried, moves, strict=True)
            if moved
        )
        return gain * horizon - sum(taken)

    choices = itertools.product(
        *((False, True) if len(p.moves.entries) else (False,) for p in tried)
    )
    best = max(choices, key=net_gain)  # the first of equals, which moves least
    parts = tuple(
        part if moved else _without_moves(part, still)
        for part, still, moved in zip(tried, unmoved, best, strict=True)
    )
    return _joined(plan, profile, parts, numbers, unmoved)


def aimed_of_both(costs: list[Cost], balance: str) -> float:
    """What plans of both memories make small together, as `aimed_seconds` of one."""
    name = "link_seconds" if balance == "link" else "rank_seconds"
    return float(np.sum([getattr(each, name) for each in costs], axis=0).max())


def _without_moves(part: Replanned, still: Plan) -> Replanned:
    none = Migration(0, np.zeros_like(part.migration.bytes_by_link))
    return replace(part, plan=still, moves=RowMoves.none(), migration=none)


def _joined(
    old: Plan,
    profile: Profile,
    parts: tuple[Replanned, ...],
    numbers: list[Ints],
    unmoved: list[Plan],
) -> ReplannedWithTier:
    """The parts, of the tables with these numbers, as one."""
    first = parts[0]
    moves = RowMoves(
        np.concatenate(
            [_whole_rows(old, part, tables) for part, tables in zip(parts, numbers, strict=True)]
        )
    )
    order = np.lexsort((moves.entries["rank"], moves.entries["row"]))
    moves = RowMoves(moves.entries[order])
    migration = _added([part.migration for part in parts])
    old_seconds = aimed_of_both([part.cost for part in unmoved], "time")
    assert first.plan.record is not None
    own = first.plan.record.replan
    assert own is not None
    record = ReplanRecord(
        old_plan=own.old_plan,
        horizon=own.horizon,
        old_objective_seconds=old_seconds,
        changed_rows=moves.changed_rows,
        moved_rows=migration.rows,
        moved_bytes=migration.link_bytes,
    )
    certified = [Certified(part.fresh.problem, part.fresh.certificate) for part in parts]

    def joined(plans: list[Plan], record: ReplanRecord) -> Plan:
        devices = plans[0] if len(plans) > 1 else None
        capacity = old.cost.capacity_bytes.astype(np.float64)
        made = join_memories(devices, plans[-1], old.tier, old.topology, capacity)
        certificate = certify_together(
            certified[0] if len(plans) > 1 else None, certified[-1], made.cost.objective_seconds
        )
        main = made.main
        assert main.record is not None
        recorded = replace(main, record=replace(main.record, replan=record))
        return replace(
            made,
            memories=tuple(recorded if m is main else m for m in made.memories),
            profile=profile.digest,
            asked=old.asked,
            limits=old.limits,
            whole_certificate=certificate,
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
        seconds={n: sum(part.seconds[n] for part in parts) for n in first.seconds},
        unmoved=lambda: joined(unmoved, still),
        aimed=AimedSeconds(
            aimed_of_both([part.cost for part in unmoved], old.asked.balance),
            aimed_of_both([part.plan.cost for part in parts], old.asked.balance),
            aimed_of_both([part.fresh.cost for part in parts], old.asked.balance),
        ),
        parts=parts,
    )


def _added(of_parts: list[Migration]) -> Migration:
    links = np.sum([each.bytes_by_link for each in of_parts], axis=0)
    return Migration(sum(each.rows for each in of_parts), links)


def _whole_rows(old: Plan, part: Replanned, tables: Ints) -> Any:
    """The moves of a part by the global ids of all tables."""
    entries = part.moves.entries.copy()
    before = offsets(part.plan.tables)
    table = np.searchsorted(before, entries["row"], side="right") - 1
    entries["row"] += offsets(old.tables)[tables[table]] - before[table]
    return entries
