"""Selection of a plan's tables, and the union of the plans of two memories.

Replanning and pricing work on one memory at a time: `plans_of_memories` splits a plan, and
`join_memories` joins the parts. A model's collections of tables are sharded one by one; each gets a
part of the plan with its own slots (`part_of`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oper.base.arrays import Floats
from oper.cost.objective import Cost
from oper.cost.step_time import StepTime
from oper.plan.layout_parts import (
    LayoutPart,
    in_table_order,
    join_layouts,
    pack,
    pieces_of,
    select_layout,
)
from oper.plan.memories import DEVICE, HOST, Memory
from oper.plan.plan import ListedCounts, Plan
from oper.plan.settings import Limits
from oper.topology.host_tier import tier_topology
from oper.topology.topology import Topology


def select(plan: Plan, tables: Sequence[int]) -> Plan:
    """Return the plan of the tables with these numbers, in the plan's order; the plan itself if
    these are all tables.

    Rows keep their slots, and tables their memory; figures and certificates remain those of all
    tables.
    """
    chosen = np.unique(np.asarray(tables, dtype=np.int64))
    if len(chosen) == len(plan.tables):
        return plan
    counts = plan.counts
    offset = LayoutPart(plan.layout, chosen).coded_offset

    def coded(values: Any) -> Any:
        pieces = list(pieces_of(values, offset))
        return np.concatenate([values[:0], *(pieces[t] for t in chosen)])

    accesses = coded(counts.accesses)
    same = counts.samples_with_row is counts.accesses
    memories = tuple(
        replace(
            memory,
            tables=tuple(np.flatnonzero(np.isin(chosen, memory.tables)).tolist()),
        )
        for memory in plan.memories
    )
    return replace(
        plan,
        tables=tuple(plan.tables[t] for t in chosen),
        layout=select_layout(plan.layout, chosen),
        counts=ListedCounts(
            accesses,
            accesses if same else coded(counts.samples_with_row),
            counts.everywhere_accesses[chosen],
            counts.everywhere_least[chosen],
        ),
        memories=tuple(m for m in memories if m.name == DEVICE or m.tables),
        pooled_tables=tuple(
            plan.tables[t].name for t in chosen if plan.tables[t].name in plan.pooled_tables
        ),
        distinct_ratio=None if plan.distinct_ratio is None else plan.distinct_ratio[chosen],
    )


def part_of(plan: Plan, tables: Sequence[int]) -> Plan:
    """Return the plan of `select` with slots only for the rows of its tables (`pack`): the arenas
    of all parts together are as large as those of the whole plan.

    A plan's parts could share one heap instead. But TorchRec shards collections one by one, so the
    first would have to know the optimizers, and so the state, of later ones, and each AllReduce
    would cover the replicas of all.
    """
    part = select(plan, tables)
    return part if part is plan else replace(part, layout=pack(part.layout))


def plans_of_memories(plan: Plan) -> list[Plan]:
    """Return a plan, with its own figures and topology, for each memory that has tables, in
    order."""
    if len(plan.memories) == 1:
        return [plan]
    return [_plan_of(plan, memory) for memory in plan.memories if memory.tables]


def _plan_of(plan: Plan, memory: Memory) -> Plan:
    """Return the plan of the tables in one memory."""
    whole = replace(memory, name=DEVICE, tables=tuple(range(len(memory.tables))))
    part = replace(
        select(plan, memory.tables),
        memories=(whole,),
        step_time=None,
        asked=replace(plan.asked, tier=()),
        whole_certificate=None,
        companions=(),
    )
    if memory.name == DEVICE:
        return part
    return replace(part, topology=tier_topology(plan.topology), limits=Limits(0.0))


def join_memories(
    devices: Plan | None,
    host: Plan,
    in_hosts: Sequence[int],
    topology: Topology,
    device_capacity_bytes: Floats,
) -> Plan:
    """Return the plan of all tables, of which those numbered `in_hosts` lie in the hosts' memory.

    `topology` is that of the devices, with the hosts' memory and bandwidth; `device_capacity_bytes`
    [M] is the capacity of devices without tables. Everything else is equal in both plans, or from
    the plan of the devices.
    """
    plans = [host] if devices is None else [devices, host]
    of_host = np.array(in_hosts, dtype=np.int64)
    of_devices = np.setdiff1d(np.arange(sum(len(p.tables) for p in plans)), of_host)
    numbers = [of_host] if devices is None else [of_devices, of_host]
    parts = [LayoutPart(p.layout, n) for p, n in zip(plans, numbers, strict=True)]

    def by_table(name: str) -> list[Any]:
        values = [getattr(plan, name) for plan in plans]
        return in_table_order(list(zip(numbers, values, strict=True)))

    empty = np.zeros(topology.ranks, dtype=np.int64)
    on_devices = (
        Memory(DEVICE, (), Cost.of_no_rows(device_capacity_bytes), empty)
        if devices is None
        else replace(devices.memories[0], tables=tuple(of_devices.tolist()))
    )
    measured = all(plan.distinct_ratio is not None for plan in plans)
    return replace(
        plans[0],
        tables=tuple(by_table("tables")),
        topology=topology,
        layout=join_layouts(parts),
        counts=_join_counts(parts, [plan.counts for plan in plans]),
        memories=(on_devices, replace(host.memories[0], name=HOST, tables=tuple(in_hosts))),
        distinct_ratio=np.stack(by_table("distinct_ratio")) if measured else None,
        step_time=_step_of(plans),
        unread_step_seconds=None,
    )


def _step_of(plans: Sequence[Plan]) -> StepTime | None:
    """Return the steps of the plans of each memory, one after the other; the hosts' is the last."""
    steps = [plan.step_time for plan in plans]
    *of_devices, of_hosts = steps
    if of_hosts is None or None in of_devices:
        return None
    phases = [replace(phase, name=f"{HOST} {phase.name}") for phase in of_hosts.phases]
    return StepTime((*(phase for step in of_devices if step for phase in step.phases), *phases))


def _join_counts(parts: list[LayoutPart], counts: list[ListedCounts]) -> ListedCounts:
    """Return the counts of all tables."""

    def by_table(values: list[Any]) -> list[Any]:
        return in_table_order([(p.tables, v) for p, v in zip(parts, values, strict=True)])

    def coded(values: list[Any]) -> Any:
        pieces = [list(pieces_of(v, p.coded_offset)) for p, v in zip(parts, values, strict=True)]
        return np.concatenate(by_table(pieces))

    accesses = coded([of_part.accesses for of_part in counts])
    same = all(of_part.samples_with_row is of_part.accesses for of_part in counts)
    return ListedCounts(
        accesses,
        accesses if same else coded([of_part.samples_with_row for of_part in counts]),
        np.array(by_table([of_part.everywhere_accesses for of_part in counts]), dtype=np.int64),
        np.array(by_table([of_part.everywhere_least for of_part in counts]), dtype=np.int64),
    )
