"""Judgement of a plan and its replacements by newer data: the one place that makes advice.

In: `Plan`, the newer `Profile`, a replan of the plan. Out: `Judged`, with its `Judgement`.

A plan judged on the data that it was made from is better than it will be in use, and the data that
come next do not exist yet. So the newest data are split in time: the candidates are made from the
earlier part, and judged by the counts of the later one, which none of them was made from.
Candidates are the plan as it is, the plan with the moves that pay, one from scratch and, in
inference, copies of all rows on all ranks if these fit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from oper.base.defaults import WORSE
from oper.base.portable_math import dot
from oper.cost.holder_sets import everywhere_set
from oper.plan.plan import Plan
from oper.plan.plan_parts import plans_of_memories
from oper.plan.reference_figures import HeldOutSource
from oper.planner.assemble_plan import assemble
from oper.planner.baselines.simple import full_copies
from oper.planner.device_limits import DeviceRoom
from oper.planner.enough_accesses import ENOUGH_ACCESSES, is_too_small
from oper.planner.least_memory import by_devices
from oper.planner.price_fetched import predict_fetched
from oper.planner.price_plan import PlanTime, PricedPlan, priced_under, problems_of_memories
from oper.planner.problem.problem import Problem, copies_cost_memory_alone
from oper.planner.replan.judgement import Candidate, Choice, Judgement
from oper.planner.replan.migration.migration_cost import Migration, MigrationCost, link_bytes
from oper.planner.replan.replan_one_memory import Replanned
from oper.profiling.profile import Profile

NOT_SPLIT = (
    "the newest data are not split in time: a profile of windows keeps the parts of each, and one "
    "with held-out data the last part of a log"
)
# Accesses of a rank in each part of data that are split in time. Chance cannot flatter a plan on
# data that it was not made from, so a part may be smaller than whole data that tell drift from
# chance. With 4,096 the windows of a real log were not split, and steps by the advice took up to
# 1.096 times those of planning from scratch each time (docs/design/judged-in-time.md).
ENOUGH_OF_PART = ENOUGH_ACCESSES // 4
SAME_DATA = "the plan was made from these data, or from their later part"
SAME_WINDOW = "the plan was made from the window before, so that a plan made from it is the same"


@dataclass(frozen=True)
class JudgingData:
    """The counts that candidates are made from, and those that judge them; source and reservation
    as in `Judgement`."""

    made_from: Profile
    judge: Profile
    source: HeldOutSource | None
    reservation: str = ""

    @staticmethod
    def of(made_from: str, ranks: int, profile: Profile, before: Profile | None) -> "JudgingData":
        """Split the newest data, if possible, to judge a plan for `ranks` ranks that was made from
        the counts with digest `made_from`. `before`: the preceding window, if the profile does not
        know it."""
        if made_from == profile.digest and not profile.holds_out:
            return JudgingData(profile, profile, None, SAME_DATA)
        reservation = NOT_SPLIT
        for earlier, later, source in _splits(profile, ranks, before):
            if later.digest == made_from:
                reservation = SAME_DATA
            elif source == HeldOutSource.THIS_WINDOW:
                said = SAME_WINDOW if earlier.digest == made_from else reservation
                return JudgingData(earlier, later, source, said)
            elif not (reservation := _too_small(earlier, later, ranks)):
                return JudgingData(earlier, later, source)
        return JudgingData(profile, profile, None, reservation)


def _splits(
    profile: Profile, ranks: int, before: Profile | None
) -> Iterator[tuple[Profile, Profile, HeldOutSource]]:
    """Yield earlier and later parts of the newest data, the newest first."""
    if profile.holds_out and profile.following is not None:
        yield profile, profile.following, HeldOutSource.LAST_PART
    parts = profile.parts
    if parts is not None:
        yield *parts, HeldOutSource.LATER_PART
    before = before or profile.preceding
    while before is not None and is_too_small(before.total_accesses, ranks):
        before = before.preceding
    if before is not None and not is_too_small(profile.total_accesses, ranks):
        yield before, profile, HeldOutSource.THIS_WINDOW


def _too_small(earlier: Profile, later: Profile, ranks: int) -> str:
    """Return why two parts of the newest data do not tell drift from chance; "" if they do."""
    for which, part in (("earlier", earlier), ("later", later)):
        accesses = part.total_accesses / ranks
        if accesses < ENOUGH_OF_PART:
            return (
                f"the {which} part of the newest data has {accesses:,.0f} accesses per rank, fewer "
                f"than the {ENOUGH_OF_PART:,} that can judge a plan"
            )
    return ""


class Judged(NamedTuple):
    """A judgement, and the problems and the rows of the plan and of one from scratch that it was
    made of, memory by memory."""

    judgement: Judgement
    problems: list[Problem]
    now: list[PricedPlan]
    fresh: list[PricedPlan]


def judge(plan: Plan, made: Replanned, data: JudgingData, threshold: float = WORSE) -> Judged:
    """Judge a plan, and `made`, its replan for `data.made_from`, by data.

    Data that no plan was made from judge by their own counts. Other data judge by the reads that
    are expected of further samples, as in planning.
    """
    problems = problems_of_memories(plan, data.judge, as_counted=data.source is not None)
    now, again, fresh = (
        priced_under(parts, problems)
        for parts in (
            plans_of_memories(plan),
            plans_of_memories(made.plan),
            [assemble(part) for part in made.fresh_parts],
        )
    )

    def candidate(
        choice: Choice, priced: list[PricedPlan], moved: float, seconds: float
    ) -> Candidate:
        time = PlanTime.of(problems, priced)
        return Candidate(choice, time.step_seconds, time.transfer_seconds, moved, seconds)

    fresh_moves = made.fresh_migration.link_bytes, made.fresh_migration_seconds
    moves = made.migration.link_bytes, made.migration_seconds
    candidates = [
        candidate(Choice.KEEP, now, 0.0, 0.0),
        candidate(Choice.REPLAN, again, *moves),
        candidate(Choice.FROM_SCRATCH, fresh, *fresh_moves),
    ]
    if len(problems) == 1 and (copies := _full_copies(problems[0], now[0])):
        candidates.append(copies)
    judgement = Judgement(
        data.source,
        data.judge.samples,
        data.reservation,
        made.horizon,
        threshold,
        tuple(candidates),
        too_small=data.source is None and is_too_small(data.judge.total_accesses, plan.ranks),
    )
    return Judged(judgement, problems, now, fresh)


def _full_copies(problem: Problem, now: PricedPlan) -> Candidate | None:
    """Return the candidate with copies of all rows on all ranks; None if they do not fit, or copies
    cost more than memory."""
    topology, asked, classes = problem.topology, problem.asked, problem.classes
    if not copies_cost_memory_alone(topology, problem.workload):
        return None
    capacity = float(np.min(problem.capacity_bytes))
    if by_devices(topology, asked):
        capacity = min(DeviceRoom.of(topology, asked, problem.step_memory).capacities(0.0))
    if classes.total_bytes > capacity:
        return None
    cost, step = predict_fetched(problem, full_copies(problem))
    before, after = now.holder_sets, everywhere_set(problem.ranks)
    moves = MigrationCost.of(before, after, topology)
    bytes_of_sets = dot(classes.m, now.by_holder_set)[:, None]
    migration = Migration(0, link_bytes(bytes_of_sets, before, after, moves))
    return Candidate(
        Choice.FULL_COPIES,
        step.seconds,
        cost.objective_seconds,
        migration.link_bytes,
        migration.seconds(topology),
    )
