"""The differences of two plans, as `oper plan diff` prints them."""

from typing import TYPE_CHECKING

from oper.base.formatting import (
    format_bytes,
    format_duration,
    format_percent,
    format_share,
    plural,
)
from oper.base.spoken import all_figures, option
from oper.cli.shared.console import facts_table, new_console, new_table

if TYPE_CHECKING:
    from oper.analysis.plan_differences import PlanDifferences

_MOST_TABLES = 20


def print_diff(found: "PlanDifferences", old_name: str, new_name: str) -> None:
    """Print how many rows are elsewhere, the figures of both plans, and the tables that changed."""
    from oper.analysis.wording import work

    out, old, new = new_console(), found.old, found.new
    out.print(diff_sentence(found, old_name, new_name))
    out.print()
    table = new_table("", "old", "new", "change")
    for label, form, before, after in (
        ("transfer time", format_duration, old.objective_seconds, new.objective_seconds),
        (
            "copies, of the tables' bytes",
            format_percent,
            old.extra_memory_ratio,
            new.extra_memory_ratio,
        ),
        ("memory of the fullest rank", format_bytes, old.memory_bytes, new.memory_bytes),
        ("traffic of all ranks", format_bytes, old.communication_bytes, new.communication_bytes),
        ("threshold of partitions", format_percent, old.threshold, new.threshold),
    ):
        if before is not None and after is not None:
            table.add_row(label, form(before), form(after), _change(before, after))
    out.print(table)
    if not found.same_work:
        out.print(
            f"They are for different work ({work(old.workload)}; {work(new.workload)}), so their "
            f"times and traffic do not compare: plan both with the same {option('--mode')}, "
            f"{option('--fetch')} and {option('--batch-size')}"
        )
    elif not found.same_data:
        out.print(
            "They were made from different profiles, so their times and traffic differ by the data "
            "too: `oper drift` prices the old plan on the new plan's profile"
        )
    tiers = [
        (f"tier of the {which} plan", ", ".join(plan.tier))
        for which, plan in (("old", old), ("new", new))
        if plan.tier
    ]
    if tiers:
        out.print(facts_table(tiers))
    changed = [t for t in found.tables or [] if t.rows_changed]
    if not changed:
        return
    changed.sort(key=lambda t: -t.rows_changed)
    out.print()
    made = new_table("table", "rows", "changed", "more copies", "fewer copies")
    for t in changed[:_MOST_TABLES]:
        counts = (t.rows, t.rows_changed, t.rows_more_copies, t.rows_fewer_copies)
        made.add_row(t.table, *(f"{count:,}" for count in counts))
    out.print(made)
    if len(changed) > _MOST_TABLES:
        out.print(f"and {len(changed) - _MOST_TABLES:,} more tables; {all_figures()} them all")


def diff_sentence(found: "PlanDifferences", old: str, new: str) -> str:
    """Return the number of rows that changed ranks and their bytes, as a sentence."""
    changed, changed_bytes = found.rows_changed, found.bytes_changed
    if changed is None or changed_bytes is None:
        return (
            f"{old} is for {plural(found.old.ranks, 'rank')} and {new} for "
            f"{plural(found.new.ranks, 'rank')}: their rows are not compared"
        )
    if not changed:
        return f"{new} holds every row where {old} does"
    return (
        f"{new} holds {changed:,} of {plural(found.rows, 'row')} on other ranks than {old}, or on "
        f"more or fewer ({format_bytes(changed_bytes)})"
    )


def _change(old: float, new: float) -> str:
    """Return the new value over the old one, as a signed share."""
    if not old:
        return "-"
    share = format_share(new / old - 1)
    return share if share.startswith(("-", "0.00%")) else f"+{share}"
