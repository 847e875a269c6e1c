"""Explain why a row of a plan is where it is.

Counts are those of the profile that the plan was made from. The plan has none for striped rows, but
they are at most the smallest count among their table's listed rows; nor for rows on all ranks that
have a mark instead of a code, but those are at least the smallest count among them in their table.
The profile itself has all of them.
"""

from typing import Any, NamedTuple

import numpy as np

from oper.base.errors import OperError
from oper.base.formatting import format_digits, format_duration
from oper.cost.allreduce import METHODS, allreduce_cost
from oper.cost.expected_reads import expected_reads
from oper.cost.holder_set_sums import Sums
from oper.cost.read_charges import Charges
from oper.plan.layout import Located
from oper.plan.plan import Plan
from oper.plan.row_codes import rows_of_tables
from oper.profiling.profile import Profile


class _Counted(NamedTuple):
    """What is known of how often a row was accessed."""

    at_least: int
    at_most: int | None
    samples_with_row: int  # at least

    @property
    def exact(self) -> int | None:
        return self.at_least if self.at_least == self.at_most else None


def check_profile(plan: Plan, profile: Profile) -> None:
    """OperError where the plan was made from another profile."""
    if profile.digest != plan.profile:
        raise OperError(
            f"the profile has the digest {profile.digest[:12]}…, and the plan was made from "
            f"{plan.profile[:12]}…; give the profile that it was made from, or none"
        )


def explain(
    plan: Plan, table_name: str, row: int, profile: Profile | None = None
) -> dict[str, Any]:
    """Count, partition, owner, replicas, sources and reason of one row, as `--json` prints them.

    With the profile that the plan was made from, the count is exact for every row. OperError where
    the plan has no such table or row, or was made from another profile.
    """
    if profile is not None:
        check_profile(plan, profile)
    table = plan.table_index(table_name)
    rows = plan.tables[table].rows
    if not 0 <= row < rows:
        raise OperError(
            f"row {row} of table {table_name!r}: its rows are 0 to {rows - 1}; "
            "a raw value becomes a row by the table's id rule, in plan.json"
        )
    layout = plan.layout
    found = layout.locate(table, np.array([row]))
    counted = _count(plan, table, row, found, profile)
    group = int(found.group[0])
    if group < 0:
        owner = int(found.owner[0])
        # After a replan a striped row may be hot, and still not worth a move.
        replanned = layout.stripe_bitmap is not None
        return {
            "table": table_name,
            "row": row,
            "kind": "striped",
            "in_tier": table in plan.tier,
            "accesses": counted.exact,
            "accesses_at_least": counted.at_least,
            "accesses_at_most": counted.at_most,
            "partition": None,
            "owner": owner,
            "replicas": [],
            "slots": {str(owner): int(found.slot[0])},
            "path": [owner] * plan.ranks,
            "why": (
                "it stayed where the previous plan had it, as moving it would not pay"
                if replanned
                else "cold rows are spread over the ranks in turn"
            ),
        }
    accesses, in_tier = counted.exact, table in plan.tier
    holders = np.flatnonzero(layout.holds[group]).tolist()
    position = int(found.position[0])
    partition = int(np.searchsorted(-plan.partition_floor, -accesses)) if accesses else None
    if in_tier and len(plan.tier) < len(plan.tables):
        partition = None  # the plan has those of the tables on devices
    if partition is not None and partition >= len(plan.partition_floor):
        partition = None
    return {
        "table": table_name,
        "row": row,
        "kind": "replicated" if len(holders) > 1 else "listed",
        "in_tier": in_tier,
        "accesses": accesses,
        "accesses_at_least": counted.at_least,
        "accesses_at_most": counted.at_most,
        "partition": partition,
        "owner": holders[0] if len(holders) == 1 else None,
        "replicas": holders if len(holders) > 1 else [],
        "slots": {str(rank): int(layout.base[group, rank]) + position for rank in holders},
        "path": layout.source[group].tolist(),
        "why": _why(plan, table, counted, len(holders)),
    }


def _count(plan: Plan, table: int, row: int, found: Located, profile: Profile | None) -> _Counted:
    """What the profile, or else the plan, knows of a row's accesses."""
    counts, index = plan.counts, int(found.code_index[0])
    if profile is not None:
        accesses = int(profile.accesses[profile.offsets[table] + row])
        return _Counted(accesses, accesses, int(profile.table_samples_with_row(table)[row]))
    if index >= 0:
        accesses = int(counts.accesses[index])
        return _Counted(accesses, accesses, int(counts.samples_with_row[index]))
    if found.group[0] < 0:
        return _Counted(0, _coldest_listed(plan, table), 0)
    # A row in a bag twice is in one sample: one is certain.
    least = int(counts.everywhere_least[table])
    return _Counted(least, None, least if _one_id_a_sample(plan) else min(least, 1))


def _one_id_a_sample(plan: Plan) -> bool:
    """Whether every row was accessed once by each sample with it."""
    return plan.counts.samples_with_row is plan.counts.accesses


def _coldest_listed(plan: Plan, table: int) -> int | None:
    """The fewest accesses of the table's listed rows; None where it has none, or where the plan was
    made from another, after which a striped row may be hot."""
    layout, counts = plan.layout, plan.counts
    if layout.stripe_bitmap is not None:
        return None
    coded = list(rows_of_tables(layout.listed_offset - layout.everywhere_offset))[table]
    least = [int(counts.accesses[coded].min())] if coded.start < coded.stop else []
    if np.diff(layout.everywhere_offset)[table]:
        least.append(int(counts.everywhere_least[table]))
    return min(least, default=None)


def _why(plan: Plan, table: int, counted: _Counted, copies: int) -> str:
    """The reason: the row's part of the iteration with one owner, and with copies everywhere."""
    accesses, samples_with_row = counted.at_least, counted.samples_with_row
    topology, workload = plan.topology, plan.workload
    ranks = topology.ranks
    if ranks == 1:
        return "there is only one rank"
    known = counted.exact is not None
    if not known and not accesses:
        return (
            "there was memory for a copy of it on every rank; how often it was read is in the "
            "profile"
        )
    if not accesses:
        return "it was never read: it costs only memory, and is where there was room"
    ratios = (1.0, 1.0) if plan.distinct_ratio is None else plan.distinct_ratio[table]
    counts = np.array([accesses]), np.array([samples_with_row])
    R, D, U = expected_reads(*counts, plan.samples, workload, ranks, *ratios)
    described = plan.tables[table]
    row_bytes = np.array([float(described.row_bytes)])
    memory_bytes = np.array([float(described.memory_bytes(workload.mode))])
    row = Sums.of_rows(row_bytes, memory_bytes, counts[0].astype(np.float64), R, D, U)
    charges = Charges.of(topology)
    single = float(row.read_bytes[0]) * charges.mean_owner_seconds
    reads_copied = charges.read_seconds.min(axis=1)  # of the cheapest copy; in training its own
    if workload.training:
        reads_copied = charges.memory_seconds
    everywhere = float(row.read_bytes[0]) * float(reads_copied.mean())
    if workload.training:
        method = plan.allreduce_method
        methods = METHODS[1:] if method == "none" else [method]
        single += float(row.gradient_bytes[0]) * Charges.of_gradients(topology).mean_owner_seconds
        everywhere += float(row.union_bytes[0]) * charges.mean_memory_seconds
        everywhere += min(float(allreduce_cost(topology, m).row_seconds(row)[0]) for m in methods)
    often = format_digits(float(R[0]), 3)
    read = f"each rank reads it {'' if known else 'at least '}{often} times an iteration"
    if table in plan.tier:
        return (
            f"{read}, as far as no cache has it; a row of the tier has one owner, chosen for an "
            "even load"
        )
    alone, copied = format_duration(single), format_duration(everywhere)
    times = f"{alone} of a rank's iteration with one owner, {copied}"
    if copies == ranks:
        return f"{read}: {times} with a copy on every rank, so it is replicated"
    if copies > 1:
        return (
            f"{read}; copies on {copies} ranks avoid the slower links, and "
            "more copies would save less than other rows' copies do with that memory"
        )
    if single <= everywhere:
        return f"{read}: {times} with copies, so they do not pay; it has one owner"
    if plan.settings.get("reserve") is not None and not _waits_for_allreduce(plan):
        return (
            f"{read}: {times} with copies, but a plan takes the least memory that comes within 1% "
            "of the fastest, and this one does without; it has one owner, chosen for an even load"
        )
    if not _waits_for_allreduce(plan) and _copies_bytes(plan, table) > _room_bytes(plan):
        return (
            f"{read}: {times} with copies, but its copies alone would exceed the extra memory; "
            "it has one owner, chosen for an even load"
        )
    if _waits_for_allreduce(plan):
        return (
            f"{read}: {times} with copies, but all such rows together would save less than the "
            "AllReduce's latency costs; it has one owner, chosen for an even load"
        )
    return (
        f"{read}: {times} with copies, but the extra memory is used by rows that save more per "
        "byte; it has one owner, chosen for an even load"
    )


def _waits_for_allreduce(plan: Plan) -> bool:
    """Whether the first copy would cost the AllReduce's latency, as there is none yet, though there
    is room for copies."""
    allowed = plan.settings.get("reserve") is not None or plan.settings["extra_memory"] > 0
    return plan.workload.training and plan.allreduce_method == "none" and allowed


def _copies_bytes(plan: Plan, table: int) -> int:
    """Bytes of the fewest copies that a row can get: one, and in training one on every rank."""
    copies = plan.ranks - 1 if plan.workload.training else 1
    return copies * plan.tables[table].memory_bytes(plan.workload.mode)


def _room_bytes(plan: Plan) -> float:
    """Bytes for extra copies: what was asked for, within what the capacities leave."""
    on_devices = [t for n, t in enumerate(plan.tables) if n not in plan.tier]
    total = sum(t.rows * t.memory_bytes(plan.workload.mode) for t in on_devices)
    room = float(plan.prediction.capacity_bytes.sum() - total)
    return min(plan.settings["extra_memory"] * total, room)
