"""Drift: what a plan costs under newer counts, and whether to plan again.

In: `Plan`, a newer `Profile`. Out: `Drift`. The plan's rows are counted where they are, class by
class of the new counts (row_locator.py), and priced as if the plan had been made for them. This is
compared with the cost when the plan was made, and with that of a plan made from scratch for the new
counts; the verdict is "replan" where the plan is worse than the latter by more than a threshold. T
is linear in rows but for the latency of the AllReduce, so that each table has its part in it
(§3.2). What a table adds to the slowest rank's T says which tables slow it down; what it adds to
the mean T, compared with the plan from scratch, says where the placement is out of date.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from oper.base.arrays import Floats, Ints
from oper.cost.allreduce import allreduce_cost
from oper.cost.holder_set_sums import Sums
from oper.cost.holder_sets import HolderSets
from oper.cost.objective import Cost, degree_of_balance, evaluate
from oper.plan.plan import Plan
from oper.plan.row_locator import RowLocator
from oper.plan.some_tables import plans_of_memories
from oper.planner.assemble_plan import assemble
from oper.planner.make_placement import Watch, place
from oper.planner.problem.class_finder import ClassFinder
from oper.planner.problem.classes import Classes
from oper.planner.problem.problem import ClassProblem, make_problem
from oper.planner.replan.improve_placement import price_counts
from oper.planner.replan.old_plan import check_tables
from oper.profiling.profile import Profile


@dataclass(frozen=True)
class TableDrift:
    """A table's part of T, in seconds."""

    table: str
    slowest_rank_seconds: float  # of the slowest rank's T
    mean_seconds: float  # of the mean T over ranks
    fresh_mean_seconds: float  # the same in a plan made from scratch
    lookups_dob: float  # min/max over ranks of its lookups

    @property
    def worse_seconds(self) -> float:
        """What its placement, being out of date, costs a rank on average."""
        return self.mean_seconds - self.fresh_mean_seconds

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "worse_seconds": self.worse_seconds}


@dataclass(frozen=True)
class HotSet:
    """Shares of all accesses that go to `rows` rows: those of the plan when it was made and now,
    and as many of the rows that are the hottest now."""

    rows: int
    then: float
    now: float
    hottest_now: float


@dataclass(frozen=True)
class Drift:
    """A plan under newer counts. Objectives and vectors over ranks in seconds."""

    then_seconds: float  # when the plan was made
    now_seconds: float
    fresh_seconds: float  # of a plan made from scratch
    rank_then: Floats
    rank_now: Floats
    rank_fresh: Floats
    tables: tuple[TableDrift, ...]
    listed: HotSet
    replicated: HotSet
    worse: float  # than the fresh plan, as a share, in what the plan was made to keep small
    threshold: float

    @property
    def verdict(self) -> Literal["keep", "replan"]:
        """Whether the plan is worse than a fresh one by more than the threshold."""
        return "replan" if self.worse > self.threshold else "keep"

    def to_json(self) -> dict[str, Any]:
        """The fields of `oper drift --json`, but `plan`."""
        return {
            "verdict": self.verdict,
            "worse": self.worse,
            "threshold": self.threshold,
            "objective_seconds": {
                "then": self.then_seconds,
                "now": self.now_seconds,
                "fresh": self.fresh_seconds,
            },
            "rank_seconds": {
                "then": self.rank_then.tolist(),
                "now": self.rank_now.tolist(),
                "fresh": self.rank_fresh.tolist(),
            },
            "hot_set": {"listed": asdict(self.listed), "replicated": asdict(self.replicated)},
            "tables": [table.to_json() for table in self.tables],
        }


@dataclass(frozen=True)
class WindowDrift:
    """A plan under the counts of each window of a log, in order."""

    windows: tuple[Drift, ...]
    samples: tuple[int, ...]
    batch_size: int

    @property
    def iterations(self) -> Floats:
        """Of each window, of full batches: they may be fractions."""
        return np.asarray(np.array(self.samples) / self.batch_size)

    @property
    def cost_seconds(self) -> Floats:
        """What each window took longer than with a plan from scratch for it."""
        worse = [window.now_seconds - window.fresh_seconds for window in self.windows]
        return np.asarray(self.iterations * np.array(worse))

    def to_json(self) -> dict[str, Any]:
        """The fields of `oper drift --all-windows --json`, but `plan` and `profile`."""
        fresh = self.iterations @ np.array([window.fresh_seconds for window in self.windows])
        cost = float(self.cost_seconds.sum())
        verdicts = {window.verdict for window in self.windows}
        figures = zip(
            self.windows,
            self.samples,
            self.iterations.tolist(),
            self.cost_seconds.tolist(),
            strict=True,
        )
        return {
            "verdict": "replan" if "replan" in verdicts else "keep",
            "cost_seconds": cost,
            "cost_share": cost / float(fresh) if fresh > 0 else 0.0,
            "windows": [
                {
                    "samples": samples,
                    "iterations": iterations,
                    "cost_seconds": cost_seconds,
                    **window.to_json(),
                }
                for window, samples, iterations, cost_seconds in figures
            ],
        }


def drift_by_window(
    plan: Plan,
    windows: Sequence[Profile],
    threshold: float,
    report: Callable[[str], None] = lambda step: None,
) -> WindowDrift:
    """`drift` under the counts of each window."""
    found = []
    for window in windows:
        found.append(drift(plan, window, threshold, report))
        window.release()  # so that the memory is that of one window's counters
    return WindowDrift(
        tuple(found), tuple(window.samples for window in windows), plan.workload.batch_size
    )


def drift(
    plan: Plan,
    profile: Profile,
    threshold: float,
    report: Callable[[str], None] = lambda step: None,
) -> Drift:
    """Price a plan under the counts of `profile`, beside a plan made from scratch for them.

    The verdict is "replan" where that is better by more than the share `threshold`.
    Raises OperError where plan and profile are of different tables.
    """
    check_tables(plan, profile)
    parts, numbers = plans_of_memories(plan), [m.tables for m in plan.memories if m.tables]
    measured = [
        _measure(part, profile.select(tables), report)
        for part, tables in zip(parts, numbers, strict=True)
    ]
    now, fresh = ([getattr(each, name).cost for each in measured] for name in ("now", "fresh"))
    rank_now, rank_fresh = _rank_seconds(now), _rank_seconds(fresh)
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
    best = _aimed(balance, fresh)
    return Drift(
        then_seconds=plan.cost.objective_seconds,
        now_seconds=float(rank_now.max()),
        fresh_seconds=float(rank_fresh.max()),
        rank_then=plan.cost.rank_seconds,
        rank_now=rank_now,
        rank_fresh=rank_fresh,
        tables=tuple(tables[number] for number in sorted(tables)),
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
        worse=_aimed(balance, now) / best - 1 if best > 0 else 0.0,
        threshold=threshold,
    )


@dataclass(frozen=True)
class _PricedPlan:
    """A plan's rows under counts: by class and counted column, [C, K + M], and what they cost."""

    holder_sets: HolderSets  # [K]
    counted: Ints
    table_sums: list[Sums]  # [T] of [K] each
    cost: Cost


@dataclass(frozen=True)
class _Measured:
    """The rows of one memory under new counts: where the plan has them, and placed from scratch."""

    problem: ClassProblem
    now: _PricedPlan
    fresh: _PricedPlan


def _measure(plan: Plan, profile: Profile, report: Callable[[str], None]) -> _Measured:
    """Price a plan of one memory under the counts of its tables."""
    report("the plan under the new counts")
    problem = make_problem(profile, plan.topology, plan.workload, plan.asked, plan.limits)
    finder = ClassFinder(profile, problem.classes)
    now = _price_tables(problem, RowLocator(plan), finder)
    report("a plan from scratch")
    fresh = place(problem, Watch(lambda step: None))
    return _Measured(problem, now, _price_tables(problem, RowLocator(assemble(fresh)), finder))


def _rank_seconds(costs: list[Cost]) -> Floats:
    """T of each rank, [M], of one memory or of both."""
    return np.asarray(np.sum([cost.rank_seconds for cost in costs], axis=0))


def _aimed(balance: str, costs: list[Cost]) -> float:
    """What the plan makes small, as `aimed_seconds` of one memory."""
    if balance == "time":
        return float(_rank_seconds(costs).max())
    links = np.sum([cost.link_seconds for cost in costs], axis=0)
    return float(np.where(np.eye(len(links)), 0.0, links).max())


def _price_tables(problem: ClassProblem, locator: RowLocator, finder: ClassFinder) -> _PricedPlan:
    """Count the rows of a plan, table by table, and price them."""
    sets = locator.holder_sets
    counted = np.zeros((finder.classes, len(sets) + locator.ranks), dtype=np.int64)
    table_sums = []
    for table in range(len(locator.layout.rows)):
        of_table = locator.count_table(table, finder)
        counted += of_table
        table_sums.append(problem.classes.sums(locator.by_holder_set(of_table)))
    cost = price_counts(problem, sets, locator.by_holder_set(counted))
    return _PricedPlan(sets, counted, table_sums, cost)


def _parts(problem: ClassProblem, plan: _PricedPlan) -> list[Cost]:
    """Each table's part of a plan's cost, by the AllReduce of the whole, its latency left out."""
    sets, method = plan.holder_sets, plan.cost.allreduce_method
    latency = allreduce_cost(problem.topology, method).latency
    parts = []
    for sums in plan.table_sums:
        part = evaluate(
            problem.topology, problem.workload, sets, sums, problem.capacity_bytes, method
        )
        if problem.workload.training and sums.rows[sets.copies > 1].any():
            part = replace(part, rank_seconds=part.rank_seconds - latency)
        parts.append(part)
    return parts


def _hot_set(classes: list[Classes], rows: list[Ints], then: float) -> HotSet:
    """`rows` [C] of each class are in the plan's set, of the classes of one memory or of both."""
    accesses, of_class = (
        np.concatenate([getattr(each, name) for each in classes]) for name in ("accesses", "rows")
    )
    order = np.argsort(-accesses, kind="stable")
    accesses, of_class, in_set = accesses[order], of_class[order], np.concatenate(rows)[order]
    number, total = int(in_set.sum()), max(int(of_class @ accesses), 1)
    before = np.cumsum(of_class) - of_class
    hottest = np.clip(number - before, 0, of_class)
    return HotSet(
        number,
        then,
        float(in_set @ accesses) / total,
        float(hottest @ accesses) / total,
    )
