"""`oper plan check`: verify a plan's invariants from its files, replay a log through its maps."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oper.cli.plan_commands.check_text import print_check
from oper.cli.shared.command import Command
from oper.cli.shared.console import emit
from oper.cli.shared.log_arguments import takes_log
from oper.cli.shared.output_options import JSON
from oper.cli.shared.progress import steps

if TYPE_CHECKING:
    from oper.logs import LogKeywords


_EXAMPLES = """
oper plan check plan
oper plan check plan clicks.parquet
"""


def add_to(verbs: typer.Typer) -> None:
    """Add the command to `oper plan`."""
    verbs.command("check", cls=Command, epilog=_EXAMPLES)(takes_log(check))


def check(
    plan: Path = typer.Argument(metavar="PLAN", help="A plan folder."),
    log: list[Path] | None = typer.Argument(
        None, metavar="LOG", help="The log that its profile counted."
    ),
    as_json: bool = JSON,
    *,
    reading: "LogKeywords",
) -> None:
    """Verify a plan from its files; with its log, replay that.

    Checks every invariant from the files alone. A log is read through the address maps, and each
    owner must serve what the plan says; of pooled tables the vectors between nodes are counted. The
    exit status is 1 if an invariant does not hold.
    """
    from oper.checker.check import check as check_plan
    from oper.logs import LogOptions

    with steps("checking", total=2) as report:
        found = check_plan(plan, log or (), LogOptions.of(reading), report)

    emit(as_json, {"plan": str(plan), **found.to_json()}, lambda: print_check(found, str(plan)))
    if not found.ok:
        raise typer.Exit(1)
