"""Replan: plan again from an older plan's point of view, where few rows move.

With T now and T' after, in seconds of the slowest rank, and a horizon of H iterations, a change
pays if

    (T - T') · H  >  (1/M) · Σ over copies of  L[reader][nearest old holder] · m

the right side being what a rank needs on average to bring the changed rows over the links, in the
objective's own terms (§3.2, L and m as there). Replicas are chosen again under that price
(replica_changes.py), imbalance is exchanged away under it (rebalance.py), and of what that leads to
the best is taken, or nothing. Under unchanged counts nothing is. The rows that go are then picked
and given slots (relocate.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.base.errors import OperError
from oper.cost.allreduce import METHODS, Method
from oper.cost.holder_sets import HolderSets, everywhere_set, per_node_sets
from oper.cost.objective import Cost, evaluate
from oper.files import storage
from oper.plan.layout import Layout
from oper.plan.plan import FORMAT, MARKER, Plan, load_plan
from oper.plan.row_locator import RowLocator
from oper.plan.row_moves import RowMoves
from oper.planner.assemble import assemble
from oper.planner.planner import Planned, make_placement
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.classes import Classes, table_ratios
from oper.planner.problem.problem import Problem, Settings, make_problem
from oper.planner.replan.flows import Flows, net_flows
from oper.planner.replan.migration_cost import MigrationCost, compare_placements, link_bytes
from oper.planner.replan.rebalance import exchange, give_owners, keep_capacity
from oper.planner.replan.relocate import Relocation
from oper.planner.replan.replica_changes import choose_replicas
from oper.planner.row_placement.row_scan import collect
from oper.profiling.profile import Profile
from oper.tables.table import fingerprint
from oper.topology.topology import Topology


@dataclass(frozen=True)
class Migration:
    """What it takes to get from one plan to another."""

    rows: int  # that some rank gets from another
    bytes_by_link: Floats  # [M, M], reader by source; own slot to own slot on the diagonal

    @property
    def link_bytes(self) -> float:
        """Bytes over links."""
        return float(self.bytes_by_link.sum() - np.trace(self.bytes_by_link))

    def seconds(self, topology: Topology) -> float:
        """What a rank needs for its part, on average."""
        return float(topology.transfer_seconds(self.bytes_by_link).sum()) / topology.ranks

    def to_json(self, topology: Topology) -> dict[str, Any]:
        return {
            "moved_rows": self.rows,
            "moved_bytes": self.link_bytes,
            "local_bytes": float(np.trace(self.bytes_by_link)),
            "bytes_by_link": self.bytes_by_link.tolist(),
            "seconds": self.seconds(topology),
        }


@dataclass(frozen=True)
class Replanned:
    """A plan made from an older one, the moves between them, and a plan made from nothing."""

    plan: Plan
    moves: RowMoves
    horizon: int
    old_seconds: float  # the old plan's objective under the new counts
    removal: Migration
    fresh: Planned
    fresh_removal: Migration
    seconds: dict[str, float]

    @property
    def new_seconds(self) -> float:
        """The objective of the new plan."""
        return float(self.plan.figures["objective_seconds"])

    @property
    def fresh_seconds(self) -> float:
        """The objective of a plan made from nothing."""
        return self.fresh.realised.cost.objective_seconds

    @property
    def gain_share(self) -> float | None:
        """The new plan's gain over the fresh plan's; None where that gains nothing."""
        gain = self.old_seconds - self.fresh_seconds
        return (self.old_seconds - self.new_seconds) / gain if gain > 0 else None

    @property
    def bytes_share(self) -> float | None:
        """The bytes it moves over those to the fresh plan; None where that moves none."""
        fresh = self.fresh_removal.link_bytes
        return self.removal.link_bytes / fresh if fresh > 0 else None

    def to_json(self) -> dict[str, Any]:
        """The fields of `oper replan --json`, but `plan`."""
        topology = self.plan.topology
        return {
            "horizon": self.horizon,
            "old_objective_seconds": self.old_seconds,
            "objective_seconds": self.new_seconds,
            "fresh_objective_seconds": self.fresh_seconds,
            "gain_share": self.gain_share,
            "bytes_share": self.bytes_share,
            "changed_rows": self.moves.changed_rows,
            **self.removal.to_json(topology),
            "fresh": self.fresh_removal.to_json(topology),
            "certified_gap": self.plan.certificate["certified_gap"],
            "explicit_rows": len(self.plan.layout.codes),
            "address_map_bytes_per_row": self.plan.layout.bitmap_bytes_per_row(),
            "seconds_spent": self.seconds,
        }

    def save(self, folder: Path | str, profile: Profile, overwrite: bool = False) -> None:
        """Write the new plan with its moves; `overwrite` replaces a plan that is there."""
        self.plan.save(folder, [profile.save_vocabularies, self.moves.save], overwrite)


@dataclass(frozen=True)
class _State:
    """Rows of each class in each column, [C, K], and what they cost."""

    counts: Ints
    cost: Cost
    exchanges: int = 0


def settings_of(plan: Plan) -> Settings:
    """What was asked of a plan."""
    return Settings(**{name: plan.settings[name] for name in Settings.__dataclass_fields__})


def check_tables(plan: Plan, profile: Profile) -> None:
    """OperError where the plan and the profile are of different tables."""
    if fingerprint(plan.tables) == fingerprint(profile.tables):
        return
    known = {table.name: table for table in plan.tables}
    for table in profile.tables:
        mine = known.get(table.name)
        if mine is None or fingerprint([mine]) != fingerprint([table]):
            raise OperError(
                f"table {table.name!r} has {table.describe()} in the profile, and in the plan "
                f"{mine.describe() if mine else 'there is none of that name'}; profile the new "
                "log with the old profile as `--tables`"
            )
    raise OperError(
        f"the profile has {len(profile.tables)} tables, and the plan {len(plan.tables)}, or they "
        "come in another order; profile the new log with the old profile as `--tables`"
    )


def candidates(topology: Topology, training: bool) -> HolderSets | None:
    """Holder sets that rows may newly get: those that planning uses on ranks that look alike."""
    if not topology.alike or topology.ranks == 1:
        return None
    groups = everywhere_set(topology.ranks)
    if not training and topology.nodes > 1:
        groups = groups + per_node_sets(topology)
    return groups


def replan(
    plan: Plan,
    profile: Profile,
    horizon: int,
    old_digest: str = "",
    report: Callable[[str], None] = lambda step: None,
) -> Replanned:
    """Plan for the counts of `profile` by moving rows of `plan` where that pays within `horizon`
    iterations; `old_digest` is recorded as the old plan's.

    Raises OperError where plan and profile are of different tables.
    """
    if horizon < 1:
        raise OperError(f"horizon {horizon}: at least 1 iteration was needed")
    check_tables(plan, profile)
    began = time.perf_counter()
    topology = plan.topology
    report("the old plan under the new counts")
    problem = make_problem(profile, topology, plan.workload, settings_of(plan))
    classes = problem.classes
    places = RowLocator(plan, candidates(topology, plan.workload.training))
    finder = ClassFinder(profile, classes)
    counted = places.count(finder)
    carriage = MigrationCost.of(places.groups, places.groups, topology)
    present = places.together(counted)
    now = _State(present, price_counts(problem, places.groups, present))

    report("moves that pay")
    best = now
    # A plan made from these very counts: what planning did not find then, it does not look for now.
    if plan.profile != profile.digest:
        best = _best(problem, places.groups, now, carriage, horizon)
    row_memory = np.array([t.memory_bytes(plan.workload.mode) for t in plan.tables])
    flows = net_flows(now.counts, best.counts, carriage)
    relocation = Relocation(plan.tables, places, finder, classes.width, counted, best.counts, flows)
    layout, moves = relocation.carry_out(carriage, row_memory)
    removal = Migration(moves.travelling_rows, moves.bytes_by_link(topology.ranks).astype(float))
    since = time.perf_counter()

    report("a plan made from nothing")
    fresh = make_placement(profile, topology, plan.workload, settings_of(plan))
    # Fresh placements know no other sets of holders than their own.
    fresh_places = RowLocator(assemble(profile, fresh))
    rows, moved_bytes = compare_placements(places, fresh_places, profile, row_memory)
    fresh_removal = Migration(
        rows, link_bytes(moved_bytes, places.groups, fresh_places.groups, topology)
    )
    seconds = {"replan": since - began, "fresh": time.perf_counter() - since}
    made = _plan(plan, profile, problem, places.groups, best, now, layout, fresh)
    made.figures["replan"] = {
        "from": old_digest,
        "horizon": horizon,
        "old_objective_seconds": now.cost.objective_seconds,
        "changed_rows": moves.changed_rows,
        "moved_rows": removal.rows,
        "moved_bytes": removal.link_bytes,
    }
    return Replanned(
        made, moves, horizon, now.cost.objective_seconds, removal, fresh, fresh_removal, seconds
    )


def replan_and_save(
    folder: Path | str,
    profile: Profile,
    output: Path | str,
    horizon: int,
    report: Callable[[str], None] = lambda step: None,
    overwrite: bool = False,
) -> Replanned:
    """`replan` for a plan's folder, written to `output` with the moves.

    `overwrite` replaces a plan that is there, if nothing else is in its folder.
    """
    storage.check_place(output, FORMAT, overwrite)
    plan = load_plan(folder)
    made = replan(plan, profile, horizon, storage.sha256(Path(folder) / MARKER), report)
    report("writing")
    made.save(output, profile, overwrite)
    return made


def price_counts(problem: Problem, groups: HolderSets, counts: Ints) -> Cost:
    """The cost of `counts` [C, K] rows in the columns."""
    return evaluate(
        problem.topology,
        problem.workload,
        groups,
        problem.classes.sums(counts),
        problem.capacity_bytes,
    )


def aim(problem: Problem, cost: Cost) -> float:
    """What the plan makes small: the largest T, or the largest C where links are to be even."""
    if problem.balance == "link":
        return float(np.where(np.eye(problem.topology.ranks), 0.0, cost.link_seconds).max())
    return cost.objective_seconds


def _best(
    problem: Problem, groups: HolderSets, now: _State, carriage: MigrationCost, horizon: int
) -> _State:
    """The state that gains most over the horizon beyond its moves' seconds; `now` if none does."""
    ranks = problem.topology.ranks
    price = carriage.seconds / ranks / horizon

    def net(state: _State) -> float:
        flows = net_flows(now.counts, state.counts, carriage)
        cost = _moving_seconds(flows, problem.classes, carriage) / ranks
        return (aim(problem, now.cost) - aim(problem, state.cost)) * horizon - cost

    best, most = now, 0.0
    for start in (now.counts, _with_copies(problem, groups, now.counts, price)):
        counts = start.copy()
        if not keep_capacity(problem, groups, counts):
            continue
        cost = price_counts(problem, groups, counts)
        rounds = exchange(problem, groups, counts, cost.rank_seconds, price)
        state = _State(counts, price_counts(problem, groups, counts), rounds)
        if (gain := net(state)) > most:
            best, most = state, gain
    return best


def _with_copies(problem: Problem, groups: HolderSets, counts: Ints, price: Floats) -> Ints:
    """Counts with the copies that pay, by the AllReduce method with the least mean time."""
    if len(groups) == problem.topology.ranks:
        return counts
    methods: tuple[Method, ...] = METHODS if problem.workload.training else ("none",)
    choices = [choose_replicas(problem, groups, counts, price, method) for method in methods]
    changed, dropped = min(choices, key=lambda copies: copies.mean_seconds).apply(counts)
    give_owners(problem, groups, changed, dropped)
    return changed


def _moving_seconds(flows: Flows, classes: Classes, carriage: MigrationCost) -> float:
    """Seconds of all copies over the links, of all ranks together."""
    moved_bytes = flows.rows * classes.m[flows.row_class]
    return float(moved_bytes @ carriage.seconds[flows.before, flows.after])


def _plan(
    old: Plan,
    profile: Profile,
    problem: Problem,
    groups: HolderSets,
    state: _State,
    before: _State,
    layout: Layout,
    fresh: Planned,
) -> Plan:
    """The plan of a layout, with its figures under the new counts."""
    scanned = collect(
        profile,
        layout.bitmap,
        layout.stripe_bitmap,
        layout.line_offset,
        _listed_before(layout),
        layout.orders,
        layout.pattern_of,
        layout.rotation,
        layout.ranks,
        problem.classes,
    )
    certificate = fresh.certificate.of(state.cost.objective_seconds).to_json()
    figures = fresh.to_json()
    for name in ("seconds", "asked", *certificate):
        del figures[name]
    figures |= {
        **state.cost.to_json(),
        "status": "ok" if state.cost.feasible else "infeasible",
        "step": "replan",
        "threshold_reason": "of the new counts' partitions; rows were moved one by one",
        "greedy_dob": None,
        "dob_before_exchanges": before.cost.dob,
        "exchanges": state.exchanges,
    }
    accesses = problem.classes.accesses @ state.counts
    ranks = problem.topology.ranks
    partitions = fresh.draft.partitions
    return Plan(
        tables=old.tables,
        topology=old.topology,
        workload=old.workload,
        layout=layout,
        explicit_accesses=scanned.explicit_accesses,
        explicit_containing=scanned.explicit_containing,
        owner_accesses=accesses[:ranks],
        replica_accesses=int(accesses[ranks:].sum()),
        samples=profile.samples,
        profile=profile.digest,
        produced_by="replan",
        figures=figures,
        partition_floor=partitions.floor(problem.classes.accesses),
        certificate=certificate,
        partitions=partitions.summary(),
        settings=old.settings,
        distinct_ratio=(
            np.stack(table_ratios(profile), axis=1) if profile.distinct is not None else None
        ),
    )


def _listed_before(layout: Layout) -> Ints:
    """Explicit rows before each table, [T + 1]."""
    per_line = np.bitwise_count(layout.bitmap[:, 1:]).sum(axis=1, dtype=np.int64)
    before: Ints = np.concatenate([[0], np.cumsum(per_line)])
    return before[layout.line_offset]
