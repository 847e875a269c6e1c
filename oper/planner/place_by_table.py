"""Placements in which each table is pooled, or fetched as is usual, by what is shortest.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Planned`. Three placements are made and
the one with the shortest step is taken, its latency included: no table pooled, all, and those that
cost the ranks less when they are pooled. What a table costs is the mean over ranks with the best
copies of its rows (pooled_copies.py), which tables share nothing of but the memory for copies; so it
is found table by table, without trying sets of tables. Tables without pooling never are.

Both ways of fetching have one price: a byte on a link, or from a memory, costs the same. Of a pooled
table a link passes every access in a node and the vectors between nodes, and of a distinct one each
row once a batch; memories give each row that a rank touches once, as caches have the repeats.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from oper.base.arrays import Floats
from oper.cost.step_latency import step_latency
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.bounds.pooled_bound import MeanOfCopies
from oper.planner.class_placement.pooled_copies import choose_copies
from oper.planner.least_memory import by_devices, place_in_memory
from oper.planner.device_limits import DeviceLimits
from oper.planner.make_placement import Planned
from oper.planner.place_pooled import place_pooled, unplaced
from oper.planner.problem.classes import table_widths
from oper.planner.problem.problem import make_problem
from oper.profiling.profile import Profile
from oper.topology.pooled_links import pooled_of
from oper.topology.relays import relayed
from oper.topology.topology import Topology


def place_by_table(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None] = lambda step: None,
) -> Planned:
    """Plan for all rows of `profile`; `report` is called with the name of each step as it begins.

    Raises OperError where the profile does not know the lengths of bags, or the ranks cannot hold
    the tables.
    """
    usual = replace(workload, fetch=None).on(topology.nodes)
    able = frozenset(table.name for table in profile.tables if table.pooling != "none")
    found = [place_in_memory(profile, topology, usual, asked, report)]
    if able == {table.name for table in profile.tables}:
        pooled = replace(workload, fetch="pooled")
        found.append(place_pooled(profile, topology, pooled, asked, report))
    elif able:
        found.append(place_pooled(profile, topology, usual, asked, report, able))
    if by_mean(topology, workload, asked):
        chosen = cheaper_pooled(profile, topology, usual, asked) & able
        if chosen and chosen != able:
            found.append(place_pooled(profile, topology, usual, asked, report, chosen))
    return min(found, key=predicted_seconds)


def by_mean(topology: Topology, workload: Workload, asked: PlanSettings) -> bool:
    """Whether some tables may be pooled and others not: where copies are chosen table by table."""
    return topology.homogeneous and asked.balance == "time"


def predicted_seconds(planned: Planned) -> float:
    """A step's time: its bytes, and its latency."""
    problem, tables = planned.problem, planned.problem.profile.tables
    pooled = pooled_of(problem.topology, tables)
    _, width = table_widths(tables, problem.workload.mode)
    widths = len(np.unique(width[~pooled])), len(np.unique(width[pooled]))
    latency = step_latency(problem.topology, problem.workload, *widths)
    return planned.cost.objective_seconds + latency.seconds


def cheaper_pooled(
    profile: Profile, topology: Topology, usual: Workload, asked: PlanSettings
) -> frozenset[str]:
    """The tables that take less of the mean rank when they are pooled than as is usual."""
    pooled, fetched = (
        table_seconds(profile, topology, usual, asked, tables)
        for tables in (frozenset(table.name for table in profile.tables), frozenset[str]())
    )
    return frozenset(
        table.name
        for table, one, other in zip(profile.tables, pooled, fetched, strict=True)
        if one < other
    )


def table_seconds(
    profile: Profile,
    topology: Topology,
    usual: Workload,
    asked: PlanSettings,
    tables: frozenset[str],
) -> Floats:
    """What each table takes of the mean rank with its best copies, [T], where `tables` are pooled
    and each lies on one node."""
    fetched = relayed(topology, usual.fetch == "distinct")
    ranks = unplaced(profile, fetched, usual.training, tables)
    problem = make_problem(profile, ranks, usual, asked, by_table=True)
    if by_devices(topology, asked):
        limits = DeviceLimits.of(problem)
        problem = limits.beside_most_replicas(limits.most_extra)
    lengths = profile.bag_lengths
    assert lengths is not None
    if usual.training:
        return choose_copies(problem, lengths, problem.budget_bytes).table_seconds
    # Pooled tables are spread over all nodes in inference.
    copies = MeanOfCopies.of(problem, lengths, topology.nodes)
    return copies.table_seconds(problem.budget_bytes)
