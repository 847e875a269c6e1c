"""Placements in which each table is pooled, or fetched as is usual, by what is shortest.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Planned`. Three placements are made and
the one with the shortest step is taken, its latency included: no table pooled, all, and some. What
a table costs is the mean over ranks with the best copies of its rows (pooled_copies.py,
pooled_bound.py), of which tables share nothing but the memory for copies; so tables come in an
order, by what pooling saves of each. In inference those are pooled of which it saves anything. In
training pooled tables make nodes uneven, where they are few, and even, where others join them: so
fewer and more are tried as well, by drafts. Tables without pooling never are pooled.

Both ways of fetching have one price: a byte on a link, or from a memory, costs the same. Of a
pooled table a link passes every access in a node and the vectors between nodes, and of a distinct
one each row once a batch; memories give each row that a rank touches once, as caches have the
repeats.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from oper.base.arrays import Floats
from oper.base.formatting import plural
from oper.cost.step_time import latency_seconds
from oper.cost.workload import Workload
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.class_placement.pooled_copies import choose_copies
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import by_devices, place_in_memory
from oper.planner.make_placement import Planned
from oper.planner.place_pooled import (
    check_all_poolable,
    estimated_seconds,
    known_lengths,
    place_pooled,
    predicted_seconds,
    unplaced,
)
from oper.planner.problem.classes import table_widths
from oper.planner.problem.problem import Problem, make_problem
from oper.profiling.profile import Profile
from oper.topology.nearly_alike import as_alike
from oper.topology.relays import relayed
from oper.topology.topology import Topology
from oper.topology.transports import NVSHMEM

_TRIED = 4  # powers of two by which more or fewer tables are tried than pay


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
    ways = _ways_by_table(profile, topology, workload, asked)
    return place_shortest(profile, topology, asked, ways, report)


@dataclass(frozen=True)
class Way:
    """A way to fetch a model's tables: those `pooled`, by name, and others as `workload` says."""

    pooled: frozenset[str]
    workload: Workload

    def place(
        self,
        profile: Profile,
        topology: Topology,
        asked: PlanSettings,
        report: Callable[[str], None] = lambda step: None,
    ) -> Planned:
        """Plan for all rows of `profile`."""
        given = (profile, topology, self.workload, asked, report)
        if not self.pooled:
            return place_in_memory(*given)
        return place_pooled(*given, None if self.workload.fetch == "pooled" else self.pooled)

    def problem(
        self, profile: Profile, topology: Topology, asked: PlanSettings, by_table: bool
    ) -> Problem:
        """What placements are made and priced in, within all the memory that there is; `by_table`
        as for `make_problem`, and always so where tables are pooled."""
        if self.pooled:
            return unplaced_problem(profile, topology, self.workload, asked, self.pooled)
        found = make_problem(profile, topology, self.workload, asked, by_table=by_table)
        return _within_all_memory(found, topology, asked)


def ways_to_fetch(
    profile: Profile, topology: Topology, workload: Workload, asked: PlanSettings
) -> list[Way]:
    """The ways to fetch tables that a workload leaves open, those with fewest pooled tables first:
    one, or those that `auto` tries.

    Raises OperError where tables cannot be pooled as asked.
    """
    workload = workload.on(topology.nodes)
    if workload.fetch == "auto":
        return _ways_by_table(profile, topology, workload, asked)
    if workload.fetch != "pooled":
        return [Way(frozenset(), workload)]
    check_all_poolable(profile, topology)
    known_lengths(profile)
    return [Way(poolable(profile), workload)]


def _ways_by_table(
    profile: Profile, topology: Topology, workload: Workload, asked: PlanSettings
) -> list[Way]:
    usual = replace(workload, fetch=None).on(topology.nodes)
    able = poolable(profile)
    if able:
        known_lengths(profile)
    found = [Way(frozenset(), usual)]
    if topology.transport == NVSHMEM:  # whose kernels read rows each for itself
        return found
    mixes = may_mix(topology, usual, asked)
    if mixes and by_mean(topology, asked):
        chosen = cheaper_pooled(profile, topology, usual, asked, able)
        if chosen and chosen != able:
            found.append(Way(chosen, usual))
    if able == {table.name for table in profile.tables}:
        found.append(Way(able, replace(workload, fetch="pooled")))
    elif able and mixes:
        found.append(Way(able, usual))
    return found


def place_shortest(
    profile: Profile,
    topology: Topology,
    asked: PlanSettings,
    ways: Sequence[Way],
    report: Callable[[str], None] = lambda step: None,
) -> Planned:
    """Return the plan with the shortest step, of one for each way to fetch the tables; `report` is
    called with the way too if there are several."""
    found = []
    for way in ways:
        named = report if len(ways) == 1 else partial(_report_step, report, way)
        found.append(way.place(profile, topology, asked, named))
    return min(found, key=predicted_seconds)  # the first of equals: fewest pooled tables


def _report_step(report: Callable[[str], None], way: Way, step: str) -> None:
    tables = plural(len(way.pooled), "table") if way.pooled else "no table"
    report(f"{tables} pooled, {step}")


def by_mean(topology: Topology, asked: PlanSettings) -> bool:
    """Whether some tables may be pooled and others not: where copies are chosen table by table."""
    return topology.homogeneous and asked.balance == "time"


def may_mix(topology: Topology, usual: Workload, asked: PlanSettings) -> bool:
    """Return whether a plan may pool some tables and not others: in inference only on equal ranks
    with equal memory, as the linear programme for others has one cost for a byte of any row."""
    memory = topology.memory_for_plans if by_devices(topology, asked) else None
    return usual.training or (topology.homogeneous and len(set(memory or ())) <= 1)


@dataclass(frozen=True)
class EstimatedGain:
    """By how much of a step, a share, plans with `pooled_tables` of a model's `tables` may be
    shorter than one without."""

    share: float
    pooled_tables: int
    tables: int


def estimated_gain(plan: Plan, profile: Profile, topology: Topology) -> EstimatedGain | None:
    """Return the most that fetches by table may gain over a plan whose rows all travel themselves,
    as if nodes were even; None if they gain nothing, or if only planning can tell."""
    lengths, asked, topology = profile.bag_lengths, plan.asked, as_alike(topology)
    if plan.pooled_tables or plan.host is not None or topology.nodes == 1 or lengths is None:
        return None
    if topology.transport == NVSHMEM:
        return None
    bags = lengths.length.max(initial=0) > 1
    if not (bags and plan.workload.training and by_mean(topology, asked)):
        return None
    able = poolable(profile)
    fetched, pooled = (
        table_seconds(unplaced_problem(profile, topology, plan.workload, asked, tables))
        for tables in (frozenset[str](), able)
    )
    saved = np.maximum(fetched - pooled, 0.0)
    _, width = table_widths(profile.tables, plan.workload.mode)
    may = np.array([table.name in able for table in profile.tables])
    widths = len(np.unique(width)), 0
    before = plan.cost.objective_seconds + latency_seconds(topology, plan.workload, *widths)
    found = []
    for which in (may & (saved > 0), may):
        widths = len(np.unique(width[~which])), len(np.unique(width[which]))
        latency = latency_seconds(topology, plan.workload, *widths)
        after = plan.cost.objective_seconds - float((fetched - pooled)[which].sum()) + latency
        found.append(EstimatedGain(1 - after / before, int(which.sum()), len(may)))
    best = max(found, key=lambda gain: gain.share)
    return best if best.share > 0 else None


def poolable(profile: Profile) -> frozenset[str]:
    """The tables whose bags can be added up, by name."""
    return frozenset(table.name for table in profile.tables if table.pooling != "none")


def unplaced_problem(
    profile: Profile,
    topology: Topology,
    usual: Workload,
    asked: PlanSettings,
    tables: frozenset[str],
) -> Problem:
    """The problem with pooled `tables`, within all the memory that there is."""
    fetched = relayed(topology, usual.fetch == "distinct")
    ranks = unplaced(profile, fetched, usual.training, tables)
    found = make_problem(profile, ranks, usual, asked, by_table=True)
    return _within_all_memory(found, topology, asked)


def _within_all_memory(problem: Problem, topology: Topology, asked: PlanSettings) -> Problem:
    if not by_devices(topology, asked):
        return problem
    limits = DeviceLimits.of(problem)
    return limits.beside_most_replicas(limits.most_extra)


def cheaper_pooled(
    profile: Profile,
    topology: Topology,
    usual: Workload,
    asked: PlanSettings,
    able: frozenset[str],
) -> frozenset[str]:
    """The tables of those that are `able` that are best pooled, where others are fetched as is
    usual."""

    def problem(tables: frozenset[str]) -> Problem:
        return unplaced_problem(profile, topology, usual, asked, tables)

    saved = table_seconds(problem(frozenset())) - table_seconds(problem(able))
    order = [t for t in np.argsort(-saved, kind="stable").tolist() if _name(profile, t) in able]
    paying = sum(bool(saved[t] > 0) for t in order)

    def first(count: int) -> frozenset[str]:
        return frozenset(_name(profile, t) for t in order[:count])

    if not usual.training:
        return first(paying)
    steps = [0, *(sign * 2**power for power in range(_TRIED) for sign in (1, -1))]
    counts = {paying + step for step in steps if 0 < paying + step < len(order)}
    return first(min(sorted(counts), key=lambda n: estimated_seconds(problem(first(n))), default=0))


def _name(profile: Profile, table: int) -> str:
    return profile.tables[table].name


def table_seconds(problem: Problem) -> Floats:
    """What each table takes of the mean rank with its best copies, [T], where each lies on one
    node."""
    lengths = problem.profile.bag_lengths
    assert lengths is not None
    return choose_copies(problem, lengths, problem.budget_bytes).table_seconds
