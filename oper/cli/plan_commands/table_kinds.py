"""What a plan did to each table: its rows by kind, as a table of `oper plan`."""

from typing import Any

from oper.base.formatting import format_bytes, format_share
from oper.cli.shared.console import new_table

_MOST_TABLES = 14
_SHOWN_TABLES = 12  # of more


def tables_table(content: dict[str, Any], verbose: bool) -> tuple[Any, int]:
    """The largest tables first, and how many are left out; with `verbose` none."""
    tables = sorted(content["tables_by_kind"], key=lambda t: -int(t["memory_bytes"]))
    shown = tables
    if not verbose and len(tables) > _MOST_TABLES:
        shown = tables[:_SHOWN_TABLES]
    total = sum(content["owner_accesses"]) + content["replica_accesses"]
    made = new_table("table", "rows", "memory", "accesses", "replicated", "listed", "striped")
    for table in shown:
        made.add_row(
            table["table"],
            f"{table['rows']:,}",
            format_bytes(table["memory_bytes"]),
            _accesses(table, total),
            *(f"{table[f'{kind}_rows']:,}" for kind in ("replicated", "listed", "striped")),
        )
    return made, len(tables) - len(shown)


def _accesses(table: dict[str, Any], total: int) -> str:
    """The table's share of all accesses, of which a plan without its profile has no counts of
    striped rows."""
    if not total:
        return "-"
    if "accesses" in table:
        return format_share(table["accesses"] / total, 1)
    share = format_share(table["listed_accesses"] / total, 1)
    if not table["striped_rows"]:
        return share
    return f"≥ {share}" if table["listed_accesses"] else "-"


def tables_text(content: dict[str, Any], left_out: int) -> list[str]:
    """What the table leaves out, and what its columns are."""
    kinds = {kind: sum(t[f"{kind}_rows"] for t in content["tables_by_kind"]) for kind in _KINDS}
    rows = max(sum(kinds.values()), 1)
    parts = [
        f"{kind}: {what} ({format_share(kinds[kind] / rows, 1)} of all rows)"
        for kind, what in _KINDS.items()
        if kinds[kind]
    ]
    more = f"and {left_out:,} more, smaller; --json and -v have them all"
    legend = "; ".join(parts)
    uncounted = any(t["striped_rows"] and "accesses" not in t for t in content["tables_by_kind"])
    return [*([more] if left_out else []), legend, *([_UNCOUNTED] if uncounted else [])]


_KINDS = {
    "replicated": "a copy on several ranks",
    "listed": "on the rank that was chosen for it",
    "striped": "over the ranks in turn, as it is seldom read",
}
_UNCOUNTED = "accesses: share of all; ≥: without those of striped rows, for which give --profile"
