"""Text of a judgement, for `oper drift` and `oper replan`: data, advice, reservation."""

from typing import TYPE_CHECKING

from oper.base.formatting import format_bytes, format_duration, format_percent, format_share, plural
from oper.base.spoken import option, spoken, typed_path

if TYPE_CHECKING:
    from oper.planner.replan.judgement import Judgement


def advice_sentence(judgement: "Judgement", plan: str, profile: str, made: str = "") -> str:
    """Return the advice and its predicted steps. `made` is the replanned plan, if it was made
    already."""
    from oper.analysis.wording import judging_data
    from oper.planner.replan.judgement import Choice

    keep, best = judgement.keep, judgement.best
    preposition = "under" if judgement.source is None else "on"
    data = f"{preposition} {judging_data(judgement.source, profile)}"
    before, after = format_duration(keep.step_seconds), format_duration(best.step_seconds)
    tolerated = f"{option('--worse')} tolerates {format_percent(judgement.threshold)}"
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


def command_to_run(
    judgement: "Judgement", plan: str, profile: str, ranks: int, made: str = ""
) -> str | None:
    """Return a line with the command that follows the advice; None if the plan stays, or `made` is
    the plan that is advised."""
    from oper.planner.replan.judgement import Choice

    if judgement.advice == Choice.KEEP or (made and judgement.advice == Choice.REPLAN):
        return None
    if judgement.advice == Choice.REPLAN:
        typed = f"oper replan {typed_path(plan)} {typed_path(profile)} -o NEW"
        return f"Run: {spoken(typed, 'oper.replan(plan, profile)')}"
    typed, called = f"oper plan {typed_path(profile)} -o NEW", "oper.make_plan(profile, …)"
    if judgement.advice == Choice.FULL_COPIES:
        typed += f" --extra-memory {100 * (ranks - 1)}%"
        called = f"oper.make_plan(profile, …, oper.PlanSettings(extra_memory={ranks - 1}))"
    return f"Run, with the other options of {plan}: {spoken(typed, called)}"


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
        said = f"Judged on {samples} that no plan was made from"
    else:
        from oper.analysis.wording import NOT_MEASURED

        said = f"{NOT_MEASURED}, but on the {samples} that the new plans were made from"
    return f"{said}; {judgement.reservation}" if judgement.reservation else said
