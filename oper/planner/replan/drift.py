"""Drift: what a plan costs under newer counts, and whether to plan again.

In: `Plan`, a newer `Profile`. Out: `Drift`. The plan's rows are counted where they are, class by
class of the new counts (row_locator.py), and priced as if the plan had been made for them. This is
compared with the cost when the plan was made, and with that of a plan made from scratch for the new
counts. Judged on the data that it was made from, a plan from scratch is better than it will be in
use. So the verdict is that of data which neither plan was made from, where there are such: of this
window beside a plan made from the one before, or of the data that follow beside a plan made from
these. It is "replan" where the plan is worse there by more than a threshold.

Of several windows those with too few accesses to tell drift from chance (enough_accesses.py) are
priced, but no verdict and no costs are theirs, nor is a plan made from one the measure of the next.

T is linear in rows but for the latency of the AllReduce, so that each table has its part in it
(§3.2). What a table adds to the slowest rank's T says which tables slow it down; what it adds to
the mean T, compared with the plan from scratch, says where the placement is out of date.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from oper.base.arrays import Ints, PerRank
from oper.base.defaults import WORSE
from oper.base.display import Summarised
from oper.base.portable_math import whole_dot
from oper.base.units import finite_number
from oper.cost.allreduce import NodeCopiesCost, allreduce_cost
from oper.cost.objective import Cost, degree_of_balance, evaluate
from oper.plan.plan import Plan, plan_given
from oper.plan.plan_file import to_json, typed
from oper.plan.plan_parts import plans_of_memories
from oper.plan.reference_figures import HeldOutSource
from oper.plan.row_locator import RowLocator
from oper.planner.assemble_plan import assemble
from oper.planner.enough_accesses import is_too_small, warn_if_too_small
from oper.planner.place_together import place_memories
from oper.planner.price_plan import (
    PricedPlan,
    costs_under,
    price_tables,
    problems_of_memories,
    rank_seconds,
)
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem, Problem
from oper.planner.reference_figures import later_data, later_profile
from oper.planner.replan.check_tables import check_tables
from oper.profiling.profile import Profile, profile_given
from oper.profiling.unknown_values import UnknownValues, tell_unknown_values


@dataclass(frozen=True)
class TableDrift:
    """A table's part of T, in seconds."""

    DERIVED: ClassVar = ("worse_seconds",)  # in JSON beside the fields

    table: str
    slowest_rank_seconds: float  # of the slowest rank's T
    mean_seconds: float  # of the mean T over ranks
    fresh_mean_seconds: float  # the same in a plan made from scratch
    lookups_dob: float  # min/max over ranks of its lookups

    @property
    def worse_seconds(self) -> float:
        """What its placement, being out of date, costs a rank on average."""
        return self.mean_seconds - self.fresh_mean_seconds


@dataclass(frozen=True)
class HotSet:
    """Shares of all accesses that go to `rows` rows: those of the plan when it was made and now,
    and as many of the rows that are the hottest now."""

    rows: int
    then: float
    now: float
    hottest_now: float


@dataclass(frozen=True)
class HotSets:
    """The rows that the plan lists one by one, and those among them with copies."""

    listed: HotSet
    replicated: HotSet


@dataclass(frozen=True)
class Objective:
    """Seconds of the slowest rank: when the plan was made, now, and in a plan from scratch."""

    then: float
    now: float
    fresh: float


@dataclass(frozen=True)
class RankSeconds:
    """Seconds of each rank: when the plan was made, now, and in a plan from scratch."""

    then: PerRank
    now: PerRank
    fresh: PerRank


class NowAndFresh(NamedTuple):
    """Seconds of the slowest rank, of a plan and of one from scratch."""

    now: float
    fresh: float


@dataclass(frozen=True)
class UnseenDrift:
    """A plan beside one made from scratch, on data that neither was made from.

    source: which data. worse: as in `Drift`. now_seconds, fresh_seconds: of the slowest rank.
    """

    source: HeldOutSource
    samples: int
    worse: float
    now_seconds: float
    fresh_seconds: float


@dataclass(frozen=True)
class Drift(Summarised):
    """A plan under newer counts.

    worse: than a plan from scratch for these very counts, as a share, in what the plan was made to
    keep small, which is the time of the slowest rank or of the busiest link. threshold: what is
    tolerated of it. unseen: on data that neither plan was made from; None where there are none.
    """

    DERIVED: ClassVar = ("verdict", "judged_worse")  # in JSON beside the fields

    worse: float
    threshold: float
    unseen: UnseenDrift | None
    objective_seconds: Objective
    rank_seconds: RankSeconds
    hot_set: HotSets
    tables: tuple[TableDrift, ...]

    @property
    def verdict(self) -> Literal["keep", "replan"]:
        """Whether the plan is worse than a fresh one by more than the threshold."""
        return "replan" if self.judged_worse > self.threshold else "keep"

    @property
    def judged_worse(self) -> float:
        """By how much it is worse on data that neither plan was made from, or, where there are
        none, on those that the fresh one was made from."""
        return self.worse if self.unseen is None else self.unseen.worse

    @property
    def judged_seconds(self) -> "NowAndFresh":
        """The objectives on the data that `judged_worse` is of."""
        if self.unseen is None:
            return NowAndFresh(self.objective_seconds.now, self.objective_seconds.fresh)
        return NowAndFresh(self.unseen.now_seconds, self.unseen.fresh_seconds)

    def to_json(self) -> dict[str, Any]:
        """The fields of `oper drift --json`, but those that name the plan and the profile."""
        content: dict[str, Any] = to_json(self)
        return content

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Drift":
        """What `oper drift --json` printed read back; ValueError where it is none."""
        try:
            ranks = len(content["rank_seconds"]["now"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return typed(content, Drift, ranks)


@dataclass(frozen=True)
class Window:
    """A plan under the counts of one window of a log."""

    drift: Drift
    samples: int
    accesses: int
    iterations: float  # of full batches: they may be a fraction

    @property
    def too_small(self) -> bool:
        """Whether its counts are too few to tell drift from chance."""
        return is_too_small(self.accesses, len(self.drift.rank_seconds.now))

    @property
    def cost_seconds(self) -> float:
        """What all iterations of the window took longer than with a plan from scratch, made from
        the window before it where there is one."""
        return self.iterations * (self.drift.judged_seconds.now - self.drift.judged_seconds.fresh)

    def to_json(self) -> dict[str, Any]:
        """One of the windows of `oper drift --all-windows --json`."""
        own = {
            "samples": self.samples,
            "accesses": self.accesses,
            "too_small": self.too_small,
            "iterations": self.iterations,
            "cost_seconds": self.cost_seconds,
        }
        return own | self.drift.to_json()


@dataclass(frozen=True)
class _WindowLength:
    """The fields of a window in a file that are not its drift's."""

    samples: int
    accesses: int
    iterations: float


def _accesses(profile: Profile) -> int:
    return int(profile.accesses_of_tables.sum())


@dataclass(frozen=True)
class WindowDrift(Summarised):
    """A plan under the counts of each window of a log, in order."""

    windows: tuple[Window, ...]

    @property
    def judged(self) -> dict[int, Window]:
        """The windows that are large enough to tell drift, by their numbers."""
        return {n: window for n, window in enumerate(self.windows) if not window.too_small}

    @property
    def verdict(self) -> Literal["keep", "replan"]:
        """Whether to replan in any window that is large enough to tell."""
        verdicts = {window.drift.verdict for window in self.judged.values()}
        return "replan" if "replan" in verdicts else "keep"

    @property
    def threshold(self) -> float:
        """What is tolerated in every window, as a share."""
        return self.windows[0].drift.threshold

    @property
    def cost_seconds(self) -> float:
        """What not re-planning costs in all windows that are large enough to tell."""
        return float(np.sum([window.cost_seconds for window in self.judged.values()]))

    @property
    def cost_share(self) -> float:
        """The same, as a share of the time with a plan made for each window."""
        fresh = sum(w.iterations * w.drift.judged_seconds.fresh for w in self.judged.values())
        return self.cost_seconds / fresh if fresh > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """The fields of `oper drift --all-windows --json`, but those that name plan and profile."""
        return {
            "verdict": self.verdict,
            "cost_seconds": self.cost_seconds,
            "cost_share": self.cost_share,
            "windows": [window.to_json() for window in self.windows],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "WindowDrift":
        """What `oper drift --all-windows --json` printed read back; ValueError where it is none."""
        windows = content.get("windows")
        if not isinstance(windows, list) or not windows:
            raise ValueError("KeyError: 'windows'")
        found = [(Drift.from_json(each), typed(each, _WindowLength, 1)) for each in windows]
        return WindowDrift(
            tuple(Window(drift, own.samples, own.accesses, own.iterations) for drift, own in found)
        )


def drift_by_window(
    plan: Plan | Path | str,
    windows: Sequence[Profile] | Path | str,
    threshold: float = WORSE,
    report: Callable[[str], None] = lambda step: None,
) -> WindowDrift:
    """Price a plan under the counts of each window of a log: of a folder, or as
    `Profile.load_windows` reads them.

    Arguments and errors are those of `drift`.
    """
    plan = plan_given("drift_by_window", "plan", plan)
    threshold = finite_number(threshold, "threshold")
    if isinstance(windows, Path | str):
        windows = Profile.load_windows(windows)
    found: list[Window] = []
    unknown = UnknownValues()
    # The parts of a plan from scratch for the window before that is large enough.
    before: list[Plan] | None = None
    for window in windows:
        check_tables(plan, window)
        unknown.add(window)
        measured = _measure_parts(plan, window, report)
        unseen = None
        if before is not None and window.digest != plan.profile:
            unseen = _in_this_window(plan, window, before)
        elif window.holds_out:
            unseen = _unseen(plan, window, measured)
        under = _drift(plan, measured, threshold, unseen)
        iterations = window.samples / plan.workload.batch_size
        found.append(Window(under, window.samples, _accesses(window), iterations))
        if not found[-1].too_small:
            before = [each.fresh_plan for each in measured]
        window.release()  # so that the memory is that of one window's counters
    unknown.tell()
    return WindowDrift(tuple(found))


def drift(
    plan: Plan | Path | str,
    profile: Profile | Path | str,
    threshold: float = WORSE,
    report: Callable[[str], None] = lambda step: None,
) -> Drift:
    """Price a plan under the counts of `profile`, beside a plan made from scratch for them.

    Plan and profile may be given by their folders. The verdict is "replan" where the plan from
    scratch is better by more than the share `threshold`. `report` is called with the name of each
    step as it begins.

    Raises OperError where plan and profile are of different tables; an OperWarning says where the
    profile has too few accesses to tell drift from chance.
    """
    plan, profile = plan_given("drift", "plan", plan), profile_given("drift", profile)
    threshold = finite_number(threshold, "threshold")
    check_tables(plan, profile)
    tell_unknown_values(profile)
    warn_if_too_small(profile, plan.ranks, "the profile's counts")
    measured = _measure_parts(plan, profile, report)
    report("data that neither plan has seen")
    return _drift(plan, measured, threshold, _unseen(plan, profile, measured))


def _drift(
    plan: Plan, measured: "list[_Measured]", threshold: float, unseen: UnseenDrift | None
) -> Drift:
    numbers = [memory.tables for memory in plan.memories if memory.tables]
    now, fresh = ([getattr(each, name).cost for each in measured] for name in ("now", "fresh"))
    rank_now, rank_fresh = rank_seconds(now), rank_seconds(fresh)
    slowest = int(rank_now.argmax())
    tables: dict[int, TableDrift] = {}
    for each, of_part in zip(measured, numbers, strict=True):
        in_parts = zip(
            _parts(each.problem, each.now), _parts(each.problem, each.fresh), strict=True
        )
        for number, (part, fresh_part) in zip(of_part, in_parts, strict=True):
            tables[number] = TableDrift(
                plan.tables[number].name,
                float(part.rank_seconds[slowest]),
                float(part.rank_seconds.mean()),
                float(fresh_part.rank_seconds.mean()),
                degree_of_balance(part.lookups),
            )
    total = int(plan.owner_accesses.sum()) + plan.replica_accesses
    classes = [each.problem.classes for each in measured]
    listed = [each.now.counted[:, : len(each.now.holder_sets)] for each in measured]
    balance = measured[0].problem.asked.balance
    return Drift(
        worse=_worse(balance, now, fresh),
        threshold=threshold,
        unseen=unseen,
        objective_seconds=Objective(
            plan.cost.objective_seconds, float(rank_now.max()), float(rank_fresh.max())
        ),
        rank_seconds=RankSeconds(plan.cost.rank_seconds, rank_now, rank_fresh),
        hot_set=HotSets(
            listed=_hot_set(
                classes,
                [rows.sum(axis=1) for rows in listed],
                plan.counts.total_accesses / max(total, 1),
            ),
            replicated=_hot_set(
                classes,
                [rows[:, plan.ranks :].sum(axis=1) for rows in listed],
                plan.replica_accesses / max(total, 1),
            ),
        ),
        tables=tuple(tables[number] for number in sorted(tables)),
    )


@dataclass(frozen=True)
class _Measured:
    """The rows of one memory under new counts: where the plan has them, and placed from scratch."""

    problem: Problem
    now: PricedPlan
    fresh: PricedPlan
    fresh_plan: Plan


def _measure_parts(plan: Plan, profile: Profile, report: Callable[[str], None]) -> list[_Measured]:
    """Each memory that has tables, by their counts in the profile."""
    report("the plan under the new counts")
    problems = problems_of_memories(plan, profile)
    parts = plans_of_memories(plan)
    finders = [ClassFinder(problem.profile, problem.classes) for problem in problems]
    now = [
        price_tables(problem, RowLocator(part), finder)
        for problem, part, finder in zip(problems, parts, finders, strict=True)
    ]
    report("a plan from scratch")
    fresh = [assemble(placed) for placed in place_memories(problems)[0]]
    return [
        _Measured(problem, old, price_tables(problem, RowLocator(new), finder), new)
        for problem, old, new, finder in zip(problems, now, fresh, finders, strict=True)
    ]


def _unseen(plan: Plan, profile: Profile, measured: list[_Measured]) -> UnseenDrift | None:
    """The plan beside one from scratch on data that neither was made from."""
    earlier, later = profile.preceding, later_profile(profile)
    while earlier is not None and is_too_small(_accesses(earlier), plan.ranks):
        earlier = earlier.preceding
    if later is not None and is_too_small(_accesses(later), plan.ranks):
        if profile.holds_out:
            warn_if_too_small(later, plan.ranks, "the held-out data, which judge nothing,")
        later = None
    if earlier is not None and profile.digest != plan.profile:
        before = place_memories(problems_of_memories(plan, earlier))[0]
        return _in_this_window(plan, profile, [assemble(placed) for placed in before])
    if later is None or later.digest == plan.profile:
        return None
    problems = problems_of_memories(plan, later, as_counted=True)
    now = costs_under(plans_of_memories(plan), problems)
    fresh = costs_under([each.fresh_plan for each in measured], problems)
    return _compared(plan, later_data(profile), later, now, fresh)


def _in_this_window(plan: Plan, window: Profile, before: list[Plan]) -> UnseenDrift:
    """The plan beside one whose parts were made from the window before."""
    problems = problems_of_memories(plan, window, as_counted=True)
    now, fresh = costs_under(plans_of_memories(plan), problems), costs_under(before, problems)
    return _compared(plan, HeldOutSource.THIS_WINDOW, window, now, fresh)


def _compared(
    plan: Plan, source: HeldOutSource, judge: Profile, now: list[Cost], fresh: list[Cost]
) -> UnseenDrift:
    return UnseenDrift(
        source,
        judge.samples,
        _worse(plan.asked.balance, now, fresh),
        float(rank_seconds(now).max()),
        float(rank_seconds(fresh).max()),
    )


def _worse(balance: str, now: list[Cost], fresh: list[Cost]) -> float:
    best = _aimed(balance, fresh)
    return _aimed(balance, now) / best - 1 if best > 0 else 0.0


def _aimed(balance: str, costs: list[Cost]) -> float:
    """What the plan makes small, as `aimed_seconds` of one memory."""
    if balance == "time":
        return float(rank_seconds(costs).max())
    links = np.sum([cost.link_seconds for cost in costs], axis=0)
    return float(np.where(np.eye(len(links)), 0.0, links).max())


def _parts(problem: ClassProblem, plan: PricedPlan) -> list[Cost]:
    """Each table's part of a plan's cost, by the AllReduce of the whole, latencies left out."""
    sets, method = plan.holder_sets, plan.cost.allreduce_method
    latencies = (
        (sets.everywhere, allreduce_cost(problem.topology, method).latency),
        (sets.on_some, NodeCopiesCost.of(problem.topology).latency),
    )
    parts = []
    for sums in plan.table_sums:
        part = evaluate(
            problem.topology, problem.workload, sets, sums, problem.capacity_bytes, method
        )
        if problem.workload.training:
            waits = sum(latency for of, latency in latencies if sums.rows[of].any())
            part = replace(part, rank_seconds=part.rank_seconds - waits)
        parts.append(part)
    return parts


def _hot_set(classes: list[Classes], rows: list[Ints], then: float) -> HotSet:
    """`rows` [C] of each class are in the plan's set, of the classes of one memory or of both."""
    accesses, of_class = (
        np.concatenate([getattr(each, name) for each in classes]) for name in ("accesses", "rows")
    )
    order = np.argsort(-accesses, kind="stable")
    accesses, of_class, in_set = accesses[order], of_class[order], np.concatenate(rows)[order]
    number, total = int(in_set.sum()), max(int(whole_dot(of_class, accesses)), 1)
    before = np.cumsum(of_class) - of_class
    hottest = np.clip(number - before, 0, of_class)
    return HotSet(
        number,
        then,
        float(whole_dot(in_set, accesses)) / total,
        float(whole_dot(hottest, accesses)) / total,
    )
