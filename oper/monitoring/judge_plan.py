"""Whether a plan still fits what a live model reads, by counts that chance cannot flatter.

A plan made from counts looks better on these than it is: it fits their noise too. So the plan that
the running one is compared with is made from the counts before this period, and both are priced
under this period's, which neither was made from (`oper.drift`, a window and the one before it).
Noise then gains nothing, as it is another noise; and a row that was hot in one period alone gains
nothing either. docs/monitor.md states how often chance is taken for drift, and how small a drift is
found.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from oper.plan.plan import Plan
from oper.planner.enough_accesses import ENOUGH_ACCESSES, is_too_small
from oper.planner.replan.drift import drift
from oper.planner.replan.replan_one_memory import Replanned
from oper.profiling.profile import Profile


@dataclass(frozen=True)
class Move:
    """What the moves of `oper.replan` would bring, under all that was counted: rows and bytes that
    they move, the seconds that takes a rank, and the objective before and after."""

    DERIVED: ClassVar = ("pays_after_iterations",)  # in JSON beside the fields

    rows: int
    bytes: float
    seconds: float
    now_seconds: float
    then_seconds: float

    @staticmethod
    def of(made: Replanned) -> "Move":
        """The moves of a replan."""
        return Move(
            made.moves.changed_rows,
            made.migration.link_bytes,
            made.migration_seconds,
            made.old_seconds,
            made.new_seconds,
        )

    @property
    def pays_after_iterations(self) -> int | None:
        """Iterations after which the moves have saved what they took; None: never."""
        gain = self.now_seconds - self.then_seconds
        return math.ceil(self.seconds / gain) if gain > 0 else None


@dataclass(frozen=True)
class Judgement:
    """The objective of the running plan and of one from scratch, under a period's counts.

    now_seconds: of the running plan. fresh_seconds: of a plan made from the counts before the
    period; worse: by what share of it the running plan is worse. flattered_seconds: of a plan made
    from the period's own counts, which no later data will be. threshold: of `worse`, above which
    the verdict is to replan. move: what replanning would bring, where that was looked at.
    """

    DERIVED: ClassVar = ("verdict", "gain_seconds")  # in JSON beside the fields

    now_seconds: float
    fresh_seconds: float
    flattered_seconds: float
    worse: float
    threshold: float
    move: Move | None = None

    @property
    def verdict(self) -> Literal["keep", "replan"]:
        return "replan" if self.worse > self.threshold else "keep"

    @property
    def gain_seconds(self) -> float:
        """What an iteration would take less with the plan from scratch; negative: more."""
        return self.now_seconds - self.fresh_seconds


def why_not_judged(window: Profile, ranks: int) -> str:
    """Why a period's counts, preceded by those before it, do not judge a plan; "" where they do."""
    before = window.preceding
    if before is None:
        return "no period before it to make a plan from"
    counted = {"this period has": _accesses(window), "those before it have": _accesses(before)}
    for which, accesses in counted.items():
        if is_too_small(accesses, ranks):
            return (
                f"{which} {accesses / ranks:,.0f} counted accesses a rank, and "
                f"{ENOUGH_ACCESSES:,} are needed to tell drift from chance"
            )
    return ""


def judge(plan: Plan, window: Profile, threshold: float) -> Judgement:
    """Judge a plan by a period's counts, preceded by those before it. To be called where
    `why_not_judged` is ""."""
    found = drift(plan, window, threshold)
    assert found.unseen is not None, "the counts before the period judge it"
    return Judgement(
        found.unseen.now_seconds,
        found.unseen.fresh_seconds,
        found.objective_seconds.fresh,
        found.unseen.worse,
        found.threshold,
    )


def _accesses(profile: Profile) -> Any:
    return profile.accesses_of_tables.sum()
