"""Summaries of plans, profiles and results of commands, for notebooks and rich.

In: an object. Out: `Summary`: a title, facts and a table (oper/base/display.py, which shows it).
"""

from functools import singledispatch
from typing import Any

from oper.analysis.plan_differences import PlanDifferences
from oper.analysis.wording import (
    CHOICES,
    OUTDATED_VOCABULARIES,
    advice_words,
    judging_data,
    simple_plans_compared,
    step_columns,
    steps_of,
)
from oper.base.display import Summary
from oper.base.formatting import (
    format_bytes,
    format_duration,
    format_factor,
    format_gap,
    format_share,
    plural,
)
from oper.checker.findings import Findings
from oper.plan.plan import Plan
from oper.planner.compare import Comparison, MethodResult
from oper.planner.replan.drift import Drift, WindowDrift
from oper.planner.replan.replan_one_memory import Replanned
from oper.profiling.counter_arrays import RowCounts


@singledispatch
def summary_of(given: Any) -> Summary:
    """Return the summary of an object."""
    return Summary(repr(given))


@summary_of.register
def _plan(plan: Plan) -> Summary:
    """Return the prediction, the certificate, and the ranks."""
    cost, certificate, step = plan.cost, plan.certificate, plan.step_time
    gap = "not known" if certificate is None else format_gap(certificate.certified_gap)
    later = plan.held_out
    simple = simple_plans_compared(plan)
    return Summary(
        repr(plan)[1:-1],
        (
            ("predicted step", "-" if step is None else format_duration(step.seconds)),
            ("on data held out", _held_out(None if later is None else later.step_seconds)),
            ("transfer time", format_duration(cost.objective_seconds)),
            ("from optimal, at most", gap),
            *([] if simple is None else [("compared", simple)]),
            ("extra memory", format_share(cost.extra_memory_ratio)),
        ),
        ("rank", "memory", "transfer time"),
        [
            (str(rank), format_bytes(held), format_duration(seconds))
            for rank, (held, seconds) in enumerate(
                zip(cost.memory_bytes.tolist(), cost.rank_seconds.tolist(), strict=True)
            )
        ],
    )


def _held_out(seconds: float | None) -> str:
    return "not measured" if seconds is None else format_duration(seconds)


@summary_of.register
def _profile(counts: RowCounts) -> Summary:
    """Return the counts, and the tables."""
    return Summary(
        f"{counts.rows:,} rows of {len(counts.tables)} tables, counted in {counts.samples:,} "
        "samples",
        headers=("table", "rows", "dim", "bytes", "ids"),
        rows=[
            (t.name, f"{t.rows:,}", str(t.dim), format_bytes(t.rows * t.row_bytes), t.ids.kind)
            for t in counts.tables
        ],
    )


@summary_of.register
def _comparison(comparison: Comparison) -> Summary:
    """Return a line for each method."""
    ours = None if comparison.oper is None else comparison.oper.step_seconds
    return Summary(
        f"{len(comparison.methods)} methods on {comparison.ranks} ranks ({comparison.topology}), "
        f"{comparison.workload.mode}, batches of {comparison.workload.batch_size:,} samples",
        headers=("method", "step", "times oper's", "held out", "fits", "fullest rank", "gap"),
        rows=[_method(name, result, ours) for name, result in comparison.methods.items()],
    )


def _method(name: str, found: MethodResult, ours: float | None) -> tuple[str, ...]:
    seconds = found.step_seconds
    if found.cost is None or seconds is None:
        return name, "-", "-", "-", "-", "-", found.reason or ""
    return (
        name,
        format_duration(seconds),
        format_factor(seconds / ours) if ours else "-",
        _held_out(found.held_out_step_seconds),
        "yes" if found.fits else "no",
        format_bytes(int(found.cost.memory_bytes.max())),
        "-" if found.certified_gap is None else format_gap(found.certified_gap),
    )


@summary_of.register
def _drift(drift: Drift) -> Summary:
    """Return the advice, the predicted steps, and the tables, those that lose most first."""
    judgement, made = drift.judgement, drift.made_step_seconds
    tables = sorted(drift.tables, key=lambda table: -table.worse_seconds)
    steps = [
        (f"step, {CHOICES[each.choice]}", format_duration(each.step_seconds))
        for each in judgement.candidates
    ]
    if made is not None:
        steps.insert(0, ("step when the plan was made", format_duration(made)))
    seen = ", which the other plans were made from" if judgement.source is None else ""
    reason = f" ({advice_words(drift.advice)})"
    if drift.outdated_vocabularies:
        reason = f". {OUTDATED_VOCABULARIES}"
    return Summary(
        f"Verdict: {drift.verdict}{reason}. A step takes "
        f"{format_share(judgement.worse)} longer than with the best other plan, on "
        f"{judging_data(judgement.source, 'the newest data')}{seen}",
        tuple(steps),
        ("table", "transfer time lost", "now", "from scratch"),
        [
            (
                table.table,
                format_duration(table.worse_seconds),
                format_duration(table.mean_seconds),
                format_duration(table.fresh_mean_seconds),
            )
            for table in tables
        ],
    )


@summary_of.register
def _windows(drift: WindowDrift) -> Summary:
    """Return the cost of not re-planning, and a line for each window."""
    judged = [window.drift.judgement for window in drift.windows]
    columns = step_columns([each.step_seconds for each in judged])
    return Summary(
        f"Verdict: {drift.verdict}. Not re-planning costs {format_duration(drift.cost_seconds)}, "
        f"{format_share(drift.cost_share)} of the time with the best other plan",
        headers=("window", "samples", "step", *columns, "longer", "advice"),
        rows=[
            (
                f"@{number}",
                f"{window.samples:,}",
                *steps_of(judgement.step_seconds, columns),
                format_share(judgement.worse),
                advice_words(window.drift.advice, window.too_small),
            )
            for number, (window, judgement) in enumerate(zip(drift.windows, judged, strict=True))
        ],
    )


@summary_of.register
def _replanned(made: Replanned) -> Summary:
    """Return the candidates of the judgement, with the moves that lead to each."""
    judgement = made.judgement
    candidates = () if judgement is None else judgement.candidates
    advice = "" if judgement is None else f". Advice: {advice_words(judgement.advice)}"
    return Summary(
        f"{plural(made.moves.changed_rows, 'row')} moved, as far as that pays within "
        f"{made.horizon:,} steps{advice}",
        headers=("plan", "step (predicted)", "bytes moved", "time to move"),
        rows=[
            (
                CHOICES[each.choice],
                format_duration(each.step_seconds),
                format_bytes(each.moved_bytes),
                format_duration(each.moving_seconds),
            )
            for each in candidates
        ],
    )


@summary_of.register
def _differences(found: PlanDifferences) -> Summary:
    """Return the figures of both plans; how many rows are held elsewhere."""
    old, new = found.old, found.new
    changed = "not compared" if found.rows_changed is None else f"{found.rows_changed:,}"
    figures = (
        ("ranks", f"{old.ranks:,}", f"{new.ranks:,}"),
        (
            "transfer time",
            format_duration(old.objective_seconds),
            format_duration(new.objective_seconds),
        ),
        ("fullest rank", format_bytes(old.memory_bytes), format_bytes(new.memory_bytes)),
        (
            "extra memory",
            format_share(old.extra_memory_ratio),
            format_share(new.extra_memory_ratio),
        ),
    )
    return Summary(
        f"Two plans for {plural(found.rows, 'row')}",
        (("rows that are held elsewhere", changed),),
        ("", "old", "new"),
        figures,
    )


@summary_of.register
def _findings(findings: Findings) -> Summary:
    """Return whether all invariants hold, and each of them."""
    wrong = findings.wrong
    title = f"{len(wrong)} of {len(findings)} invariants do not hold"
    return Summary(
        title if wrong else f"all {len(findings)} invariants hold",
        headers=("invariant", "holds", "what is wrong"),
        rows=[
            (finding.invariant, "yes" if finding.ok else "no", finding.wrong or "")
            for finding in findings
        ],
    )
