"""Placements in which each table is pooled, or fetched as usual, whichever is shorter.

In: `Profile`, `Topology`, `Workload`, `PlanSettings`. Out: `Planned`. Three placements may be made,
with no table pooled, with all, and with some. A placement with pooled tables is taken if it makes
the step shorter by POOLED_GAIN, latency included, for the expected reads and also if reads go to
unread rows. It is not made if drafts for even ranks leave no hope of that.

The cost of a table is the mean over ranks with the best copies of its rows (pooled_copies.py,
pooled_bound.py). Tables share nothing but the memory for copies, so pooling saves an amount of each
table, and tables come in the order of these savings. In inference all tables with a saving are
pooled. In training a few pooled tables make nodes uneven, and more of them make nodes even again,
so fewer and more tables are tried as well, by drafts. Tables without pooling are never pooled.

Both ways of fetching have one price: a byte on a link, or from a memory, costs the same. Of a
pooled table a link passes every access in a node and the vectors between nodes, and of a distinct
one each row once a batch; memories give each row that a rank touches once, because caches have the
repeats.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from oper.base.arrays import Floats
from oper.base.defaults import POOLED_GAIN
from oper.base.formatting import plural
from oper.cost.vectors_per_bag import pooled_names
from oper.cost.workload import Workload
from oper.plan.settings import PlanSettings
from oper.planner.class_placement.pooled_copies import choose_copies
from oper.planner.device_limits import DeviceLimits
from oper.planner.least_memory import by_devices, place_in_memory
from oper.planner.make_placement import Planned
from oper.planner.place_pooled import (
    check_all_poolable,
    check_transport,
    copies_everything,
    draft_step_seconds,
    known_lengths,
    place_pooled,
    predicted_seconds,
    unplaced,
)
from oper.planner.problem.problem import Problem, make_problem
from oper.planner.unread_reads import UNREAD_SHARE, reading_unread, unread_step_seconds
from oper.profiling.profile import Profile
from oper.topology.nearly_alike import as_alike
from oper.topology.relays import relayed
from oper.topology.topology import Topology
from oper.topology.transports import NVSHMEM

# Share of the reads that may go to rows that the log never read, if its windows did not measure it:
# that of a news log from one day to the next (docs/design/copies-of-unread-rows.md).
_UNMEASURED_SHARE = 0.8
# A plan with pooled tables is made if its draft is less than so many times as long as the plan
# without them. Of 215 drafts (four tables, bags of 5 to 60, four clusters; 2026-11-28) six were
# more than 1.1 times as long as their plans, the most 1.35; none of these plans would be taken.
_DRAFT = 1.1
# Powers of two by which more or fewer tables are tried than pay. With 4 powers the drafts of 5 of
# 32 choices among 26 tables were shorter, by up to 4.7 %, for 1.5 times the processor time
# (2026-11-28).
_TRIED = 2


def place_by_table(
    profile: Profile,
    topology: Topology,
    workload: Workload,
    asked: PlanSettings,
    report: Callable[[str], None] = lambda step: None,
) -> Planned:
    """Plan for all rows of `profile`; `report` is called with the name of each step as it begins.

    Raises OperError if the profile does not know the lengths of bags, or the ranks cannot hold the
    tables.
    """
    usual = usual_way(topology, workload)
    if not _may_have_sums(profile, topology):
        return usual.place(profile, topology, asked, report)
    unpooled = usual.place(profile, topology, asked, partial(_report_step, report, usual))
    share = _unread_share(profile)
    steps = Steps.of(unpooled, share)
    drafts = Drafts(profile, topology, asked)
    placements = [
        way.place(profile, topology, asked, partial(_report_step, report, way))
        for way in _ways_by_table(workload, drafts)
        # If nothing travels, a placement takes less time than its draft.
        if way.pooled and (copies_everything(unpooled) or may_gain(way, drafts, steps, share))
    ]
    gaining = [each for each in placements if Steps.of(each, share).gain_over(steps) >= POOLED_GAIN]
    # The first of equals pools the fewest tables.
    best = min(gaining, key=predicted_seconds, default=unpooled)
    return replace(best, unpooled_step_seconds=steps.predicted)


def chooses_by_table(
    profile: Profile, topology: Topology, workload: Workload, asked: PlanSettings
) -> bool:
    """Return whether tables are pooled if that is shorter: with fetch auto; and by default on equal
    ranks of several nodes whose transport has pooled tables, if the profile knows how long bags
    are."""
    if workload.fetch is not None or topology.nodes == 1:
        return workload.on(topology.nodes).fetch == "auto"
    able = topology.transport != NVSHMEM and by_mean(as_alike(topology), asked)
    return able and profile.bag_lengths is not None and bool(poolable(profile))


class Steps(NamedTuple):
    """Predicted step of a placement, and its step if a share of the reads goes to rows that the log
    never read, in seconds.

    A bag of a pooled table takes a whole vector for the first row without a copy, while rows that
    are fetched cost one by one: so plans with pooled tables suffer more from such reads.
    """

    predicted: float
    with_unread: float

    @staticmethod
    def of(planned: Planned, unread_share: float) -> "Steps":
        predicted = predicted_seconds(planned)
        return Steps(predicted, unread_step_seconds(planned, unread_share) or predicted)

    def gain_over(self, other: "Steps") -> float:
        """Return the share by which these steps are shorter than others, the smaller of both."""
        pairs = zip(self, other, strict=True)
        return min(1 - seconds / theirs if theirs else 0.0 for seconds, theirs in pairs)


def _may_have_sums(profile: Profile, topology: Topology) -> bool:
    """Return whether `auto` considers pooled tables: some table can be pooled, ranks do not read
    the rows of other nodes each for itself (NVSHMEM), and some bag has several ids. Sums of one row
    save no bytes, and the few exchanges that they save made no step shorter in the simulator."""
    if topology.transport == NVSHMEM or not poolable(profile):
        return False
    return bool(known_lengths(profile).length.max(initial=0) > 1)


def _unread_share(profile: Profile) -> float:
    """Return the share of reads that go to unread rows in the second judgement of plans, after that
    by expected reads."""
    turnover = profile.turnover
    measured = turnover is not None and bool(turnover.measured.all())
    return UNREAD_SHARE if measured else _UNMEASURED_SHARE


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
        arguments = (profile, topology, self.workload, asked, report)
        if not self.pooled:
            return place_in_memory(*arguments)
        return place_pooled(*arguments, None if self.workload.fetch == "pooled" else self.pooled)

    def problem(
        self, profile: Profile, topology: Topology, asked: PlanSettings, by_table: bool
    ) -> Problem:
        """Return the problem in which placements are made and priced, within all available memory.
        `by_table` is as for `make_problem`, and always holds if tables are pooled."""
        if self.pooled:
            return Drafts(profile, topology, asked).problem(self)
        problem = make_problem(profile, topology, self.workload, asked, by_table=by_table)
        return _within_all_memory(problem, topology, asked)


def ways_to_fetch(
    profile: Profile, topology: Topology, workload: Workload, asked: PlanSettings
) -> list[Way]:
    """Return the ways to fetch tables that a workload leaves open, fewest pooled tables first: one,
    or those that `auto` tries.

    Raises OperError if tables cannot be pooled as asked.
    """
    if chooses_by_table(profile, topology, workload, asked):
        return _ways_by_table(workload, Drafts(profile, topology, asked))
    workload = workload.on(topology.nodes)
    if workload.fetch != "pooled":
        return [Way(frozenset(), workload)]
    check_transport(topology)
    check_all_poolable(profile)
    known_lengths(profile)
    return [Way(poolable(profile), workload)]


def usual_way(topology: Topology, workload: Workload) -> Way:
    """Return the usual way to fetch tables on the topology, in which none is pooled."""
    return Way(frozenset(), workload.unpooled(topology.nodes))


class Drafts:
    """Problems of ways to fetch tables within all the memory that there is, and the drafts of their
    steps; each is made once."""

    def __init__(self, profile: Profile, topology: Topology, asked: PlanSettings) -> None:
        self.profile, self.topology, self.asked = profile, topology, asked
        self.problem = cache(self._problem)
        self.step_seconds = cache(self._step_seconds)

    def _problem(self, way: Way) -> Problem:
        """Return the problem of a way before any row is placed."""
        usual = way.workload
        fetched = relayed(self.topology, usual.fetch == "distinct")
        ranks = unplaced(self.profile, fetched, usual.training, way.pooled)
        problem = make_problem(self.profile, ranks, usual, self.asked, by_table=True)
        return _within_all_memory(problem, self.topology, self.asked)

    def _step_seconds(self, way: Way) -> float:
        """Return the step of the draft for even ranks."""
        return draft_step_seconds(self.problem(way))


def _ways_by_table(workload: Workload, drafts: Drafts) -> list[Way]:
    """Return the ways that `auto` tries, those with fewest pooled tables first."""
    profile, topology, asked = drafts.profile, drafts.topology, drafts.asked
    ways = [usual_way(topology, workload)]
    if not _may_have_sums(profile, topology):
        return ways
    usual, able = ways[0].workload, poolable(profile)
    mixes = may_mix(topology, usual, asked)
    if len(able) > 1 and mixes and by_mean(topology, asked):
        chosen = cheaper_pooled(usual, able, drafts)
        if chosen and chosen != able:
            ways.append(Way(chosen, usual))
    if able == {table.name for table in profile.tables}:
        ways.append(Way(able, replace(workload, fetch="pooled")))
    elif mixes:
        ways.append(Way(able, usual))
    return ways


def _report_step(report: Callable[[str], None], way: Way, step: str) -> None:
    tables = plural(len(way.pooled), "table") if way.pooled else "no table"
    report(f"{tables} pooled, {step}")


def by_mean(topology: Topology, asked: PlanSettings) -> bool:
    """Return whether the mean of T over ranks decides, so that copies are chosen by table."""
    return topology.homogeneous and asked.balance == "time"


def may_mix(topology: Topology, usual: Workload, asked: PlanSettings) -> bool:
    """Return True if a plan may pool some tables and not others: in inference only on equal ranks
    with equal memory, because the linear programme for others has one cost for a byte of any
    row."""
    memory = topology.memory_for_plans if by_devices(topology, asked) else None
    return usual.training or (topology.homogeneous and len(set(memory or ())) <= 1)


@dataclass(frozen=True)
class FetchChoice:
    """Outcome of `auto`: the number of a model's `tables` that are pooled, the `share` by which the
    step is shorter than the best without pooled tables, and that step in seconds."""

    share: float
    pooled_tables: int
    tables: int
    unpooled_step_seconds: float

    @staticmethod
    def of(planned: Planned) -> "FetchChoice | None":
        """Return the choice that a placement is the outcome of; None if there was none."""
        seconds, tables = planned.unpooled_step_seconds, planned.problem.profile.tables
        if seconds is None:
            return None
        pooled = len(pooled_names(planned.problem.topology, tables))
        share = 1 - predicted_seconds(planned) / seconds if pooled and seconds else 0.0
        return FetchChoice(share, pooled, len(tables), seconds)


def may_gain(way: Way, drafts: Drafts, steps: Steps, unread_share: float) -> bool:
    """Return whether a way to fetch tables may be shorter than the one without pooled tables, whose
    steps are given, by drafts for even ranks."""
    if not by_mean(drafts.topology, drafts.asked):
        return True
    if drafts.step_seconds(way) >= steps.predicted * _DRAFT:
        return False
    supposed = reading_unread(drafts.problem(way), unread_share)
    seconds = drafts.step_seconds(way) if supposed is None else draft_step_seconds(supposed)
    return seconds < steps.with_unread * _DRAFT


def poolable(profile: Profile) -> frozenset[str]:
    """Return the tables whose bags can be added up, by name."""
    return frozenset(table.name for table in profile.tables if table.pooling != "none")


def _within_all_memory(problem: Problem, topology: Topology, asked: PlanSettings) -> Problem:
    if not by_devices(topology, asked):
        return problem
    limits = DeviceLimits.of(problem)
    return limits.beside_most_replicas(limits.most_extra)


def cheaper_pooled(usual: Workload, able: frozenset[str], drafts: Drafts) -> frozenset[str]:
    """Return the tables, of those that are `able`, to pool if the others are fetched as is
    usual."""
    names = [table.name for table in drafts.profile.tables]
    unpooled, pooled = (
        table_seconds(drafts.problem(Way(tables, usual))) for tables in (frozenset[str](), able)
    )
    saved = unpooled - pooled
    order = [t for t in np.argsort(-saved, kind="stable").tolist() if names[t] in able]
    paying = sum(bool(saved[t] > 0) for t in order)

    def first(count: int) -> frozenset[str]:
        return frozenset(names[t] for t in order[:count])

    if not usual.training:
        return first(paying)
    steps = [0, *(sign * 2**power for power in range(_TRIED) for sign in (1, -1))]
    counts = {paying + step for step in steps if 0 < paying + step < len(order)}
    ways = [Way(first(count), usual) for count in sorted(counts)]
    return min(ways, key=drafts.step_seconds).pooled if ways else first(0)


def table_seconds(problem: Problem) -> Floats:
    """Return the mean rank's seconds of each table with its best copies, [T], if each lies on one
    node."""
    lengths = problem.profile.bag_lengths
    assert lengths is not None
    return choose_copies(problem, lengths, problem.budget_bytes).table_seconds
