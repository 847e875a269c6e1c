"""Judgement of the plan of a live model, by counts that chance cannot flatter.

A plan made from counts looks better on them than it is: it fits their noise too. So the plans that
the running one is compared with are made from the counts before this period, and all are priced
under this period's, which none was made from: by the judge of `oper drift` and `oper replan`. Noise
then gains nothing, because it is another noise; and a row that was hot in one period alone gains
nothing either. docs/monitor.md states how often chance is taken for drift, and how small a drift is
found.
"""

from oper.plan.plan import Plan
from oper.plan.reference_figures import HeldOutSource
from oper.planner.enough_accesses import ENOUGH_ACCESSES, is_too_small
from oper.planner.replan.judge import JudgingData, judge
from oper.planner.replan.judgement import Judgement
from oper.planner.replan.replan import plan_again
from oper.profiling.profile import Profile


def why_not_judged(window: Profile, ranks: int) -> str:
    """Return why a period's counts, preceded by those before it, do not judge a plan; "" if they
    do."""
    before = window.preceding
    if before is None:
        return "no period before it to make a plan from"
    counted = {
        "this period has": window.total_accesses,
        "those before it have": before.total_accesses,
    }
    for which, accesses in counted.items():
        if is_too_small(accesses, ranks):
            return (
                f"{which} {accesses / ranks:,.0f} counted accesses a rank, and "
                f"{ENOUGH_ACCESSES:,} are needed to tell drift from chance"
            )
    return ""


def judge_period(plan: Plan, window: Profile, threshold: float) -> Judgement:
    """Judge a plan by a period's counts, preceded by those before it. Call it only if
    `why_not_judged` is ""."""
    before = window.preceding
    assert before is not None, "the counts before the period judge it"
    data = JudgingData(before, window, HeldOutSource.THIS_WINDOW)
    return judge(plan, plan_again(plan, before), data, threshold).judgement
