"""Explain why a row of a plan is where it is.

Counts are those of the profile that the plan was made from. The plan has none for striped rows, but
they are at most the smallest count among their table's listed rows.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.base.errors import OperError
from oper.cost.allreduce import METHODS, allreduce_cost
from oper.cost.expected_reads import expected_reads
from oper.cost.holder_set_sums import Sums
from oper.cost.read_charges import Charges
from oper.plan.plan import Plan


def explain(plan: Plan, table_name: str, row: int) -> dict[str, Any]:
    """Count, partition, owner, replicas, sources and reason of one row, as `--json` prints them.

    OperError where the plan has no such table or row.
    """
    table = plan.table_index(table_name)
    rows = plan.tables[table].rows
    if not 0 <= row < rows:
        raise OperError(
            f"row {row} of table {table_name!r}: its rows are 0 to {rows - 1}; "
            "a raw value becomes a row by the table's id rule, in plan.json"
        )
    layout = plan.layout
    found = layout.locate(table, np.array([row]))
    group = int(found.group[0])
    if group < 0:
        owner = int(found.owner[0])
        # After a replan a striped row may be hot, and still not worth a move.
        replanned = layout.stripe_bitmap is not None
        return {
            "table": table_name,
            "row": row,
            "kind": "striped",
            "accesses": None,
            "accesses_at_most": None if replanned else _coldest_listed(plan, table),
            "partition": None,
            "owner": owner,
            "replicas": [],
            "slots": {str(owner): int(found.slot[0])},
            "path": [owner] * plan.ranks,
            "why": (
                "it stayed where the previous plan striped it: moving it would not pay"
                if replanned
                else "it is memory-bounded: its partition reaches the threshold of bytes before "
                "that of accesses. Such rows of a table are striped over the ranks by id, in "
                "proportion to the memory each had left, and need no entry in the address map"
            ),
        }
    accesses = int(plan.listed_accesses[found.listed_index[0]])
    samples_with_row = int(plan.listed_samples_with_row[found.listed_index[0]])
    holders = np.flatnonzero(layout.holds[group]).tolist()
    position = int(found.position[0])
    partition = int(np.searchsorted(-plan.partition_floor, -accesses)) if accesses else None
    if partition is not None and partition >= len(plan.partition_floor):
        partition = None
    return {
        "table": table_name,
        "row": row,
        "kind": "replicated" if len(holders) > 1 else "listed",
        "accesses": accesses,
        "accesses_at_most": accesses,
        "partition": partition,
        "owner": holders[0] if len(holders) == 1 else None,
        "replicas": holders if len(holders) > 1 else [],
        "slots": {str(rank): int(layout.base[group, rank]) + position for rank in holders},
        "path": layout.source[group].tolist(),
        "why": _why(plan, table, accesses, samples_with_row, len(holders)),
    }


def _coldest_listed(plan: Plan, table: int) -> int | None:
    """The fewest accesses of the table's listed rows; None where it has none."""
    first, last = np.searchsorted(_tables_of_listed(plan), [table, table + 1])
    listed = plan.listed_accesses[first:last]
    return int(listed.min()) if len(listed) else None


def _tables_of_listed(plan: Plan) -> NDArray[np.int64]:
    """The table of each listed row, [E], from the bitmap."""
    per_line = np.bitwise_count(plan.layout.bitmap[:, 1:]).sum(axis=1, dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(per_line)])[plan.layout.line_offset]
    return np.repeat(np.arange(len(plan.tables)), np.diff(ends))


def _why(plan: Plan, table: int, accesses: int, samples_with_row: int, copies: int) -> str:
    """The reason: the row's part of the iteration with one owner, and with copies everywhere."""
    topology, workload = plan.topology, plan.workload
    ranks = topology.ranks
    if ranks == 1:
        return "there is only one rank"
    if not accesses:
        return "it was never accessed: it costs only memory, and is where there was room"
    ratios = (1.0, 1.0) if plan.distinct_ratio is None else plan.distinct_ratio[table]
    counts = np.array([accesses]), np.array([samples_with_row])
    R, D, U = expected_reads(*counts, plan.samples, workload, ranks, *ratios)
    described = plan.tables[table]
    row_bytes = np.array([float(described.row_bytes)])
    memory_bytes = np.array([float(described.memory_bytes(workload.mode))])
    row = Sums.of_rows(row_bytes, memory_bytes, counts[0].astype(np.float64), R, D, U)
    charges = Charges.of(topology)
    single = float(row.read_bytes[0]) * charges.mean_owner_seconds
    everywhere = float(row.read_bytes[0]) * charges.mean_memory_seconds
    if workload.training:
        method = plan.allreduce_method
        methods = METHODS[1:] if method == "none" else [method]
        single += float(row.gradient_bytes[0]) * charges.mean_owner_seconds
        everywhere += float(row.union_bytes[0]) * charges.mean_memory_seconds
        everywhere += min(float(allreduce_cost(topology, m).row_seconds(row)[0]) for m in methods)
    read = f"each rank reads it {R[0]:.3g} times an iteration"
    times = f"{single * 1e9:.3g} ns of a rank's iteration with one owner, {everywhere * 1e9:.3g} ns"
    if copies == ranks:
        return f"{read}: {times} with a copy on every rank, so it is replicated"
    if copies > 1:
        return (
            f"{read}; copies on {copies} ranks avoid the slower links, and "
            "more copies would save less than other rows' copies do with that memory"
        )
    if single <= everywhere:
        return f"{read}: {times} with copies, so they do not pay; it has one owner"
    if _copies_bytes(plan, table) > _room_bytes(plan):
        return (
            f"{read}: {times} with copies, but its copies alone would exceed the extra memory; "
            "it has one owner, chosen for an even load"
        )
    if workload.training and plan.allreduce_method == "none":
        return (
            f"{read}: {times} with copies, but all such rows together would save less than the "
            "AllReduce's latency costs; it has one owner, chosen for an even load"
        )
    return (
        f"{read}: {times} with copies, but the extra memory is used by rows that save more per "
        "byte; it has one owner, chosen for an even load"
    )


def _copies_bytes(plan: Plan, table: int) -> int:
    """Bytes of the fewest copies that a row can get: one, and in training one on every rank."""
    copies = plan.ranks - 1 if plan.workload.training else 1
    return copies * plan.tables[table].memory_bytes(plan.workload.mode)


def _room_bytes(plan: Plan) -> float:
    """Bytes for extra copies: what was asked for, within what the capacities leave."""
    total = sum(t.rows * t.memory_bytes(plan.workload.mode) for t in plan.tables)
    room = float(plan.prediction.capacity_bytes.sum() - total)
    return min(plan.settings["extra_memory"] * total, room)
