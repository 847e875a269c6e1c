"""`oper plan check`: verify a plan's invariants from its files, replay a log through its maps."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oper.cli.shared.command import Command
from oper.cli.shared.console import emit, new_console
from oper.cli.shared.log_options import takes_log
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
    owner must serve what the plan says. The exit status is 1 if an invariant does not hold.
    """
    from oper.audit.check import check as check_plan
    from oper.audit.replay import replay, rows_of_log
    from oper.logs import LogOptions

    with steps("checking", total=2) as report:
        report("all rows")
        findings = check_plan(plan)
        if log:
            report("replaying the log")
            findings += replay(plan, rows_of_log(plan, log, LogOptions.of(reading)))
    wrong = [finding for finding in findings if not finding.ok]
    content = {
        "plan": str(plan),
        "ok": not wrong,
        "findings": [
            {"invariant": finding.invariant, "ok": finding.ok, "wrong": finding.wrong}
            for finding in findings
        ],
    }

    def text() -> None:
        out = new_console()
        failed = f"{len(wrong)} of {len(findings)} invariants do not hold"
        out.print(f"{plan}: {failed if wrong else f'all {len(findings)} invariants hold'}")
        for finding in [*wrong, *(finding for finding in findings if finding.ok)]:
            out.print(f"{'ok   ' if finding.ok else 'WRONG'} {finding.invariant}")
            if finding.wrong:
                out.print(f"      {finding.wrong}")

    emit(as_json, content, text)
    if wrong:
        raise typer.Exit(1)
