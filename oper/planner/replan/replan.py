"""Replan: plan again for newer counts, moving few rows of an older plan.

In: `Plan`, a newer `Profile`, a horizon. Out: `Replanned`, with the new `Plan` and its `RowMoves`.
Which rows move is decided in replan_one_memory.py. A plan with a tier is two such plans, and its
tables stay in the memory they are in (replan_with_tier.py).
"""

from collections.abc import Callable
from pathlib import Path

from oper.files import manifest, storage
from oper.plan.plan import FORMAT, MARKER, Plan
from oper.planner.replan.replan_one_memory import Replanned, replan_one_memory
from oper.planner.replan.replan_with_tier import replan_with_tier
from oper.profiling.profile import Profile


def replan(
    plan: Plan,
    profile: Profile,
    horizon: int,
    old_digest: str = "",
    report: Callable[[str], None] = lambda step: None,
) -> Replanned:
    """Plan for the counts of `profile` by moving rows of `plan` where that pays within `horizon`
    iterations; `old_digest` is recorded as the old plan's.

    Raises OperError where plan and profile are of different tables, or `horizon` is below 1.
    """
    plan_again = replan_with_tier if plan.tier else replan_one_memory
    return plan_again(plan, profile, horizon, old_digest, report)


def replan_and_save(
    folder: Path | str,
    profile: Profile,
    output: Path | str,
    horizon: int,
    report: Callable[[str], None] = lambda step: None,
    overwrite: bool = False,
) -> Replanned:
    """`replan` for a plan's folder, written to `output` with the moves.

    `overwrite` replaces a plan that is there, if nothing else is in its folder.
    """
    storage.check_output(output, FORMAT, overwrite)
    plan = Plan.load(folder)
    made = replan(plan, profile, horizon, manifest.sha256(Path(folder) / MARKER), report)
    report("writing")
    made.save(output, profile, overwrite)
    return made
