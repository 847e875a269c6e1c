"""Text of a judgement, for `oper drift` and `oper replan`: data, advice, reservation."""

from typing import TYPE_CHECKING

from oper.base.formatting import format_bytes, format_duration, format_percent, format_share, plural
from oper.base.spoken import option, spoken, typed_path
from oper.cli.plan_flags import plan_flags

if TYPE_CHECKING:
    from oper.plan.plan import Plan
    from oper.planner.replan.judgement import Judgement


def advice_sentence(judgement: "Judgement", plan: str, profile: str, made: str = "") -> str:
    """Return the advice and its predicted steps. `made` is the replanned plan, if it was made
    already."""
    from oper.analysis.wording import judging_data
    from oper.planner.enough_accesses import ENOUGH_ACCESSES
    from oper.planner.replan.judgement import Choice

    keep, best = judgement.keep, judgement.best
    preposition = "under" if judgement.source is None else "on"
    data = f"{preposition} {judging_data(judgement.source, profile)}"
    before, after = format_duration(keep.step_seconds), format_duration(best.step_seconds)
    tolerated = f"{option('--worse')} tolerates {format_percent(judgement.threshold)}"
    if judgement.too_small:
        return (
            f"Keep {plan}: {profile} has fewer than {ENOUGH_ACCESSES:,} accesses a rank, where "
            "chance looks like drift"
        )
    if judgement.advice == Choice.KEEP:
        said = f"Keep {plan}: {data} a step takes {before} (predicted)"
        if judgement.gain_seconds <= 0:
            return f"{said}, and no less with another plan"
        if judgement.net_gain(best) <= 0:
            steps = plural(judgement.horizon, "step")
            return f"{said}; no other plan saves what its moves take within {steps}"
        return f"{said}, and {after} {_with(best.choice)}; {tolerated}"
    first = {
        Choice.REPLAN: f"Use {made}" if made else "Replan",
        Choice.FROM_SCRATCH: "Plan from scratch",
        Choice.FULL_COPIES: "Copy all rows to all ranks",
    }[best.choice]
    return (
        f"{first}: {data} a step takes {before} with {plan} (predicted), "
        f"{format_share(judgement.worse)} longer than {after} {_with(best.choice)}; {tolerated}. "
        f"Moving {format_bytes(best.moved_bytes)} once pays after "
        f"{plural(judgement.pays_after_steps(best) or 0, 'step')}"
    )


def steps_sentence(judgement: "Judgement", plan: str, profile: str) -> str:
    """Return the predicted steps of the plan and of the best other one, without advice."""
    from oper.analysis.wording import judging_data

    preposition = "Under" if judgement.source is None else "On"
    before, after = (
        format_duration(each.step_seconds) for each in (judgement.keep, judgement.best)
    )
    return (
        f"{preposition} {judging_data(judgement.source, profile)} a step takes {before} with "
        f"{plan} (predicted), and {after} {_with(judgement.best.choice)}"
    )


def command_to_run(
    judgement: "Judgement", old: "Plan | None", plan: str, profile: str, made: str = ""
) -> str | None:
    """Return a line with the command that follows the advice; None if the plan stays, or `made` is
    the plan that is advised. `plan` and `profile` are the names of the plan `old`, which the line
    for a terminal needs, and of the newer data."""
    from oper.planner.replan.judgement import Choice

    if judgement.advice == Choice.KEEP or (made and judgement.advice == Choice.REPLAN):
        return None
    if judgement.advice == Choice.REPLAN:
        typed = f"oper replan {typed_path(plan)} {typed_path(profile)} -o NEW"
        return f"Run: {spoken(typed, 'oper.replan(plan, profile)')}"
    copies = judgement.advice == Choice.FULL_COPIES
    share = ", oper.PlanSettings(extra_memory=ranks - 1)" if copies else ""
    called = f"Run, with the other options of {plan}: oper.make_plan(profile, …{share})"
    if old is None:
        return called
    flags = plan_flags(old, copies)
    typed = f"oper plan {typed_path(profile)} {flags.typed} -o NEW"
    return spoken(f"Run: {'; '.join([typed, *flags.unsaid])}", called)


def _with(choice: str) -> str:
    from oper.planner.replan.judgement import Choice

    return {
        Choice.REPLAN: "with the rows moved that pay",
        Choice.FROM_SCRATCH: "with a plan from scratch",
        Choice.FULL_COPIES: "with a copy of each row on each rank",
    }[Choice(choice)]


def basis_sentence(judgement: "Judgement") -> str:
    """Return what the advice rests on, without a full stop."""
    samples = plural(judgement.samples, "sample")
    if judgement.source is not None:
        said = (
            f"Judged on {samples} that no plan was made from; steps that plans predict of other "
            "samples, such as those they were made from, do not compare with these"
        )
    else:
        from oper.analysis.wording import NOT_MEASURED

        said = f"{NOT_MEASURED}, but on the {samples} that the new plans were made from"
    return f"{said}; {judgement.reservation}" if judgement.reservation else said
