"""Replan: plan again for newer counts, moving few rows of an older plan.

In: `Plan`, a newer `Profile`, a horizon. Out: `Replanned`, with the new `Plan` and its `RowMoves`.
Which rows move is decided in replan_one_memory.py. A plan with a tier is two such plans, and its
tables stay in the memory they are in (replan_with_tier.py). What the plans gain on data that they
were not made from is seen on those that follow the profile's, where these are known.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from oper.base.defaults import HORIZON
from oper.base.units import whole_number
from oper.files import manifest
from oper.plan.plan import MARKER, Plan, plan_given
from oper.plan.plan_parts import plans_of_memories
from oper.planner.assemble_plan import assemble
from oper.planner.price_plan import costs_under, problems_of_memories, rank_seconds
from oper.planner.reference_figures import later_profile, with_reference_figures
from oper.planner.replan.replan_one_memory import (
    HeldOutReplan,
    Replanned,
    replan_one_memory,
)
from oper.planner.replan.replan_with_tier import replan_with_tier
from oper.profiling.profile import Profile, profile_given


def replan(
    plan: Plan | Path | str,
    profile: Profile | Path | str,
    horizon: int = HORIZON,
    report: Callable[[str], None] = lambda step: None,
) -> Replanned:
    """Plan for the counts of `profile` by moving rows of `plan` where that pays within `horizon`
    iterations; `replanned.plan.save(folder)` writes the new plan, with the moves and the profile's
    vocabularies.

    Plan and profile may be given by their folders; the new plan's record has the digest of an old
    one's folder. `report` is called with the name of each step as it begins.

    Raises OperError where plan and profile are of different tables, or `horizon` is below 1.
    """
    old, counts = plan_given("replan", "plan", plan), profile_given("replan", profile)
    digest = "" if isinstance(plan, Plan) else manifest.sha256(Path(plan) / MARKER)
    plan_again = replan_with_tier if old.tier else replan_one_memory
    made = plan_again(old, counts, whole_number(horizon, "horizon"), digest, report)
    report("data that no plan has seen")
    companions = (counts.save_vocabularies, made.moves.save)
    new = with_reference_figures(made.plan, counts, [each.problem for each in made.fresh_parts])
    return replace(
        made,
        plan=replace(new, companions=companions),
        held_out=_held_out(old, made, new, counts),
    )


def _held_out(old: Plan, made: Replanned, new: Plan, profile: Profile) -> HeldOutReplan | None:
    """What the plans cost on the data that follow the profile's."""
    later = later_profile(profile)
    if new.held_out is None or later is None:
        return None
    problems = problems_of_memories(new, later, as_counted=True)
    of_old = costs_under(plans_of_memories(old), problems)
    fresh = costs_under([assemble(part) for part in made.fresh_parts], problems)
    return HeldOutReplan(
        new.held_out.source,
        new.held_out.samples,
        float(rank_seconds(of_old).max()),
        new.held_out.objective_seconds,
        float(rank_seconds(fresh).max()),
    )
