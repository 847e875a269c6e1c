"""Drift: predicted step of a plan under newer counts, and whether to replace the plan.

In: `Plan`, a newer `Profile`. Out: `Drift`. The verdict is a judgement (judge.py): predicted steps
of the plan, of the plan with the moves that pay, and of one from scratch, on data that none of them
was made from if the newer data can be split in time. The rest of a drift says why: the places of
the plan's rows, counted class by class (row_locator.py), compared with those of the plan from
scratch on the same data.

Data with too few accesses to tell drift from chance (enough_accesses.py) are priced, and the advice
is to keep the plan. Such windows have no costs, and no plan made from one is the measure of the
next.

Transfer time T is linear in rows but for the latency of the AllReduce, so that each table has its
part in it (§3.2). The part of a table in the slowest rank's T says which tables slow it down; its
part in the mean T, compared with the plan from scratch, says where the placement is out of date.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

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
from oper.planner.price_plan import PricedPlan, rank_seconds
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem
from oper.planner.replan.check_tables import check_tables
from oper.planner.replan.judge import JudgingData, judge
from oper.planner.replan.judgement import Choice, Judgement
from oper.planner.replan.replan import plan_again
from oper.profiling.profile import Profile, profile_given
from oper.profiling.unknown_values import UnknownValues, tell_unknown_values

# Share of a table's accesses to unknown values above which its vocabulary is out of date: a choice.
OUTDATED = 0.1


@dataclass(frozen=True)
class TableDrift:
    """A table's part of the transfer time, in seconds."""

    DERIVED: ClassVar = ("worse_seconds",)  # in JSON in addition to the fields

    table: str
    slowest_rank_seconds: float  # of the slowest rank's T
    mean_seconds: float  # of the mean T over ranks
    fresh_mean_seconds: float  # the same in a plan made from scratch
    lookups_dob: float  # min/max over ranks of its lookups

    @property
    def worse_seconds(self) -> float:
        """Mean cost per rank of the table's outdated placement, in seconds."""
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
class RankSeconds:
    """Transfer time of each rank in seconds: when the plan was made, now, and in a plan from
    scratch."""

    then: PerRank
    now: PerRank
    fresh: PerRank


@dataclass(frozen=True)
class VocabularyDrift:
    """Share of a table's accesses to values that the plan's vocabulary does not know. They all read
    row 0, whatever the plan."""

    table: str
    unknown_share: float


@dataclass(frozen=True)
class Drift(Summarised):
    """A plan under newer counts.

    judgement: steps of the plan and of its possible replacements, and the advice.
    made_step_seconds: step when the plan was made; None if the plan does not state it.
    vocabularies: tables whose newer data have values that the plan's vocabulary does not know, most
    first. The other fields say why
    the plan is slower: `rank_seconds` and `tables` are transfer times, on the judging data.
    """

    DERIVED: ClassVar = ("advice", "verdict")  # in JSON in addition to the fields

    judgement: Judgement
    made_step_seconds: float | None
    rank_seconds: RankSeconds
    hot_set: HotSets
    tables: tuple[TableDrift, ...]
    vocabularies: tuple[VocabularyDrift, ...] = ()

    @property
    def advice(self) -> str:
        """The choice that pays best, by `Choice`; keeping the plan if none pays, and counting the
        log anew if a vocabulary is out of date."""
        return Choice.RECOUNT.value if self.outdated_vocabularies else self.judgement.advice

    @property
    def verdict(self) -> Literal["keep", "replan"]:
        """Advice reduced to "keep" or "replan"."""
        return "keep" if self.advice == Choice.KEEP else "replan"

    @property
    def outdated_vocabularies(self) -> tuple[VocabularyDrift, ...]:
        """The tables of which more accesses than `OUTDATED` are to unknown values."""
        return tuple(each for each in self.vocabularies if each.unknown_share > OUTDATED)

    @property
    def worse(self) -> float:
        """The share by which the plan's step is longer than that of the best other candidate."""
        return self.judgement.worse

    @property
    def threshold(self) -> float:
        """The share of a step that another plan must save."""
        return self.judgement.threshold

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `oper drift --json`, without the names of the plan and the
        profile."""
        content: dict[str, Any] = to_json(self)
        return content

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "Drift":
        """Read back the output of `oper drift --json`; ValueError if it is invalid."""
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
        """True if the window's counts are too few to tell drift from chance."""
        return self.drift.judgement.too_small

    @property
    def cost_seconds(self) -> float:
        """The seconds that all steps of the window take longer with the plan than with the best
        other candidate."""
        return self.iterations * self.drift.judgement.gain_seconds

    def to_json(self) -> dict[str, Any]:
        """Return one of the windows of `oper drift --all-windows --json`."""
        fields = {
            "samples": self.samples,
            "accesses": self.accesses,
            "too_small": self.too_small,
            "iterations": self.iterations,
            "cost_seconds": self.cost_seconds,
        }
        return fields | self.drift.to_json()


@dataclass(frozen=True)
class _WindowLength:
    """The fields of a window in a file that are not its drift's."""

    samples: int
    accesses: int
    iterations: float


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
        """Verdict "replan" if any window that is large enough to tell has it, else "keep"."""
        verdicts = {window.drift.verdict for window in self.judged.values()}
        return "replan" if "replan" in verdicts else "keep"

    @property
    def threshold(self) -> float:
        """Tolerated excess in every window, as a share."""
        return self.windows[0].drift.threshold

    @property
    def cost_seconds(self) -> float:
        """Total cost of not re-planning, in all windows that are large enough to tell."""
        return float(np.sum([window.cost_seconds for window in self.judged.values()]))

    @property
    def cost_share(self) -> float:
        """`cost_seconds` as a share of the time with the best other candidate in each window."""
        judged = self.judged.values()
        best = sum(w.iterations * w.drift.judgement.best.step_seconds for w in judged)
        return self.cost_seconds / best if best > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields of `oper drift --all-windows --json`, without the names of plan and
        profile."""
        return {
            "verdict": self.verdict,
            "cost_seconds": self.cost_seconds,
            "cost_share": self.cost_share,
            "windows": [window.to_json() for window in self.windows],
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "WindowDrift":
        """Read back the output of `oper drift --all-windows --json`; ValueError if it is
        invalid."""
        windows = content.get("windows")
        if not isinstance(windows, list) or not windows:
            raise ValueError("KeyError: 'windows'")
        read = [(Drift.from_json(each), typed(each, _WindowLength, 1)) for each in windows]
        return WindowDrift(
            tuple(
                Window(drift, length.samples, length.accesses, length.iterations)
                for drift, length in read
            )
        )


def drift_by_window(
    plan: Plan | Path | str,
    windows: Sequence[Profile] | Path | str,
    threshold: float = WORSE,
    report: Callable[[str], None] = lambda step: None,
) -> WindowDrift:
    """Price a plan under the counts of each window of a log: of a folder, or as
    `Profile.load_windows` reads them.

    Arguments and errors are those of `drift`. A window that does not know the one before it is
    preceded by the last of these windows that is large enough.
    """
    plan = plan_given("drift_by_window", "plan", plan)
    threshold = finite_number(threshold, "threshold")
    if isinstance(windows, Path | str):
        windows = Profile.load_windows(windows)
    judged: list[Window] = []
    unknown = UnknownValues()
    before: Profile | None = None  # the window before that is large enough
    for window in windows:
        check_tables(plan, window)
        unknown.add(window)
        under = _drift(plan, window, before, threshold, report)
        iterations = window.samples / plan.workload.batch_size
        judged.append(Window(under, window.samples, window.total_accesses, iterations))
        for read in filter(None, (window, window.preceding, before)):
            read.release()  # so that the memory is that of few windows' counters
        if not judged[-1].too_small:
            before = window
    unknown.tell()
    return WindowDrift(tuple(judged))


def drift(
    plan: Plan | Path | str,
    profile: Profile | Path | str,
    threshold: float = WORSE,
    report: Callable[[str], None] = lambda step: None,
) -> Drift:
    """Judge a plan and its possible replacements by the counts of `profile` (judge.py).

    Plan and profile may be given by their folders. The verdict is "replan" if another plan pays:
    its step is shorter by more than the share `threshold`, and saves more within 10,000 steps than
    its moves take. It is "keep" if the profile has too few accesses to tell drift from chance.
    `report` is called with the name of each part of the work as it begins.

    Raises OperError if plan and profile are of different tables.
    """
    plan, profile = plan_given("drift", "plan", plan), profile_given("drift", profile)
    threshold = finite_number(threshold, "threshold")
    check_tables(plan, profile)
    tell_unknown_values(profile)
    return _drift(plan, profile, None, threshold, report)


def _drift(
    plan: Plan,
    profile: Profile,
    before: Profile | None,
    threshold: float,
    report: Callable[[str], None],
) -> Drift:
    """Judge a plan by a profile; `before` is the window that precedes it, if that is known."""
    report("other plans for the newer data")
    data = JudgingData.of(plan.profile, plan.ranks, profile, before)
    made = plan_again(plan, data.made_from)
    report("all plans on data that none has seen")
    judged = judge(plan, made, data, threshold)
    rank_now, rank_fresh = (
        rank_seconds([each.cost for each in priced]) for priced in (judged.now, judged.fresh)
    )
    slowest = int(rank_now.argmax())
    numbers = [memory.tables for memory in plan.memories if memory.tables]
    tables: dict[int, TableDrift] = {}
    for problem, now, fresh, of_part in zip(
        judged.problems, judged.now, judged.fresh, numbers, strict=True
    ):
        in_parts = zip(_parts(problem, now), _parts(problem, fresh), strict=True)
        for number, (part, fresh_part) in zip(of_part, in_parts, strict=True):
            tables[number] = TableDrift(
                plan.tables[number].name,
                float(part.rank_seconds[slowest]),
                float(part.rank_seconds.mean()),
                float(fresh_part.rank_seconds.mean()),
                degree_of_balance(part.lookups),
            )
    total = int(plan.owner_accesses.sum()) + plan.replica_accesses
    classes = [problem.classes for problem in judged.problems]
    listed = [now.counted[:, : len(now.holder_sets)] for now in judged.now]
    return Drift(
        judgement=judged.judgement,
        made_step_seconds=None if plan.step_time is None else plan.step_time.seconds,
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
        vocabularies=_vocabularies(profile),
    )


def _vocabularies(profile: Profile) -> tuple[VocabularyDrift, ...]:
    """Return the tables with accesses to unknown values, those with most first.

    Tables whose vocabulary leaves out rare values are not among them: with --min-count 5 these had
    over 10 % of the accesses in 9 of 26 columns of Criteo-Kaggle on the vocabulary's own data.
    """
    complete = {table.name for table in profile.tables if table.ids.min_count == 1}
    accesses = dict(
        zip((t.name for t in profile.tables), profile.accesses_of_tables.tolist(), strict=True)
    )
    drifts = [
        VocabularyDrift(table, unknown / accesses[table])
        for table, unknown in profile.unknown_accesses.items()
        if table in complete
    ]
    return tuple(sorted(drifts, key=lambda table_drift: -table_drift.unknown_share))


def _parts(problem: ClassProblem, plan: PricedPlan) -> list[Cost]:
    """Return each table's part of a plan's cost, by the AllReduce of the whole, latencies left
    out."""
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
    """Return the shares of a set in which the plan has `rows` [C] of each class, for the classes of
    one memory or of both; `then` is the share when the plan was made."""
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
