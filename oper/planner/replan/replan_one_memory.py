"""Replan the rows of one memory: those of a plan without a tier, or of either part of another.

In: `Plan`, a newer `Profile`, a horizon. Out: `Replanned`, with the new `Plan` and its `RowMoves`.
With T now and T' after, in seconds of the slowest rank, and a horizon of H iterations, a change
pays if

    (T - T') · H  >  (1/M) · Σ over copies of  L[reader][nearest old holder] · m

in which the right side is a rank's mean time for the copies, including copies between its own
slots, in the objective's own terms (§3.2, L and m as there). Replicas are chosen again under that
price, imbalance is swapped away under it, and the best result is taken, or nothing
(`improve_placement.py`). Under unchanged counts nothing moves. Which rows move and their new slots
are decided in the package `migration`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from oper.base.arrays import Ints
from oper.base.defaults import MOST_STEPS
from oper.base.display import Summarised
from oper.base.errors import OperError
from oper.base.portable_math import whole_dot
from oper.cost.holder_sets import HolderSets
from oper.plan.layout import Layout
from oper.plan.memories import DEVICE, Memory, PlanningRecord, ReplanRecord, ThresholdReason
from oper.plan.plan import ListedCounts, Plan
from oper.plan.plan_file import to_json
from oper.plan.row_locator import RowLocator
from oper.plan.row_moves import RowMoves
from oper.planner.assemble_plan import assemble
from oper.planner.class_placement.place_classes import by_programme
from oper.planner.make_placement import Planned, Watch
from oper.planner.place_together import place_alone
from oper.planner.predict_step import predict_step
from oper.planner.price_plan import price_counts, problem_of, with_vectors_of
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.classes import measured_ratios
from oper.planner.problem.problem import Problem
from oper.planner.replan.check_tables import TableChanges, check_tables
from oper.planner.replan.improve_placement import (
    Counts,
    PricedCounts,
    better_counts,
    candidate_sets,
)
from oper.planner.replan.improve_pooled import better_pooled_counts
from oper.planner.replan.judgement import Judgement
from oper.planner.replan.limited_moves import (
    CurvePoint,
    LimitedMoves,
    MemoryRows,
    MoveLimit,
)
from oper.planner.replan.migration.flows import net_flows
from oper.planner.replan.migration.migration_cost import (
    Migration,
    MigrationCost,
    compare_placements,
    link_bytes,
)
from oper.planner.replan.migration.new_arenas import one_slot_sets
from oper.planner.replan.migration.relocate import Relocation, relocate
from oper.planner.replan.programme_with_moves import FreeMoves
from oper.planner.row_placement.aim import aimed_seconds
from oper.planner.row_placement.list_hot_rows import StripeOrders, scan_marked
from oper.profiling.profile import Profile
from oper.topology.pooled_links import PooledTopology
from oper.topology.topology import Topology


def _gain_share(old: float, new: float, fresh: float) -> float | None:
    gain = old - fresh
    return (old - new) / gain if gain > 0 else None


class AimedSeconds(NamedTuple):
    """Objective of the old plan, the new one and one from scratch: T of the slowest rank, or
    seconds of the slowest link if links are to be even."""

    old: float
    new: float
    fresh: float


@dataclass(frozen=True)
class CarriedOver:
    """Differences in tables and ranks between a plan and the plan that it was made from, whose rows
    were carried over before others moved (carried_rows.py)."""

    tables: TableChanges
    old_ranks: int
    migration: Migration  # of the rows that had to move

    def to_json(self) -> dict[str, Any]:
        """Return the field `carried_over` of `oper replan --json`, but the seconds, which depend on
        the topology."""
        changes = {f"{name}_tables": list(names) for name, names in asdict(self.tables).items()}
        return changes | {"old_ranks": self.old_ranks} | self.migration.to_json()


@dataclass(frozen=True)
class Replanned(Summarised):
    """A plan made from an older one, the moves between them, and a plan made from scratch.

    carried_over: the changes; None if tables, ranks, links and limits are the old plan's. The
    figures of the old plan are then those of its rows carried over. judgement: predicted steps of
    these plans, and whether moving pays (judge.py); None before they were judged. `old_seconds`,
    `new_seconds` and `fresh_seconds` are transfer times, the objective.
    """

    plan: Plan
    moves: RowMoves
    horizon: int
    old_seconds: float  # the old plan's transfer time under the new counts
    migration: Migration
    fresh: Planned
    fresh_migration: Migration
    seconds: dict[str, float]
    unmoved: Callable[[], Plan]  # the old plan, with its figures under the new counts
    aimed: AimedSeconds
    judgement: Judgement | None = None
    carried_over: CarriedOver | None = None
    max_move_bytes: float | None = None  # over links
    curve: tuple[CurvePoint, ...] = ()  # if it was asked for and something pays

    @property
    def new_seconds(self) -> float:
        """The transfer time of the new plan."""
        return self.plan.cost.objective_seconds

    @property
    def fresh_seconds(self) -> float:
        """The transfer time of a plan made from scratch."""
        return self.fresh.cost.objective_seconds

    @property
    def migration_seconds(self) -> float:
        """Mean seconds of a rank for the moves."""
        return self.migration.seconds(self.plan.topology)

    @property
    def fresh_migration_seconds(self) -> float:
        """Mean seconds of a rank to get to the plan from scratch."""
        return self.fresh_migration.seconds(self.plan.topology)

    @property
    def gain_share(self) -> float | None:
        """Gain of the new plan over that of the plan from scratch, in the objective; None if the
        latter gains nothing."""
        return _gain_share(*self.aimed)

    @property
    def fresh_parts(self) -> list[Planned]:
        """The placement from scratch of each memory that has tables."""
        return [self.fresh]

    @property
    def bytes_share(self) -> float | None:
        """Bytes that the new plan moves over those of the plan from scratch; None if the latter
        moves none."""
        fresh = self.fresh_migration.link_bytes
        return self.migration.link_bytes / fresh if fresh > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `oper replan --json`, but `plan`."""
        return {
            "horizon": self.horizon,
            "step_seconds": self.plan.step_time and self.plan.step_time.seconds,
            "judgement": to_json(self.judgement),
            "transfer_seconds": {
                "old": self.old_seconds,
                "new": self.new_seconds,
                "fresh": self.fresh_seconds,
            },
            "aimed_seconds": self.aimed._asdict(),
            "gain_share": self.gain_share,
            "bytes_share": self.bytes_share,
            "changed_rows": self.moves.changed_rows,
            **self.migration.to_json(),
            "seconds": self.migration_seconds,
            "fresh": self.fresh_migration.to_json() | {"seconds": self.fresh_migration_seconds},
            "held_out": to_json(self.plan.held_out),
            "carried_over": self.carried_over and self.carried_over.to_json(),
            "max_move_bytes": self.max_move_bytes,
            "curve": to_json(self.curve),
            "simple_plans": to_json(self.plan.simple_plans),
            "certified_gap": self.plan.certificate and self.plan.certificate.certified_gap,
            "listed_rows": self.plan.layout.listed,
            "address_map_bytes_per_row": self.plan.layout.bitmap_bytes_per_row(),
            "seconds_spent": self.seconds,
        }


@dataclass(frozen=True)
class OldRows:
    """Rows of one memory at their places in an old plan, under new counts, and the problem with the
    cost of pooled tables' vectors there. `free` is set if a programme decides which rows move."""

    plan: Plan
    problem: Problem
    locator: RowLocator
    finder: ClassFinder
    counted: Ints
    migration_cost: MigrationCost
    now: PricedCounts
    free: FreeMoves | None

    @staticmethod
    def of(plan: Plan, problem: Problem, free: FreeMoves | None, fresh: Planned) -> "OldRows":
        """Return the rows of a plan, of one memory, by the counts of the problem's profile. They
        may newly get the holder sets that planning uses, and those of a plan from scratch."""
        topology = plan.topology
        sets = candidate_sets(problem, free, fresh.row_placement.holder_sets)
        locator = RowLocator(plan, sets)
        finder = ClassFinder(problem.profile, problem.classes)
        counted = locator.count(finder)
        migration_cost = MigrationCost.of(locator.holder_sets, locator.holder_sets, topology)
        counts = locator.by_holder_set(counted)
        problem = with_vectors_of(problem, locator.holder_sets, counts)
        now = PricedCounts(counts, price_counts(problem, locator.holder_sets, counts))
        return OldRows(plan, problem, locator, finder, counted, migration_cost, now, free)

    @property
    def row_memory(self) -> Ints:
        """Bytes of a row of each table, with its optimizer state, [T]."""
        plan = self.plan
        return np.array([table.memory_bytes(plan.workload.mode) for table in plan.tables])

    def better_counts(self, horizon: float, fresh: Planned | None = None) -> list[PricedCounts]:
        """Return the counts worth moving to (improve_placement.py); for pooled plans with a `fresh`
        plan, those of improve_pooled.py."""
        sets, cost = self.locator.holder_sets, self.migration_cost
        if fresh is not None and isinstance(self.problem.topology, PooledTopology):
            wanted = self.counts_of(fresh)
            return better_pooled_counts(self.problem, sets, self.now, wanted, cost, horizon)
        return better_counts(self.problem, sets, self.now, cost, horizon, self.free)

    def counts_of(self, fresh: Planned) -> Ints:
        """Return the rows [C, K] of a plan from scratch, whose holder sets are among the
        locator's."""
        there = RowLocator(assemble(fresh))
        return there.counts_in(self.locator.holder_sets, there.count(self.finder))

    def like(self, fresh: Planned) -> PricedCounts:
        """Return the rows of a plan from scratch, with their cost."""
        counts = self.counts_of(fresh)
        return PricedCounts(counts, price_counts(self.problem, self.locator.holder_sets, counts))

    @property
    def memory_rows(self) -> MemoryRows:
        return MemoryRows(self.problem, self.locator.holder_sets, self.migration_cost)

    def link_bytes(self, counts: Ints) -> float:
        """Return the bytes over links that lead to rows `counts` [C, K]."""
        holds = self.locator.holder_sets.holds.astype(np.int64)
        flows = net_flows(self.now.counts, counts, self.migration_cost)
        return flows.link_bytes(self.problem.classes.m, whole_dot(1 - holds, holds.T))

    @property
    def unmoved(self) -> Relocation:
        return Relocation(self.locator.layout, RowMoves.none())

    def relocated(self, found: PricedCounts) -> Relocation:
        """Return the rows and slots with which each holder set has the rows of `found`."""
        if found is self.now:
            return self.unmoved
        return relocate(
            self.plan.tables,
            self.locator,
            self.finder,
            self.problem.classes.width,
            self.counted,
            found.counts,
            net_flows(self.now.counts, found.counts, self.migration_cost),
            self.migration_cost,
            self.row_memory,
            one_slot_sets(self.locator.holder_sets, self.problem.workload.training),
        )

    def replanned(
        self,
        best: PricedCounts,
        relocation: Relocation,
        fresh: Planned,
        horizon: int,
        old_digest: str,
        seconds: dict[str, float],
    ) -> Replanned:
        """Return the plan with the rows of `best`, together with the one from scratch."""
        topology, locator, now = self.plan.topology, self.locator, self.now
        sets = locator.holder_sets
        moves = relocation.moves
        migration = migration_of(moves, topology)
        # Placements from scratch know no other holder sets than their own.
        fresh_locator = RowLocator(assemble(fresh))
        after = fresh_locator.holder_sets
        rows, moved_bytes = compare_placements(locator, fresh_locator, after, self.row_memory)
        cost = MigrationCost.of(sets, after, topology)
        fresh_migration = Migration(rows, link_bytes(moved_bytes, sets, after, cost))
        record = ReplanRecord(
            old_plan=old_digest,
            horizon=horizon,
            old_objective_seconds=now.cost.objective_seconds,
            changed_rows=moves.changed_rows,
            moved_rows=migration.rows,
            moved_bytes=migration.link_bytes,
        )

        def unmoved() -> Plan:
            still = replace(record, changed_rows=0, moved_rows=0, moved_bytes=0.0)
            return assemble_replanned(
                self.plan, self.problem, sets, now, now, locator.layout, fresh, still
            )

        costs = (now.cost, best.cost, fresh.cost)
        return Replanned(
            assemble_replanned(
                self.plan, self.problem, sets, best, now, relocation.layout, fresh, record
            ),
            moves,
            horizon,
            now.cost.objective_seconds,
            migration,
            fresh,
            fresh_migration,
            seconds,
            unmoved,
            AimedSeconds(*(aimed_seconds(self.problem, cost) for cost in costs)),
        )


@dataclass(frozen=True)
class _OneMemory:
    """`OldPlacement` of rows of one memory; for pooled plans compared with one from scratch."""

    old: OldRows
    fresh: Planned

    @property
    def memories(self) -> Sequence[MemoryRows]:
        return [self.old.memory_rows]

    @property
    def now(self) -> Counts:
        return (self.old.now,)

    @cached_property
    def like_fresh(self) -> Counts:
        return (self.old.like(self.fresh),)

    def better(self, horizon: float) -> Sequence[Counts]:
        return [(counts,) for counts in self.old.better_counts(horizon, self.fresh)]

    def link_bytes(self, counts: Counts) -> float:
        return self.old.link_bytes(counts[0].counts)

    def aimed(self, counts: Counts) -> float:
        return aimed_seconds(self.old.problem, counts[0].cost)


def replan_one_memory(
    plan: Plan,
    profile: Profile,
    horizon: int,
    limit: MoveLimit,
    old_digest: str,
    report: Callable[[str], None],
) -> Replanned:
    """Replan (`replan`, replan.py) a plan without a tier.

    Raises OperError if plan and profile are of different tables, or `horizon` is below 1.
    """
    check_horizon(horizon)
    check_tables(plan, profile)
    began = time.perf_counter()
    topology = plan.topology
    report("the old plan under the new counts")
    problem = problem_of(plan, profile)
    # A plan made from these very counts keeps all rows: planning has found the best already.
    same_counts = plan.profile == profile.digest
    report("a plan from scratch")
    since = time.perf_counter()
    fresh = place_alone(problem, Watch(lambda step: None))
    seconds = {"fresh": time.perf_counter() - since}

    report("moves that pay")
    # Only the plan from scratch knows good places of pooled tables under the new counts.
    pooled = isinstance(problem.topology, PooledTopology)
    free = FreeMoves.of(problem) if by_programme(problem) and not (pooled or same_counts) else None
    old = OldRows.of(plan, problem, free, fresh)
    limited = LimitedMoves(_OneMemory(old, fresh), horizon, limit)
    best, relocation = old.now, old.unmoved
    for (candidate,) in () if same_counts else limited.tries():
        wanted = old.relocated(candidate)
        gain = aimed_seconds(problem, old.now.cost) - aimed_seconds(problem, candidate.cost)
        migration = migration_of(wanted.moves, topology)
        if gain * horizon > migration.seconds(topology) and limit.allows(migration.link_bytes):
            best, relocation = candidate, wanted
            break
    seconds["replan"] = time.perf_counter() - began - seconds["fresh"]
    made = old.replanned(best, relocation, fresh, horizon, old_digest, seconds)
    return replace(made, curve=() if same_counts else limited.curve())


def check_horizon(horizon: int) -> None:
    """Raise OperError for a horizon without an iteration, or of more than any use has."""
    if not 1 <= horizon <= MOST_STEPS:
        raise OperError(f"horizon: expected 1 to {MOST_STEPS:,} iterations, got {horizon:,}")


def migration_of(moves: RowMoves, topology: Topology) -> Migration:
    """Return the rows and bytes that the moves take over links."""
    matrix = moves.bytes_by_link(topology.ranks).astype(np.float64)
    return Migration(moves.travelling_rows, matrix)


def assemble_replanned(
    of: Plan,
    problem: Problem,
    sets: HolderSets,
    best: PricedCounts,
    before: PricedCounts,
    layout: Layout,
    fresh: Planned,
    record: ReplanRecord,
) -> Plan:
    """Return the plan of a layout, with its figures under the new counts, for the tables and ranks
    of the plan `of`; the certificate's bound is that of the plan from scratch."""
    priced = with_vectors_of(problem, sets, best.counts)
    profile, classes, ranks = problem.profile, problem.classes, problem.ranks
    scan = scan_marked(
        profile,
        layout.bitmap,
        layout.stripe_bitmap,
        layout.line_offset,
        layout.listed_offset,
        StripeOrders(layout.orders, layout.pattern_of, layout.rotation, layout.ranks),
        classes,
    )
    accesses = whole_dot(classes.accesses, best.counts)  # [K]
    partitions = fresh.class_placement.partitions
    memory = Memory(
        name=DEVICE,
        tables=tuple(range(len(of.tables))),
        cost=best.cost,
        owner_accesses=accesses[:ranks],
        replica_accesses=int(accesses[ranks:].sum()),
        record=PlanningRecord(
            threshold=partitions.threshold,
            step="replan",
            threshold_reason=ThresholdReason.NOT_PLACED_BY_PARTITIONS,
            greedy_dob=None,
            dob_before_swaps=before.cost.dob,
            swaps=best.swaps,
            replan=record,
        ),
        certificate=fresh.certificate.of(best.cost.objective_seconds),
        partitions=partitions.summary(),
    )
    return Plan(
        tables=of.tables,
        topology=of.topology,
        workload=of.workload,
        layout=layout,
        counts=ListedCounts.of(layout, scan.listed_accesses, scan.listed_samples_with_row),
        memories=(memory,),
        samples=profile.samples,
        profile=profile.digest,
        asked=of.asked,
        limits=of.limits,
        partition_floor=partitions.floor(classes.accesses),
        distinct_ratio=measured_ratios(profile),
        log_part=profile.log_part,
        pooled_tables=of.pooled_tables,
        vector_ratio=tuple(priced.topology.vector_ratio.tolist())
        if isinstance(priced.topology, PooledTopology)
        else None,
        step_time=predict_step(priced, sets, best.counts, best.cost.allreduce_method),
    )
