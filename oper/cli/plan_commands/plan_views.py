"""`oper plan show`, `diff` and `explain`: the content of plans, as text and as JSON."""

from pathlib import Path

import typer

from oper.base.formatting import format_bytes, format_duration
from oper.cli.plan_commands.plan_text import facts_table, print_plan
from oper.cli.shared.command import Command
from oper.cli.shared.console import emit, new_console, new_table
from oper.cli.shared.output_options import JSON, VERBOSE

_SHOW_EXAMPLES = """
oper plan show plan
"""
_DIFF_EXAMPLES = """
oper plan diff plan other-plan
"""
_EXPLAIN_EXAMPLES = """
oper plan explain plan --table C1 --row 7
oper plan explain plan --table C1 --row 7 --profile profile
"""


def add_to(verbs: typer.Typer) -> None:
    """Add the three commands to `oper plan`."""
    verbs.command("show", cls=Command, epilog=_SHOW_EXAMPLES)(show)
    verbs.command("diff", cls=Command, epilog=_DIFF_EXAMPLES)(diff)
    verbs.command("explain", cls=Command, epilog=_EXPLAIN_EXAMPLES)(explain)


def show(
    plan: Path = typer.Argument(metavar="PLAN", help="A plan folder."),
    verbose: bool = VERBOSE,
    as_json: bool = JSON,
) -> None:
    """Print a plan's decisions, cost and quality."""
    from oper.plan.plan import load_plan
    from oper.plan.rows_by_kind import rows_by_kind

    loaded = load_plan(plan)
    layout = loaded.layout
    content = {
        "plan": str(plan),
        **loaded.figures_to_json(),
        **loaded.certificate,
        "asked": loaded.settings,
        "tables": len(loaded.tables),
        **rows_by_kind(loaded).to_json(loaded.tables),
        "owner_accesses": loaded.owner_accesses.tolist(),
        "replica_accesses": loaded.replica_accesses,
        "explicit_rows": layout.listed,
        "address_map_bytes_per_row": layout.bitmap_bytes_per_row(),
        "partitions": loaded.partitions,
        **({"tier": loaded.tier_names} if loaded.tier else {}),
        "topology": loaded.topology.name,
        "profile": loaded.profile,
    }

    emit(as_json, content, lambda: print_plan(content, loaded.topology, verbose))


def explain(
    plan: Path = typer.Argument(metavar="PLAN", help="A plan folder."),
    table: str = typer.Option(..., "--table", help="The table's name.", metavar="NAME"),
    row: int = typer.Option(
        ..., "--row", help="The row number, after the table's id rule.", metavar="N"
    ),
    profile: Path | None = typer.Option(
        None,
        "--profile",
        help="The profile that the plan was made from: it has every row's count.",
        metavar="FOLDER",
    ),
    as_json: bool = JSON,
) -> None:
    """Print where a row is and why, and how often it was accessed."""
    from oper.audit.explain import explain as explain_row
    from oper.plan.plan import load_plan
    from oper.profiling.profile import Profile

    counted_by = None if profile is None else Profile.open(profile)
    content = explain_row(load_plan(plan), table, row, counted_by)

    def text() -> None:
        out = new_console()
        out.print(f"row {row:,} of table {table}")
        accesses, most = content["accesses"], content["accesses_at_most"]
        if accesses is not None:
            counted = f"{accesses:,} in the profile"
        elif content["kind"] == "replicated":
            counted = (
                f"at least {content['accesses_at_least']:,}, the fewest of the table's rows on all "
                "ranks; --profile has the count"
            )
        else:
            counted = "not listed in the plan" + (
                "" if most is None else f"; at most {most:,}, the fewest of the table's listed rows"
            )
        facts = [("accesses", counted)]
        if content["partition"] is not None:
            facts.append(("partition", f"{content['partition']:,}, in order of accesses from 0"))
        facts.append(("kind", content["kind"]))
        if content["in_tier"]:
            facts.append(("memory", "the host's: the table is in the tier"))
        if content["owner"] is not None:
            facts.append(("owner", f"rank {content['owner']}"))
        else:
            facts.append(("copies on", f"ranks {_ranges(content['replicas'])}"))
        slots = ", ".join(f"{s:,} on rank {r}" for r, s in list(content["slots"].items())[:4])
        facts.append(("slots", slots + (", …" if len(content["slots"]) > 4 else "")))
        facts.append(("why", content["why"]))
        out.print(facts_table(facts))

    emit(as_json, content, text)


def diff(
    old: Path = typer.Argument(metavar="OLD", help="A plan folder."),
    new: Path = typer.Argument(metavar="NEW", help="Another plan for the same tables."),
    as_json: bool = JSON,
) -> None:
    """Print the differences of the second plan."""
    from oper.audit.diff import diff as diff_plans
    from oper.plan.plan import load_plan

    content = diff_plans(load_plan(old), load_plan(new))

    def text() -> None:
        out = new_console()
        figures = content["figures"]
        shown = {
            "predicted iteration": ("objective_seconds", format_duration),
            "extra memory": ("extra_memory_ratio", "{:.3%}".format),
            "threshold": ("threshold", "{:.4%}".format),
            "fullest rank": ("memory_bytes", format_bytes),
            "traffic, all ranks": ("communication_bytes", format_bytes),
        }
        facts = [
            (label, f"{form(figures[name]['old'])} -> {form(figures[name]['new'])}")
            for label, (name, form) in shown.items()
        ]
        for name, names in content["tier"].items():
            if names:
                facts.append((f"tier of the {name} plan", ", ".join(names)))
        out.print(facts_table(facts))
        if content["rows_changed"] is None:
            ranks = content["ranks"]
            out.print(
                f"the plans are for {ranks['old']:,} and {ranks['new']:,} ranks: their rows are "
                "not compared"
            )
            return
        out.print(
            f"{content['rows_changed']:,} of {content['rows']:,} rows are held by other ranks, or "
            f"by more or fewer ({format_bytes(content['bytes_changed'])})"
        )
        changed = [t for t in content["tables"] if t["rows_changed"]]
        changed.sort(key=lambda t: -int(t["rows_changed"]))
        if changed:
            made = new_table("table", "rows", "changed", "more copies", "fewer copies")
            for entry in changed[:20]:
                names = ("rows", "rows_changed", "rows_more_copies", "rows_fewer_copies")
                made.add_row(entry["table"], *(f"{entry[name]:,}" for name in names))
            out.print(made)
            if len(changed) > 20:
                out.print(f"and {len(changed) - 20} more tables; --json has them all")

    emit(as_json, content, text)


def _ranges(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2, 5'."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in spans)
