"""Facts of a row of a plan: its place, its reads, and the reason for its place.

Counts are those of the profile that the plan was made from. The plan has none for striped rows, but
they are at most the smallest count among their table's listed rows; nor for rows on all ranks that
have a mark instead of a code, but those are at least the smallest count among them in their table.
The profile itself has all of them.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from oper.base.errors import OperError, check_type
from oper.base.units import whole_number
from oper.cost.allreduce import METHODS, allreduce_cost
from oper.cost.expected_counts import SELDOM, expected_counts
from oper.cost.expected_reads import expected_reads, node_touches
from oper.cost.holder_sets import Sums
from oper.cost.read_charges import Charges
from oper.cost.traffic import Traffic
from oper.plan.layout import Located
from oper.plan.memories import HOST
from oper.plan.plan import Plan, plan_given
from oper.plan.plan_file import to_json
from oper.plan.row_codes import rows_of_tables
from oper.profiling.profile import Profile, profile_given
from oper.topology.pooled_links import without_pooling
from oper.topology.relays import relayed_sizes


class RowReason(StrEnum):
    """Reasons for a row's place."""

    ONE_RANK = "there is only one rank"
    COLD = "cold rows are spread over the ranks in turn"
    STAYED = "it is where the previous plan had it, as moving it would not pay"
    NEVER_READ = "it was never read, and is where there was room"
    UNREAD = "it was never read, and how often it is expected to be is in the profile"
    ROOM_EVERYWHERE = "there was memory for a copy on every rank"
    EVEN_LOAD = "rows in the hosts' memory have one owner, chosen for an even load"
    COPIES_PAY = "a copy on every rank takes less of an iteration"
    SOME_COPIES_PAY = "copies on some ranks avoid the slower links"
    COPIES_DO_NOT_PAY = "copies would take as much of an iteration, or more"
    LEAST_MEMORY = "a plan takes the least memory that comes close to the fastest"
    NO_ROOM = "its copies alone would exceed the extra memory"
    ALLREDUCE_LATENCY = "all such rows together would save less than the AllReduce's latency"
    OTHERS_SAVE_MORE = "the extra memory is used by rows that save more per byte"


class CountBasis(StrEnum):
    """Sources of a row's reads."""

    PLANNED = "what the plan was made for"
    COUNTED = "its count alone"  # of a seldom read row, if the profile is not given
    AT_LEAST = "the least count that it may have"


@dataclass(frozen=True)
class RowCost:
    """Part of a row in a rank's transfer time, on average: with one owner, and with copies on every
    rank. `reads` are those of a rank in a step."""

    reads: float
    basis: "CountBasis"
    one_owner_seconds: float
    everywhere_seconds: float


@dataclass(frozen=True)
class RowFacts:
    """Place of a row of a table, and its reason.

    accesses: in the profile; None if the plan knows only the bounds of the next two fields.
    partition: in order of accesses, from 0; None if unknown. owner: the one rank that
    holds it; None of a replicated row. replicas: the ranks with a copy, of a replicated row. slots:
    by the ranks that hold it. source: the rank that each rank reads it from, [M]. cost: None if
    its number of reads is unknown.
    """

    table: str
    row: int
    kind: Literal["replicated", "listed", "striped"]
    memory: Literal["device", "host"]
    accesses: int | None
    accesses_at_least: int
    accesses_at_most: int | None
    partition: int | None
    owner: int | None
    replicas: list[int]
    slots: dict[int, int]
    source: list[int]
    why: RowReason
    cost: RowCost | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the output of `oper plan explain --json`."""
        content: dict[str, Any] = to_json(self)
        return content | {"slots": {str(rank): slot for rank, slot in self.slots.items()}}


class _Counted(NamedTuple):
    """Bounds of a row's accesses."""

    at_least: int
    at_most: int | None
    samples_with_row: int  # at least
    expected: tuple[float, float] | None = None  # accesses and samples that the plan was made for

    @property
    def exact(self) -> int | None:
        return self.at_least if self.at_least == self.at_most else None


def check_profile(plan: Plan, profile: Profile) -> None:
    """Raise OperError if the plan was made from another profile."""
    if profile.digest != plan.profile:
        raise OperError(
            f"expected the profile that the plan was made from (digest {plan.profile[:12]}…), got "
            f"another one ({profile.digest[:12]}…); give that profile, or none, or make a plan "
            "from this one"
        )


def explain(
    plan: Plan | Path | str,
    table: str,
    row: int,
    profile: Profile | Path | str | None = None,
) -> RowFacts:
    """Return the place of a row of the table called `table` and its reason: count, partition,
    owner, replicas and sources. `row` is its number by the table's id rule, from 0.

    Plan and profile may be given by their folders. With the profile that the plan was made from,
    the count is exact for every row. Raise OperError if the plan has no such table or row, or was
    made from another profile.
    """
    check_type("explain", "table", table, str)
    plan, row = plan_given("explain", "plan", plan), whole_number(row, "row")
    counted_by = None if profile is None else profile_given("explain", profile)
    return _explain(plan, table, row, counted_by)


def _explain(plan: Plan, table_name: str, row: int, profile: Profile | None) -> RowFacts:
    if profile is not None:
        check_profile(plan, profile)
    table = plan.table_index(table_name)
    rows = plan.tables[table].rows
    if not 0 <= row < rows:
        raise OperError(
            f"row {row} of table {table_name!r}: its rows are 0 to {rows - 1}; "
            "a raw value becomes a row by the table's id rule, in plan.json"
        )
    layout, memory = plan.layout, plan.memory_of(table)
    located = layout.locate(table, np.array([row]))
    counted = _count(plan, table, row, located, profile)
    group = int(located.group[0])
    if group < 0:
        owner = int(located.owner[0])
        return RowFacts(
            table=table_name,
            row=row,
            kind="striped",
            memory=memory.name,
            accesses=counted.exact,
            accesses_at_least=counted.at_least,
            accesses_at_most=counted.at_most,
            partition=None,
            owner=owner,
            replicas=[],
            slots={owner: int(located.slot[0])},
            source=[owner] * plan.ranks,
            # After a replan a striped row may be hot, and still not worth a move.
            why=RowReason.COLD if layout.stripe_bitmap is None else RowReason.STAYED,
        )
    holders = np.flatnonzero(layout.holds[group]).tolist()
    position = int(located.position[0])
    cost = _cost(plan, table, counted)
    return RowFacts(
        table=table_name,
        row=row,
        kind="replicated" if len(holders) > 1 else "listed",
        memory=memory.name,
        accesses=counted.exact,
        accesses_at_least=counted.at_least,
        accesses_at_most=counted.at_most,
        # The plan has the partitions of its main memory alone.
        partition=_partition(plan, counted.exact) if memory is plan.main else None,
        owner=holders[0] if len(holders) == 1 else None,
        replicas=holders if len(holders) > 1 else [],
        slots={rank: int(layout.base[group, rank]) + position for rank in holders},
        source=layout.source[group].tolist(),
        why=_why(plan, table, counted, len(holders), cost),
        cost=cost,
    )


def _partition(plan: Plan, accesses: int | None) -> int | None:
    """Return the partition of a listed row with this many accesses; None if no partition has it."""
    number = int(np.searchsorted(-plan.partition_floor, -accesses)) if accesses else None
    return None if number is None or number >= len(plan.partition_floor) else number


def _count(plan: Plan, table: int, row: int, found: Located, profile: Profile | None) -> _Counted:
    """Return a row's accesses by the profile, or else by the plan."""
    counts, index = plan.counts, int(found.code_index[0])
    if profile is not None:
        accesses = int(profile.accesses[profile.offsets[table] + row])
        samples_with_row = int(profile.table_samples_with_row(table)[row])
        expected = _expected(plan, profile, table, accesses, samples_with_row)
        return _Counted(accesses, accesses, samples_with_row, expected)
    if index >= 0:
        accesses = int(counts.accesses[index])
        return _Counted(accesses, accesses, int(counts.samples_with_row[index]))
    if found.group[0] < 0:
        return _Counted(0, _coldest_listed(plan, table), 0)
    # A row in a bag twice is in one sample: one is certain.
    least = int(counts.everywhere_least[table])
    return _Counted(least, None, least if _one_id_a_sample(plan) else min(least, 1))


def _expected(
    plan: Plan, profile: Profile, table: int, accesses: int, samples_with_row: int
) -> tuple[float, float]:
    """Return the accesses and samples of a row for which the plan was made."""
    if plan.workload.training:
        return accesses, samples_with_row
    of_table = profile.select([table])
    if samples_with_row > SELDOM and of_table.turnover is None:
        return accesses, samples_with_row
    counted = of_table.histogram()
    expected = expected_counts(*counted, of_table.turnover)
    here = (counted.accesses == accesses) & (counted.samples_with_row == samples_with_row)
    (at,) = np.flatnonzero(here)
    return float(expected.accesses[at]), float(expected.samples_with_row[at])


def _one_id_a_sample(plan: Plan) -> bool:
    """Return whether each sample accessed each of its rows once."""
    return plan.counts.samples_with_row is plan.counts.accesses


def _coldest_listed(plan: Plan, table: int) -> int | None:
    """Return the fewest accesses of the table's listed rows; None if it has none, or if the plan
    was made from another plan, after which a striped row may be hot."""
    layout, counts = plan.layout, plan.counts
    if layout.stripe_bitmap is not None:
        return None
    coded = list(rows_of_tables(layout.listed_offset - layout.everywhere_offset))[table]
    least = [int(counts.accesses[coded].min())] if coded.start < coded.stop else []
    if np.diff(layout.everywhere_offset)[table]:
        least.append(int(counts.everywhere_least[table]))
    return min(least, default=None)


def _cost(plan: Plan, table: int, counted: _Counted) -> RowCost | None:
    """Return the row's part of the transfer time with one owner, and with copies everywhere; None
    if no rank, or one rank, reads the row."""
    accesses, samples_with_row = counted.expected or (counted.at_least, counted.samples_with_row)
    workload = plan.workload
    pooled = plan.vector_ratio is not None and plan.tables[table].name in plan.pooled_tables
    topology = plan.cost_topology if pooled else without_pooling(plan.cost_topology)
    if topology.ranks == 1 or not accesses:
        return None
    basis = CountBasis.PLANNED if counted.exact is not None else CountBasis.AT_LEAST
    seldom = counted.samples_with_row <= SELDOM and not workload.training
    if seldom and counted.expected is None:
        basis = CountBasis.COUNTED
    ratios = (1.0, 1.0) if plan.distinct_ratio is None else plan.distinct_ratio[table]
    counts = np.array([accesses]), np.array([samples_with_row])
    of_rank, of_any = ratios
    R, D, U = expected_reads(
        *counts, plan.samples, workload, topology.ranks, of_rank, of_any, pooled
    )
    sizes = relayed_sizes(topology)
    of_nodes = node_touches(counts[1], plan.samples, workload, topology.ranks, sizes, *ratios)
    described = plan.tables[table]
    row_bytes = np.array([float(described.row_bytes)])
    memory_bytes = np.array([float(described.memory_bytes(workload.mode))])
    as_float = counts[0].astype(np.float64)
    row = Sums.of_rows(row_bytes, memory_bytes, as_float, R, D, U, of_nodes, pooled)
    charges = Charges.of(topology)
    read, touched = row.read_bytes, row.gradient_bytes
    moved = read + touched if workload.training else read
    of_pooled = row.pooled_read_bytes, row.pooled_gradient_bytes
    traffic = Traffic.of(
        topology, workload.training, moved, read, touched, row.node_bytes, *of_pooled
    )
    single = float(traffic.mean_owner_seconds[0])
    reads_copied = charges.read_seconds.min(axis=1)  # of the cheapest copy; in training its own
    if workload.training or pooled:
        reads_copied = charges.memory_seconds
    everywhere = float(row.memory_read_bytes[0]) * float(reads_copied.mean())
    if workload.training:
        method = plan.allreduce_method
        methods = METHODS[1:] if method == "none" else [method]
        everywhere += float(row.union_bytes[0]) * charges.mean_memory_seconds
        everywhere += min(float(allreduce_cost(topology, m).row_seconds(row)[0]) for m in methods)
    return RowCost(float(R[0]), basis, single, everywhere)


def _why(plan: Plan, table: int, counted: _Counted, copies: int, cost: RowCost | None) -> RowReason:
    """Return the reason for the place of a listed or replicated row."""
    if plan.ranks == 1:
        return RowReason.ONE_RANK
    if cost is None:
        if counted.exact is None:
            return RowReason.ROOM_EVERYWHERE
        known = plan.workload.training or counted.expected is not None
        return RowReason.NEVER_READ if known else RowReason.UNREAD
    if plan.memory_of(table).name == HOST:
        return RowReason.EVEN_LOAD
    if copies == plan.ranks:
        return RowReason.COPIES_PAY
    if copies > 1:
        return RowReason.SOME_COPIES_PAY
    if cost.one_owner_seconds <= cost.everywhere_seconds:
        return RowReason.COPIES_DO_NOT_PAY
    if _waits_for_allreduce(plan):
        return RowReason.ALLREDUCE_LATENCY
    if plan.limits is not None and plan.limits.by_devices:
        return RowReason.LEAST_MEMORY
    if _copies_bytes(plan, table) > _room_bytes(plan):
        return RowReason.NO_ROOM
    return RowReason.OTHERS_SAVE_MORE


def _waits_for_allreduce(plan: Plan) -> bool:
    """Return whether the first copy would cost the AllReduce's latency, because there is none yet,
    although there is room for copies."""
    limits = plan.limits
    allowed = limits is not None and (limits.by_devices or limits.extra_memory > 0)
    return plan.workload.training and plan.allreduce_method == "none" and allowed


def _copies_bytes(plan: Plan, table: int) -> int:
    """Return bytes of the fewest copies that a row can get: one, and in training one on every rank,
    or of a pooled table on every node."""
    copies = 1
    if plan.workload.training:
        pooled = plan.tables[table].name in plan.pooled_tables
        copies = (plan.topology.nodes if pooled else plan.ranks) - 1
    return copies * plan.tables[table].memory_bytes(plan.workload.mode)


def _room_bytes(plan: Plan) -> float:
    """Return the bytes for extra copies: the extra memory asked for, within the free capacities."""
    on_devices = [plan.tables[t] for t in plan.memories[0].tables]
    total = sum(t.rows * t.memory_bytes(plan.workload.mode) for t in on_devices)
    room = float(plan.cost.capacity_bytes.sum() - total)
    return room if plan.limits is None else min(plan.limits.extra_memory * total, room)
