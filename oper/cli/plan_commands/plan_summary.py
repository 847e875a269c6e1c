"""A plan in a few lines, as `oper plan` prints it: content, time, proof, memory and next commands.

A user reads one predicted time, the step's. The transfer time, which the planner minimises, stands
next to its certificate only.
"""

from typing import TYPE_CHECKING

from oper.base.defaults import POOLED_GAIN
from oper.base.formatting import (
    at_most,
    format_bytes,
    format_duration,
    format_factor,
    format_percent,
    plural,
)
from oper.base.spoken import option, typed_path
from oper.cli.shared.console import facts_table, new_console, tell

if TYPE_CHECKING:
    from oper.analysis.plan_facts import Fit, PlanFigures
    from oper.cost.step_time import StepTime
    from oper.plan.plan import Plan
    from oper.planner.place_by_table import FetchChoice

_LABEL = 16  # columns of a label with the space after it
_SMALL = 1e-3  # a relative difference below which steps are called equal


def print_summary(figures: "PlanFigures", name: str, choice: "FetchChoice | None" = None) -> None:
    """Print the content and quality of a plan that is called `name`, and the `choice` of tables
    that are pooled, if there was one."""
    out = new_console()
    out.print(title(figures.plan, name))
    facts = summary(figures)
    if choice is not None:
        facts.insert(0, ("fetch", choice_text(choice)))
    out.print(facts_table([(f"{label:<{_LABEL - 2}}", text) for label, text in facts]))


def title(plan: "Plan", name: str) -> str:
    """Return the rows, ranks and work of a plan, in a sentence."""
    workload, pooled = plan.workload, len(plan.pooled_tables)
    fetches = f"{workload.fetch} fetches"
    if pooled and workload.fetch != "pooled":
        fetches += f", {plural(pooled, 'table')} pooled"
    tier = ""
    if plan.tier:
        tables = "all" if len(plan.tier) == len(plan.tables) else f"{len(plan.tier):,}"
        tier = f", {tables} in the hosts' memory,"
    return (
        f"{name}: {plural(int(plan.layout.rows.sum()), 'row')} of "
        f"{plural(len(plan.tables), 'table')}{tier} on {plural(plan.ranks, 'rank')} "
        f"({plan.topology.name}), for {workload.mode} with batches of "
        f"{plural(workload.batch_size, 'sample')}, {fetches}"
    )


def summary(figures: "PlanFigures") -> list[tuple[str, str]]:
    """Return the time, certificate, held-out figures and memory of a plan, as names and texts."""
    from oper.analysis.plan_facts import fit
    from oper.analysis.wording import simple_plans_compared

    plan = figures.plan
    compared = simple_plans_compared(plan)
    facts = []
    if plan.step_time is not None:
        facts.append(("predicted step", step_text(plan.step_time)))
    if compared is not None:
        facts.append(("compared", compared))
    facts.append(("certificate", _certificate(plan)))
    facts.append(("held out", _held_out(plan)))
    found = fit(plan)
    facts.append(("memory", _memory(found, plan.memories[0].cost.extra_memory_ratio)))
    if not found.fits:
        facts.append(
            (
                "INFEASIBLE",
                f"rank {found.over_rank} holds {format_bytes(found.over_bytes)} more than its "
                "capacity",
            )
        )
    return facts


def step_text(step: "StepTime") -> str:
    """Return the predicted time of a step, and its parts."""
    parts = {
        "memory": step.memory_seconds,
        "links": step.link_seconds,
        "latency": step.latency_seconds,
    }
    taken = ", ".join(f"{name} {format_duration(sec)}" for name, sec in parts.items() if sec)
    return format_duration(step.seconds) + (f" ({taken})" if taken else "")


def _certificate(plan: "Plan") -> str:
    from oper.analysis.wording import MADE_FOR

    seconds = f"transfer time {format_duration(plan.cost.objective_seconds)}"
    if plan.certificate is None:
        return f"{seconds}; nothing is proved of a plan that was put together by hand"
    if plan.certificate.certified_gap is None:
        return f"{seconds}; no lower bound is known"
    gap = at_most(plan.certificate.certified_gap)
    return f"{seconds}, {gap} above the lower bound for {MADE_FOR[plan.workload.mode]}"


def _held_out(plan: "Plan") -> str:
    """Return the step on data that the plan was not made from, compared with the predicted step."""
    from oper.analysis.wording import (
        HELD_OUT_DATA,
        METHOD_NAMES,
        WITHOUT_HELD_OUT,
        unread_sentence,
    )

    found = plan.held_out
    if found is None:
        unread = unread_sentence(plan)
        said = WITHOUT_HELD_OUT if unread is None else f"{WITHOUT_HELD_OUT}. {unread}"
        return said[:1].lower() + said[1:]
    said = f"step {format_duration(found.step_seconds)}"
    if plan.step_time is not None and plan.step_time.seconds:
        change = found.step_seconds / plan.step_time.seconds - 1
        if abs(change) < _SMALL:
            said += ", as predicted"
        elif change > 1:
            said += f", {format_factor(1 + change)} times the predicted one"
        else:
            said += f", {format_percent(abs(change))} {'longer' if change > 0 else 'shorter'}"
    slower = [
        f"; there {METHOD_NAMES[each.method]} is faster"
        for each in plan.simple_plans
        if each.fits
        and each.held_out_step_seconds is not None
        and each.held_out_step_seconds < found.step_seconds * (1 - _SMALL)
    ]
    data = HELD_OUT_DATA[found.source].removeprefix("the held-out ")
    gap = found.certified_gap
    if gap is None:
        bounded = "no lower bound is known for these data"
    else:
        above = f"at most {format_factor(1 + gap)} times" if gap > 1 else f"{at_most(gap)} above"
        bounded = f"its transfers {above} the lower bound for these data"
    return f"{data} ({plural(found.samples, 'sample')}): {said}; {bounded}{''.join(slower)}"


def _memory(found: "Fit", copied: float) -> str:
    """Return the bytes on the fullest rank, and the share of the tables' bytes in copies."""
    copies = f"copies take {format_percent(copied)} of the tables' bytes" if copied else "no copies"
    return (
        f"{format_bytes(found.held_bytes)} of {format_bytes(found.room_bytes)} on the fullest "
        f"rank; {copies}"
    )


def print_next(plan: "Plan", folder: str, profile: str) -> None:
    """Print commands that explain the plan in `folder`, and a script's line that uses it."""
    from oper.analysis.wording import shard_line, use

    page, typed = typed_path(f"{folder.rstrip('/')}.html"), typed_path(folder)
    for label, text in (
        ("explain it", f"oper report {typed} --profile {typed_path(profile)} -o {page}"),
        ("see each rank", f"oper plan show {typed}"),
        (f"{use(plan)} with it", shard_line(plan, f"oper.Plan.load({folder!r})")),
    ):
        tell(f"{label:<{_LABEL}}{text}")


def choice_text(choice: "FetchChoice") -> str:
    """Return the tables that are pooled, and what that gains and gives up."""
    if not choice.pooled_tables:
        return f"pooled tables would not make the step {format_percent(POOLED_GAIN)} shorter"
    return (
        f"{choice.pooled_tables} of {plural(choice.tables, 'table')} pooled: step "
        f"{format_percent(choice.share)} shorter ({format_duration(choice.unpooled_step_seconds)} "
        "without); gives up bit equality, torch.compile and batches in any order: "
        f"{option('--fetch', 'distinct')} keeps them"
    )
