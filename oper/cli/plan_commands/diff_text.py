"""The differences of two plans, as `oper plan diff` prints them."""

from typing import Any

from oper.base.formatting import (
    format_bytes,
    format_duration,
    format_percent,
    format_share,
    plural,
)
from oper.cli.plan_commands.plan_text import facts_table
from oper.cli.shared.console import new_console, new_table

_MOST_TABLES = 20
_FIGURES = {
    "predicted iteration": ("objective_seconds", format_duration),
    "copies, of the tables' bytes": ("extra_memory_ratio", format_percent),
    "memory of the fullest rank": ("memory_bytes", format_bytes),
    "traffic of all ranks": ("communication_bytes", format_bytes),
    "threshold of partitions": ("threshold", format_percent),
}


def print_diff(content: dict[str, Any], old_name: str, new_name: str) -> None:
    """Print how many rows are elsewhere, the figures of both plans, and the tables that changed."""
    out = new_console()
    out.print(diff_sentence(content, old_name, new_name))
    out.print()
    table = new_table("", "old", "new", "change")
    for label, (name, form) in _FIGURES.items():
        old, new = (content["figures"][name][which] for which in ("old", "new"))
        table.add_row(label, form(old), form(new), _change(old, new))
    out.print(table)
    tiers = [
        (f"tier of the {which} plan", ", ".join(names))
        for which, names in content["tier"].items()
        if names
    ]
    if tiers:
        out.print(facts_table(tiers))
    changed = [t for t in content["tables"] if t["rows_changed"]]
    if not changed:
        return
    changed.sort(key=lambda t: -int(t["rows_changed"]))
    out.print()
    made = new_table("table", "rows", "changed", "more copies", "fewer copies")
    for entry in changed[:_MOST_TABLES]:
        names = ("rows", "rows_changed", "rows_more_copies", "rows_fewer_copies")
        made.add_row(entry["table"], *(f"{entry[name]:,}" for name in names))
    out.print(made)
    if len(changed) > _MOST_TABLES:
        out.print(f"and {len(changed) - _MOST_TABLES:,} more tables; --json has them all")


def diff_sentence(content: dict[str, Any], old: str, new: str) -> str:
    """How many rows are elsewhere, and what that does to the iteration."""
    ranks = content["ranks"]
    if content["rows_changed"] is None:
        return (
            f"{old} is for {plural(ranks['old'], 'rank')} and {new} for "
            f"{plural(ranks['new'], 'rank')}: their rows are not compared"
        )
    if not content["rows_changed"]:
        return f"{new} holds every row where {old} does"
    return (
        f"{new} holds {content['rows_changed']:,} of {plural(content['rows'], 'row')} "
        f"on other ranks than {old}, or on more or fewer "
        f"({format_bytes(content['bytes_changed'])})"
    )


def _change(old: float, new: float) -> str:
    """The new value over the old one, as a signed share."""
    if not old:
        return "-"
    share = format_share(new / old - 1)
    return share if share.startswith(("-", "0.00%")) else f"+{share}"
