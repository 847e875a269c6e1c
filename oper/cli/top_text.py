"""Text of `oper top`: the verdict, predicted and counted figures, and the last periods."""

import datetime
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from oper.base.formatting import (
    format_bytes,
    format_digits,
    format_duration,
    format_number,
    format_share,
    plural,
    printable,
)
from oper.cli.shared.console import new_table

if TYPE_CHECKING:
    from oper.monitoring.period_report import PeriodReport

SHOWN_PERIODS = 6
_MOST_RANKS = 8  # of more, those that serve most
_MOST_LINKS = 5


def view(run: str, reports: "list[PeriodReport]") -> Any:
    """Return the newest of a run's reports, in order, and those before it in a line each."""
    from rich.console import Group
    from rich.text import Text

    if not reports:
        return Text(printable(f"{run}: no period has ended yet"))
    newest = reports[-1]
    ended = datetime.datetime.fromtimestamp(newest.ended).isoformat(" ", "seconds")
    head = (
        f"{run}: {plural(newest.last_iteration, 'iteration')}; period {newest.period:,} of "
        f"{newest.iterations:,} ended {ended}, {newest.counted_iterations:,} counted row by row"
    )
    parts = [Text(printable(head)), Text(printable(_capital(newest.judged()))), Text()]
    parts += [_totals(newest), Text(), _ranks(newest)]
    links = _links(newest)
    if links is not None:
        parts += [Text(), links]
    parts += [Text(), _periods(reports)]
    return Group(*parts)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _totals(report: "PeriodReport") -> Any:
    table = new_table("an iteration", "plan", "counted")
    predicted, counted = report.predicted, report.counted
    table.add_row("samples", f"{report.plan_batch_size:,}", format_digits(report.batch_size, 6))
    table.add_row(
        "lookups, min/max over ranks",
        format_share(predicted.lookups_dob, 1),
        format_share(counted.lookups_dob, 1),
    )
    table.add_row(
        "accesses to rows with copies",
        format_share(predicted.replica_share, 1),
        format_share(counted.replica_share, 1),
    )
    moved = (predicted.communication_bytes, counted.communication_bytes)
    for name, of in (
        ("rows fetched from other ranks", "fetch"),
        ("gradients sent to other ranks", "gradient"),
        ("AllReduce of copies", "allreduce"),
    ):
        table.add_row(name, *(format_bytes(getattr(each, of)) for each in moved))
    return table


def _ranks(report: "PeriodReport") -> Any:
    predicted, counted = report.predicted, report.counted
    table = new_table("rank", "lookups: plan", "counted", "rows read from others: plan", "counted")
    shown = list(range(len(counted.lookups)))
    if len(shown) > _MOST_RANKS:
        shown = np.argsort(-counted.lookups, kind="stable")[:_MOST_RANKS].tolist()
    for rank in shown:
        table.add_row(
            f"{rank:,}",
            format_number(float(predicted.lookups[rank])),
            format_number(float(counted.lookups[rank])),
            format_bytes(float(predicted.link_bytes[rank].sum())),
            format_bytes(float(counted.link_bytes[rank].sum())),
        )
    if len(shown) < len(counted.lookups):
        left_out = len(counted.lookups) - len(shown)
        table.caption = f"and {plural(left_out, 'rank')} that serve less; --json has all"
    return table


def _links(report: "PeriodReport") -> Any | None:
    """Return the links that carry most; None without links."""
    counted = report.counted.link_bytes
    ranks = len(counted)
    busiest = np.argsort(-counted, axis=None, kind="stable")[:_MOST_LINKS].tolist()
    busiest = [link for link in busiest if counted.flat[link] > 0]
    if not busiest or ranks <= 2:
        return None
    table = new_table("busiest links, reader and source", "plan", "counted")
    for link in busiest:
        reader, source = divmod(link, ranks)
        table.add_row(
            f"{reader:,} from {source:,}",
            format_bytes(float(report.predicted.link_bytes[reader, source])),
            format_bytes(float(counted[reader, source])),
        )
    return table


def _periods(reports: "list[PeriodReport]") -> Any:
    """Return a table of the newest run: a file may have periods of earlier runs, which
    began at 0 too."""
    first = max(
        (n for n in range(1, len(reports)) if reports[n].period <= reports[n - 1].period), default=0
    )
    from oper.analysis.wording import step_columns, steps_of

    made_plans = any(_plan_of(report) for report in reports[first:])
    more = ["new plan"] if made_plans else []
    judgements = [report.judgement for report in reports[first:]]
    steps = [[] if found is None else found.step_seconds for found in judgements]
    columns = step_columns(steps)
    table = new_table("period", "iterations", "running plan", *columns, "gain", "verdict", *more)
    for report, found, of_plans in zip(reports[first:], judgements, steps, strict=True):
        gain = "-" if found is None else format_duration(found.gain_seconds)
        figures = [*steps_of(of_plans, columns), gain]
        plan = [printable(_plan_of(report))] if made_plans else []
        table.add_row(
            f"{report.period:,}", f"{report.iterations:,}", *figures, report.verdict, *plan
        )
    return table


def _plan_of(report: "PeriodReport") -> str:
    """Return the new plan that a period made or whose rows move, with its steps; "" if none."""
    moving = report.moving
    name = PurePath(moving.plan if moving else report.new_plan).name
    if moving is None or not moving.steps:
        return name
    return f"{name}, {moving.steps_made:,}/{moving.steps:,}"
