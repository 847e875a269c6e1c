"""`oper plan show`, `diff` and `explain`: the content of plans, as text and as JSON."""

from pathlib import Path

import typer

from oper.cli.plan_commands.diff_text import print_diff
from oper.cli.plan_commands.plan_text import print_plan
from oper.cli.plan_commands.row_text import print_row
from oper.cli.shared.command import Command
from oper.cli.shared.console import emit
from oper.cli.shared.output_options import JSON, VERBOSE

_SHOW_EXAMPLES = """
oper plan show plan
oper plan show plan --profile profile
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
    profile: Path | None = typer.Option(
        None,
        "--profile",
        help="The profile that the plan was made from: it has the accesses of striped rows.",
        metavar="FOLDER",
    ),
    verbose: bool = VERBOSE,
    as_json: bool = JSON,
) -> None:
    """Print a plan's decisions, cost and quality."""
    from oper.analysis.plan_facts import PlanFigures
    from oper.analysis.row_facts import check_profile
    from oper.plan.plan import Plan
    from oper.profiling.profile import Profile

    loaded = Plan.load(plan)
    accesses = None
    if profile is not None:
        opened = Profile.load(profile)
        check_profile(loaded, opened)
        accesses = opened.accesses_of_tables
    figures = PlanFigures.of(loaded, accesses)
    content = {
        "plan": str(plan),
        **figures.to_json(),
        "tables": len(loaded.tables),
        "topology": loaded.topology.name,
        "profile": loaded.profile,
    }

    emit(as_json, content, lambda: print_plan(figures, str(plan), verbose))


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
    verbose: bool = VERBOSE,
    as_json: bool = JSON,
) -> None:
    """Print where a row is and why, and how often it was accessed."""
    from oper.analysis.row_facts import explain as explain_row
    from oper.plan.plan import Plan
    from oper.profiling.profile import Profile

    counted_by = None if profile is None else Profile.load(profile)
    found = explain_row(Plan.load(plan), table, row, counted_by)

    emit(as_json, found.to_json(), lambda: print_row(found, verbose))


def diff(
    old: Path = typer.Argument(metavar="OLD", help="A plan folder."),
    new: Path = typer.Argument(metavar="NEW", help="Another plan for the same tables."),
    as_json: bool = JSON,
) -> None:
    """Print the differences of the second plan."""
    from oper.analysis.plan_differences import diff as diff_plans
    from oper.plan.plan import Plan

    found = diff_plans(Plan.load(old), Plan.load(new))

    emit(as_json, found.to_json(), lambda: print_diff(found, str(old), str(new)))
