"""Check a plan from its files alone: rows, slots, memory, figures.

Nothing here uses the planner, the cost model or the order in which slots were assigned: all rows
are translated by the maps of all ranks, as they are on disk, and the addresses are compared with
one another and with the plan's figures.

* rows: every row is read from a rank that holds it, at the slot where that rank reads it itself;
  so every row has one owner, or replicas that all maps agree on.
* slots: no two rows share one, and all are within their arenas.
* memory, figures: recomputed from slots and from one another.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oper.audit.finding import Finding
from oper.audit.rank_address_maps import RankMaps
from oper.audit.slot_occupancy import SlotMarks
from oper.plan.plan import Plan, load_plan

# Rows of each table that are compared with the layout in NumPy, which is slower than the maps by
# orders of magnitude. They are spread over the table, as listed rows crowd in no part of it.
_REFERENCE_ROWS = 4096
# Figures are summed in another order here: 2^-52 a step, over at most a few million terms.
_CLOSE = 1e-9


def check(folder: Path | str) -> list[Finding]:
    """All invariants of a plan's folder. OperError where the folder cannot be read as a plan."""
    plan = load_plan(folder)
    maps = RankMaps(plan, folder)
    placed = SlotMarks(plan)
    for chunk in maps.all_rows():
        placed.add(chunk)
    findings = [
        Finding("maps agree with the layout by its definition", _reference(plan, maps)),
        Finding("every row is read from a rank that holds it, at one slot", placed.astray),
        Finding("no two rows share a slot, and all are within the arenas", placed.clash()),
        Finding("replicas on all ranks are at equal slots", placed.unequal),
    ]
    return findings + _memory(plan, placed) + _figures(plan)


def _reference(plan: Plan, maps: RankMaps) -> str | None:
    """Compare rows spread over each table with the definition in oper/plan/layout.py."""
    for table, rows in enumerate(plan.layout.rows.tolist()):
        ids = np.unique(np.linspace(0, rows - 1, min(rows, _REFERENCE_ROWS)).astype(np.int64))
        for rank in range(plan.ranks):
            expected = plan.layout.addresses(table, ids, rank)
            different = np.flatnonzero(maps.translate(rank, table, ids) != expected)
            if len(different):
                return (
                    f"table {plan.tables[table].name!r}, row {ids[different[0]]}: rank {rank}'s "
                    "map and the layout disagree"
                )
    return None


def _memory(plan: Plan, placed: SlotMarks) -> list[Finding]:
    prediction, layout = plan.prediction, plan.layout
    row_memory = np.array([t.memory_bytes(plan.workload.mode) for t in plan.tables])
    width_memory = np.zeros(len(layout.slots), dtype=np.int64)
    width_memory[layout.width_of_table] = row_memory  # equal for the tables of a width
    memory = width_memory @ layout.slots
    total = int(layout.rows @ row_memory)
    stated, capacity = prediction.memory_bytes, prediction.capacity_bytes
    findings = [Finding("every slot of the arenas holds a row", placed.unused())]
    wrong = None
    if (memory != stated).any():
        rank = int(np.flatnonzero(memory != stated)[0])
        wrong = f"rank {rank} holds {memory[rank]:,} bytes, and the plan says {stated[rank]:,.0f}"
    findings.append(Finding("memory of each rank is the plan's", wrong))
    over = memory - capacity
    wrong = None
    if (over > 0).any() == bool(prediction.feasible):
        wrong = f"feasible is {prediction.feasible}, and ranks exceed by {over.max():,.0f} bytes"
    elif (over > 0).any():
        wrong = f"rank {over.argmax()} exceeds its capacity by {over.max():,.0f} bytes"
    findings.append(Finding("memory is within each rank's capacity", wrong))
    ratio, asked = placed.copies / total, plan.settings.get("extra_memory")
    wrong = None
    if not np.isclose(ratio, prediction.extra_memory_ratio, rtol=_CLOSE, atol=0):
        wrong = f"copies take {ratio:.6%}, and the plan says {prediction.extra_memory_ratio:.6%}"
    elif asked is not None and ratio > asked * (1 + _CLOSE):
        wrong = f"copies take {ratio:.6%} of the tables' bytes, and {asked:.6%} was asked for"
    findings.append(Finding("copies take the extra memory stated, within that asked for", wrong))
    return findings


def _figures(plan: Plan) -> list[Finding]:
    """Whether the figures are consistent: each is recomputed from its parts."""
    stated = plan.prediction
    away = ~np.eye(plan.ranks, dtype=bool)
    traffic = stated.communication_bytes
    rank_seconds = (
        stated.lookup_seconds
        + stated.link_seconds.sum(axis=1)
        + stated.gradient_lookup_seconds
        + stated.gradient_link_seconds.sum(axis=1)
        + stated.allreduce_seconds
    )
    parts = traffic.fetch + traffic.gradient + traffic.allreduce
    memory_share = stated.memory_bytes / np.maximum(stated.capacity_bytes, 1)
    link_balance = _balance(stated.link_seconds[away]) if plan.ranks > 1 else None
    equal: dict[str, tuple[Any, Any]] = {
        "rank_seconds": (stated.rank_seconds, rank_seconds),
        "objective_seconds": (stated.objective_seconds, float(stated.rank_seconds.max())),
        "link_seconds": (stated.link_seconds, stated.link_bytes * plan.topology.link_cost),
        "communication_bytes.fetch": (traffic.fetch, stated.link_bytes.sum()),
        "communication_bytes.total": (traffic.total, parts),
    }
    served = stated.lookups if plan.topology.is_one_memory else stated.lookup_seconds
    balances = _balance(memory_share), _balance(served), link_balance
    for name, said, found in zip(stated.dob._fields, stated.dob, balances, strict=True):
        equal[f"dob.{name}"] = (said, found)
    bound = plan.certificate.get("lower_bound_seconds")
    if bound:
        gap = (stated.objective_seconds - bound) / bound
        equal["certified_gap"] = (1 + plan.certificate["certified_gap"], 1 + gap)
    unequal = [
        name
        for name, (said, found) in equal.items()
        if (said is None) != (found is None)
        or (found is not None and not np.allclose(said, found, rtol=_CLOSE, atol=0))
    ]
    below = bound is not None and stated.objective_seconds < bound * (1 - _CLOSE)
    return [
        Finding("the figures add up", f"inconsistent: {', '.join(unequal)}" if unequal else None),
        Finding(
            "the objective is not below its lower bound",
            f"{stated.objective_seconds:.9g} s, below {bound:.9g} s" if below else None,
        ),
        Finding("accesses of replicated rows are the plan's", _replica_accesses(plan)),
    ]


def _replica_accesses(plan: Plan) -> str | None:
    layout = plan.layout
    # Codes are taken apart here by their definition, not by row_codes.py, which wrote them.
    bits = max(len(layout.group_width) - 1, 0).bit_length()
    group = (layout.codes.astype(np.uint64) & np.uint64((1 << bits) - 1)).astype(int)
    several = layout.holds.sum(axis=1) > 1
    counts = plan.counts
    found = int(counts.accesses[several[group]].sum(dtype=np.int64)) if len(group) else 0
    found += int(counts.everywhere_accesses.sum())
    if found == plan.replica_accesses:
        return None
    return f"they are {found:,}, and the plan says {plan.replica_accesses:,}"


def _balance(values: NDArray[Any]) -> float:
    """min/max, 1 where all are 0."""
    return float(values.min() / values.max()) if values.max() > 0 else 1.0
