"""Page of two plans: side by side, with the moves between them."""

from dataclasses import replace
from typing import Any

from oper.analysis.plan_differences import PlanDifferences, diff
from oper.analysis.wording import work
from oper.base.formatting import (
    format_bytes,
    format_duration,
    format_factor,
    format_gap,
    format_share,
    plural,
)
from oper.plan.plan import Plan
from oper.plan.rows_by_kind import rows_by_kind
from oper.report import sentences
from oper.report.charts.chart import Chart
from oper.report.glossary import words_of
from oper.report.plan_page import LEFT_OUT, memory_of_ranks, work_of_ranks
from oper.report.render_page import Page, Section
from oper.report.table_list import Cell, SortableTable


def two_plans_page(old: Plan, new: Plan, names: tuple[str, str]) -> Page:
    """Return the page of two plans for the same tables, called `names`.

    Raises OperError if they are for different tables.
    """
    changes = diff(old, new)
    sections = [
        Section(
            "plans",
            "The two plans",
            _headline(old, new, names, changes),
            emphasis=True,
            charts=_charts((old, new), names),
        ),
        Section("figures", "Figure by figure", table=_figures(old, new, names)),
        _moved(changes, names),
        Section("left-out", LEFT_OUT, points=sentences.left_out(new)),
        Section("words", "Glossary", words=words_of(new, [])),
    ]
    return Page(f"{names[0]} and {names[1]}", "Two sharding plans for embedding tables", sections)


def _headline(old: Plan, new: Plan, names: tuple[str, str], changes: PlanDifferences) -> list[str]:
    before, after = old.cost.objective_seconds, new.cost.objective_seconds
    said = [
        f"Both plans place {plural(int(old.layout.rows.sum()), 'row')} of "
        f"{plural(len(old.tables), 'embedding table')}: {names[0]} on "
        f"{plural(old.ranks, 'rank')} ({old.topology.name}), {names[1]} on "
        f"{plural(new.ranks, 'rank')} ({new.topology.name})."
    ]
    if old.workload != new.workload:
        said.append(
            "They are for different work, so their times are not compared: transfers of "
            f"{work(old.workload)} take {format_duration(before)} a step, "
            f"{work(new.workload)} {format_duration(after)}."
        )
    else:
        said.append(
            f"With {names[1]}, {_longer(before, after)}. {_COUNTS[old.profile == new.profile]}"
        )
    if changes.rows_changed is None or changes.bytes_changed is None:
        said.append("Their numbers of ranks differ, so single rows are not compared.")
    else:
        said.append(
            f"{changes.rows_changed:,} of {changes.rows:,} rows are held by other ranks, or "
            f"by more or fewer: {format_bytes(changes.bytes_changed)}."
        )
    return said


_COUNTS = {
    True: "Both were priced by the same row counts.",
    False: "Each was priced by the row counts that it was made from, which differ: `oper drift` "
    "prices a plan by others.",
}


def _longer(before: float, after: float) -> str:
    """Return the transfer time of the second plan, compared with the first."""
    times = f"{format_duration(after)} a step instead of {format_duration(before)}"
    if before and after > 2 * before:
        return f"transfers take {format_factor(after / before)} times as long: {times}"
    if not before or abs(after / before - 1) < 5e-5:
        return f"transfers take as long: {format_duration(after)} a step"
    word = "less" if after < before else "more"
    return f"transfers take {format_share(abs(1 - after / before))} {word} time: {times}"


def _charts(plans: tuple[Plan, Plan], names: tuple[str, str]) -> list[Chart]:
    """Return charts of memory and time of the ranks under each plan, in which equal heights are
    equal amounts."""
    bars = [[*memory_of_ranks(plan, rows_by_kind(plan)), work_of_ranks(plan)] for plan in plans]
    tops: dict[str, float] = {}
    for bars_of_kind in (*bars[0], *bars[1]):
        tops[bars_of_kind.key] = max(tops.get(bars_of_kind.key, 0.0), bars_of_kind.top)
    return [
        replace(
            bars_of_kind,
            key=f"{bars_of_kind.key}-{number}",
            title=f"{name}: {bars_of_kind.title.lower()}",
        ).chart(tops[bars_of_kind.key])
        for number, (of_plan, name) in enumerate(zip(bars, names, strict=True))
        for bars_of_kind in of_plan
    ]


def _figures(old: Plan, new: Plan, names: tuple[str, str]) -> SortableTable:
    def row(name: str, values: list[Any], shown: Any) -> tuple[Cell, ...]:
        return Cell(name), *(Cell("-" if v is None else shown(v)) for v in values)

    plans = (old, new)
    kinds = [rows_by_kind(plan) for plan in plans]
    predictions = [plan.cost for plan in plans]
    moved = [prediction.communication_bytes for prediction in predictions]
    gaps = [plan.certificate and plan.certificate.certified_gap for plan in plans]
    rows = [
        row("transfer time", [p.objective_seconds for p in predictions], format_duration),
        row("above the proved bound, at most", gaps, format_gap),
        row("fullest rank", [float(p.memory_bytes.max()) for p in predictions], format_bytes),
        row("extra memory", [p.extra_memory_ratio for p in predictions], format_share),
        row("rows fetched, all ranks", [m.fetch for m in moved], format_bytes),
        row("gradients, all ranks", [m.gradient for m in moved], format_bytes),
        row("AllReduce, all ranks", [m.allreduce for m in moved], format_bytes),
        row("replicated rows", [int(k.replicated.sum()) for k in kinds], "{:,}".format),
        row("listed rows", [int(k.listed.sum()) for k in kinds], "{:,}".format),
        row("striped rows", [int(k.striped.sum()) for k in kinds], "{:,}".format),
    ]
    return SortableTable(("figure", *names), rows, "", noun="figure")


def _moved(changes: PlanDifferences, names: tuple[str, str]) -> Section:
    if changes.tables is None:
        said = "The numbers of ranks differ, so single rows are not compared."
        return Section("moved", "What moved", [said])
    tables = [table for table in changes.tables if table.rows_changed]
    tables.sort(key=lambda table: -table.rows_changed)
    if not tables:
        return Section("moved", "What moved", ["No row is held by other ranks."])
    rows = [
        (
            Cell(table.table),
            *(
                Cell(f"{count:,}", count)
                for count in (
                    table.rows,
                    table.rows_changed,
                    table.rows_more_copies,
                    table.rows_fewer_copies,
                )
            ),
            Cell(format_bytes(table.bytes_changed), table.bytes_changed),
        )
        for table in tables
    ]
    headers = ("table", "rows", "held elsewhere", "more copies", "fewer copies", "bytes")
    most = tables[0]
    said = (
        f"Most rows moved in {most.table}: {most.rows_changed:,} of {most.rows:,}. "
        f"{names[1]} has such a row on other ranks than {names[0]}, or on more or fewer."
    )
    return Section("moved", "What moved", [said], table=SortableTable(headers, rows, said))
