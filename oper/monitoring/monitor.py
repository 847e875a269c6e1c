"""Watching a live model: each rank counts the reads of its tables, and the counts judge the plan.

with oper.monitor(model, jsonl="run.jsonl") as monitor:
    train(model)
    profile = monitor.profile()  # on rank 0, of all ranks; None on the others

One iteration of every `sample_every` is counted row by row (sampled_iterations.py), during the
lookup. Every `period` iterations the ranks send their counts to rank 0 (gather_counts.py), on which
older periods weigh less (decayed_counts.py). There a thread adds them up, prices the running plan
and one from scratch (judge_plan.py) and reports the result; no step waits for it. The policy
decides the action if a plan no longer fits (followed_plans.py).
"""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn

from oper.base.defaults import WORSE
from oper.base.errors import OperError, check_type, one_line
from oper.base.units import finite_number, positive_seconds, whole_number
from oper.monitoring.decayed_counts import DecayedCounts
from oper.monitoring.followed_plans import LOG, POLICIES, FollowedPlans, Policy
from oper.monitoring.gather_counts import MonitoredRanks, in_plans_tables, packed, unpacked
from oper.monitoring.json_lines import JsonLines
from oper.monitoring.judge_plan import judge_period, why_not_judged
from oper.monitoring.period_report import PeriodReport
from oper.monitoring.sampled_iterations import MOST_ITERATIONS, SampledIterations
from oper.monitoring.traffic import TrafficCounts, counted_traffic, predicted_traffic
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from oper.profiling.recorder import CollectionCounters, watched
from oper.tables.row_identity import check_same_rows
from oper.tables.table import fingerprint
from oper.torchrec.sharded_model import sharded_collections
from oper.torchrec.sharding_plan import plan_of

# Counting takes up to half of a step of tables alone on CPU ranks, and with merging and judging the
# whole is to take less than a hundredth of it (benchmarks/runtime/monitor.py).
SAMPLE_EVERY = 100
PERIOD = 20_000
_DEADLINE_SECONDS = 60.0


class ScalarWriter(Protocol):
    """The part of TensorBoard's SummaryWriter that a monitor uses."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


@dataclass(frozen=True)
class _Settings:
    """The checked arguments of a monitor; on rank 0 with the file that it appends to."""

    plan: Plan
    sampled: SampledIterations
    period: int | None
    lines: JsonLines | None
    writer: ScalarWriter | None
    worse: float
    followed: FollowedPlans
    deadline_seconds: float

    @property
    def alike(self) -> list[int]:
        """The settings that must be equal on all ranks."""
        return [self.sampled.every, self.period or 0, POLICIES.index(self.followed.policy)]


class Monitor:
    """Counter of a model's reads until it is closed; made by `monitor`. `plan` is the plan that is
    judged: the rows lie by it, or still lie by it while they move."""

    def __init__(self, model: nn.Module, given: _Settings, ranks: MonitoredRanks) -> None:
        collections = sharded_collections(model)
        engines = [collection.engine for collection in collections.values()]
        self.plan, self._model, self._followed = given.plan, model, given.followed
        self._sampled, self._period = given.sampled, given.period
        self._worse, self._writer = given.worse, given.writer
        self._collections = [
            CollectionCounters(path, collection, reads_row_0=True)
            for path, collection in collections.items()
        ]
        self._batches = [0] * len(self._collections)
        self._began, self._counted_iterations = 0, 0  # the period; of the period
        self._counts_anything = False
        self._traffic = TrafficCounts(engines)
        self._counts = DecayedCounts()
        self._ranks, self._lines = ranks, given.lines
        first = ranks.rank == 0
        # Counts are added up, and reports made and told, in a thread of its own.
        self._teller = ThreadPoolExecutor(1, "oper-monitor") if first else None
        self._told: Future[PeriodReport] | None = None
        self._closed = False
        self._watching = ExitStack()
        for number, counters in enumerate(self._collections):
            read = partial(self._read, number)
            self._watching.enter_context(watched(counters.collection, read))

    def profile(self) -> Profile | None:
        """Return the counts of all ranks, later periods weighing more: on rank 0 a profile of the
        plan's tables, which all commands take; None on the others. To be called on all ranks.

        Raises OperError if nothing was counted yet, or a rank is lost or late.
        """
        if not self._counts_anything:  # on no rank: all count the same iterations
            raise OperError(
                "the monitor counted nothing yet: of every "
                f"{self._sampled.every} iterations one is counted (sample_every)"
            )
        messages = self._gather()
        return None if self._teller is None else self._teller.submit(self._total, messages).result()

    def report(self) -> PeriodReport | None:
        """End the period now, and return its report on rank 0, which judges the plan before this
        returns; None on the others. Call it on all ranks.

        Raises OperError if a rank is lost or late.
        """
        told = self._end_period(wait=True)
        return None if told is None else told.result()

    def step(self) -> bool:
        """Begin or continue to move rows to a new plan, with `policy="migrate"`; return True while
        rows move. Call it on all ranks between two iterations, as `Migration.step`; with other
        policies it does nothing.

        Raises OperError if a rank is lost or late, and while gradients are held back.
        """
        plan = self._followed.step(self._model, self._ranks, self._sampled.every)
        if plan is not None:
            self.follow(plan)
        return self._followed.migration is not None

    def follow(self, plan: Plan | Path | str) -> None:
        """Judge another plan from now on, to which the model's rows have migrated. To be called on
        all ranks; the first waits until it has judged the period before.

        Raises OperError if the plan is for other tables or ranks, or has them in another order.
        """
        followed = plan_of(plan)
        same = fingerprint(followed.tables) == fingerprint(self.plan.tables)
        if not same or followed.ranks != self.plan.ranks:
            raise OperError(
                f"expected a plan for the tables of the monitored plan, in their order, "
                f"{self.plan!r}, got {followed!r}; close the monitor, and make another"
            )
        names = "the monitored plan", "the plan to follow"
        old, new = self.plan.numbered_tables(), followed.numbered_tables()
        check_same_rows(old, new, names, start=followed.vocabulary_start)
        if self._told is not None:
            wait_for([self._told])
        self.plan = followed

    def close(self) -> None:
        """Stop counting, and wait until pending reports are written. A period that is complete is
        reported; an incomplete one is left as it is, and `report` ends it. Only for a complete
        period the ranks wait for each other."""
        if not self._closed and self._iterations - self._began == self._period:
            self._end_period_in_passing()
        self._closed = True
        self._watching.close()
        if self._teller is not None:
            self._teller.shutdown()
        self._leave()

    def _leave(self) -> None:
        if self._lines is not None:
            self._lines.close()
        self._ranks.close()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _iterations(self) -> int:
        """The number of iterations that this rank has begun: batches of the first collection."""
        return self._batches[0]

    def _read(self, number: int, given: Any) -> None:
        """Note that a collection is about to read a batch: end a complete period, and count the
        batch if its iteration is sampled."""
        if number == 0 and self._iterations - self._began == self._period:
            self._end_period_in_passing()
        batch = self._batches[number]
        self._batches[number] += 1
        if batch in self._sampled:
            self._collections[number].count(given)
            self._counted_iterations += number == 0
            self._counts_anything = True

    def _gather(self) -> list[bytes]:
        """Gather the ranks' counts on rank 0, in one message per rank."""
        if self._closed:
            raise OperError("the monitor is closed; ask it before, inside its `with`")
        counted = [each.take() for each in self._collections]
        message = packed(in_plans_tables(counted, self.plan.tables))
        return self._ranks.gather_on_first(message, "merge what a monitor counted")

    def _end_period_in_passing(self) -> None:
        """End a period in a step, or at the job's end, which is not to fail because of that."""
        try:
            self._end_period(wait=False)
        except Exception as error:  # of gloo too, if the job has ended its process group
            self._period = None
            LOG.error("no further periods: %s", error)

    def _end_period(self, wait: bool) -> "Future[PeriodReport] | None":
        """Bring all counts to rank 0 and have them told there. Unless it is to `wait`, a plan is
        not judged while it still is for the period before."""
        messages = self._gather()
        traffic = self._ranks.gather(self._traffic.take(), "merge what a monitor counted")
        iterations, self._began = self._iterations - self._began, self._iterations
        counted_iterations, self._counted_iterations = self._counted_iterations, 0
        if self._teller is None:
            return None
        report = PeriodReport(
            period=-1,
            ended=time.time(),
            last_iteration=self._iterations,
            iterations=iterations,
            counted_iterations=counted_iterations,
            samples=0,
            accesses=0,
            plan_batch_size=self.plan.workload.batch_size,
            predicted=predicted_traffic(self.plan),
            counted=counted_traffic(self.plan, traffic),
            judgement=None,
            why_not_judged="nothing was counted in this period",
        )
        judges = wait or self._told is None or self._told.done()
        self._told = self._teller.submit(self._tell, report, messages, judges)
        return self._told

    # The following methods run only in the teller's thread.

    def _add(self, messages: list[bytes]) -> None:
        """Add the ranks' counts to the running period."""
        parts = [unpacked(message, self.plan.tables) for message in messages]
        if any(part.samples for part in parts):
            self._counts.add(parts)

    def _total(self, messages: list[bytes]) -> Profile:
        """Return all counts, including the last ones of the ranks."""
        self._add(messages)
        total = self._counts.total()
        if total is None:
            raise OperError("the monitor counted iterations in which nothing was read")
        return self._named(total)

    def _tell(self, found: PeriodReport, messages: list[bytes], judges: bool) -> PeriodReport:
        """End the period, judge the plan by it, and report it. A failure here is logged: it is not
        to end a job."""
        try:
            self._add(messages)
            found = replace(found, period=self._counts.periods, moving=self._followed.moving())
            window = self._counts.end_period()
            if window is not None:
                found = replace(found, samples=window.samples, accesses=window.total_accesses)
                found = self._judged(found, window, judges)
        except Exception as error:
            LOG.exception("the plan could not be judged")
            found = replace(found, why_not_judged=f"it failed ({one_line(error)})")
        LOG.info("%s", found.sentence())
        try:
            if self._lines is not None:
                self._lines.append(found)
            if self._writer is not None:
                for name, value in found.scalars().items():
                    self._writer.add_scalar(name, value, found.last_iteration)
        except Exception:
            LOG.exception("a report could not be written")
        return found

    def _judged(self, found: PeriodReport, window: Profile, judges: bool) -> PeriodReport:
        """Return the report with a judgement, or with the reason that there is none."""
        why_not = why_not_judged(window, self.plan.ranks)
        if not judges:
            why_not = "the period before was still being judged"
        elif found.moving is not None:
            why_not = "rows are on their way"
        total = self._counts.before
        if why_not or total is None:
            return replace(found, why_not_judged=why_not)
        judgement = judge_period(self.plan, window, self._worse)
        counts = self._named(total)
        return replace(
            found,
            judgement=judgement,
            why_not_judged="",
            new_plan=self._followed.made(self.plan, counts, judgement, found.period),
            moving=self._followed.moving(),
        )

    def _named(self, total: Profile) -> Profile:
        """Return a profile with its source, and the vocabularies of the plan that is monitored,
        which are read only when they are written or asked for."""
        source = {
            "monitored": {"sample_every": self._sampled.every, "periods": self._counts.periods}
        }
        if any(table.ids.kind == "vocab" for table in self.plan.tables):
            total = replace(total, vocabularies=None, read_vocabularies=self.plan.prepared)
        return replace(total, source=source)


def monitor(
    model: nn.Module,
    plan: Plan | Path | str | None = None,
    *,
    sample_every: int = SAMPLE_EVERY,
    period: int | None = PERIOD,
    jsonl: Path | str | None = None,
    writer: ScalarWriter | None = None,
    worse: float = WORSE,
    policy: Policy = "report",
    plans: Path | str | None = None,
    deadline_seconds: float = _DEADLINE_SECONDS,
) -> Monitor:
    """Count the reads of a model while it trains or serves, and judge its plan by them. Call it on
    all ranks; use it with `with`, or close it by `close()`.

    Args:
        model: sharded by OPER, by `oper.shard` or DistributedModelParallel.
        plan: that it was sharded by; needed only if the model does not know it.
        sample_every: of so many iterations one is counted row by row, the same on all ranks.
        period: iterations after which the ranks merge their counts, and rank 0 judges the plan and
            tells; those of a period before weigh half as much. None: when `report()` is called.
        jsonl: a file to which rank 0 appends a line of JSON for each period; for `oper top`.
        writer: a SummaryWriter, or what has its `add_scalar`, that rank 0 gives figures to, in a
            thread of the monitor's.
        worse: the share of a step that another plan must save before the verdict is to replan.
        policy: the action each period in addition to the report. "propose" writes a plan of
            `oper.replan` to a folder of `plans` if moves pay; "migrate" has the model's rows move
            there too, in `step()`, which the training loop calls after each iteration.
        plans: a folder that all ranks read; rank 0 writes to it.
        deadline_seconds: how long a rank waits for the others to merge.

    Raises:
        OperError: the model was not sharded by OPER, or by another plan, or an argument is wrong.
    """
    check_type("monitor", "model", model, nn.Module)
    engine = next(iter(sharded_collections(model).values())).engine
    first = engine.node.group is None or engine.node.group.rank == 0

    def given() -> _Settings:
        check_type("monitor", "jsonl", jsonl, str, os.PathLike, type(None))
        sampled = SampledIterations(sample_every)
        if period is not None and not 1 <= whole_number(period, "period") <= MOST_ITERATIONS:
            raise OperError(
                f"period: expected 1 to {MOST_ITERATIONS:,} iterations, or None, got {period}"
            )
        if period is not None and period < sampled.every:
            raise OperError(
                f"period: expected at least {sampled.every:,} iterations, of which one is counted "
                f"(sample_every), got {period:,}"
            )
        if writer is not None and not hasattr(writer, "add_scalar"):
            raise OperError(f"writer {str(writer)[:40]!r}: has no add_scalar, as SummaryWriter has")
        return _Settings(
            _plan_of_model(model, plan),
            sampled,
            period,
            JsonLines(jsonl) if first and jsonl is not None else None,
            writer,
            finite_number(worse, "worse"),
            FollowedPlans(policy, plans),
            positive_seconds(deadline_seconds, "deadline_seconds"),
        )

    settings, failure = None, None
    try:
        settings = given()
    except OperError as error:
        failure = error
    deadline = _DEADLINE_SECONDS if settings is None else settings.deadline_seconds
    ranks = MonitoredRanks(engine.node.group, deadline)
    try:
        _check_agreement(ranks, settings, failure)
        assert settings is not None
        return Monitor(model, settings, ranks)
    except BaseException:
        ranks.close()
        if settings is not None and settings.lines is not None:
            settings.lines.close()
        raise


def _check_agreement(
    ranks: MonitoredRanks, settings: _Settings | None, failure: OperError | None
) -> None:
    """Raise on all ranks if one cannot begin, or counts other iterations than rank 0."""
    agreed = [0, 0, 0, 0] if settings is None else [1, *settings.alike]
    messages = ranks.gather(np.array(agreed, np.int64).tobytes(), "begin a monitor")
    if failure is not None:
        raise failure
    all_ranks = [np.frombuffer(message, np.int64).tolist() for message in messages]
    for rank, (begins, *theirs) in enumerate(all_ranks):
        if not begins:
            raise OperError(f"monitor: rank {rank} cannot begin; its own error says why")
        if theirs != all_ranks[0][1:] and all_ranks[0][0]:
            raise OperError(
                f"monitor: sample_every, period and policy are {_shown(theirs)} on rank {rank} "
                f"and {_shown(all_ranks[0][1:])} on rank 0; give all ranks the same"
            )


def _shown(settings: list[int]) -> str:
    """Return `sample_every`, `period` and `policy` as they were given."""
    every, period, policy = settings
    return f"{every:,}, {f'{period:,}' if period else None} and {POLICIES[policy]}"


def _plan_of_model(model: nn.Module, given: Plan | Path | str | None) -> Plan:
    """Return the plan that a model was sharded by. Raise OperError if it is not known, or another
    one."""
    engines = [collection.engine for collection in sharded_collections(model).values()]
    if given is None:
        given = getattr(getattr(model, "plan", None), "oper_plan", None)
    if given is None and len(engines) == 1:
        given = engines[0].plan
    if given is None:
        raise OperError(
            "monitor: the plan of a model of several collections was not found; give the plan that "
            "it was sharded by, oper.monitor(model, plan)"
        )
    plan = plan_of(given)
    known = {table.name: table for table in plan.tables}
    for engine in engines:
        for table in engine.plan.tables:
            model_table = known.get(table.name)
            if model_table is None or fingerprint([model_table]) != fingerprint([table]):
                raise OperError(
                    f"monitor: the model has table {table.name!r} by another plan than the one "
                    "given; give the plan that it was sharded by, or none"
                )
        check_same_rows(
            engine.plan.numbered_tables(),
            plan.numbered_tables(),
            ("the model's plan", "the plan given"),
            "give the plan that it was sharded by, or none",
        )
        if (engine.plan.profile, engine.ranks) != (plan.profile, plan.ranks):
            raise OperError(
                "monitor: the model was sharded by another plan than the one given, or its rows "
                "are on their way to another; give that one, or none, once they are there"
            )
    return plan
