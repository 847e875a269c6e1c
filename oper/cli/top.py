"""`oper top`: what a monitor says of a running job, as it says it."""

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from oper.base.errors import OperError
from oper.cli.shared.command import Command
from oper.cli.shared.console import emit, new_console
from oper.cli.shared.output_options import JSON
from oper.cli.top_text import SHOWN_PERIODS, view

if TYPE_CHECKING:
    from oper.monitoring.period_report import PeriodReport

_LOOK_SECONDS = 0.5  # between two looks at the file

_EXAMPLES = """
oper top run.jsonl
oper top run.jsonl --once
oper top run.jsonl --json
"""


def register(app: typer.Typer) -> None:
    """Add `oper top`."""
    app.command("top", cls=Command, epilog=_EXAMPLES)(top)


def top(
    run: Path = typer.Argument(
        metavar="RUN", help="The file that was named to oper.monitor(…, jsonl=FILE)."
    ),
    once: bool = typer.Option(
        False, "--once", help="Print the newest state and end, as in a pipe; not follow the file."
    ),
    as_json: bool = JSON,
) -> None:
    """Follow a monitored job: its traffic, its plan, the verdict.

    On a terminal the view follows the file until Ctrl-C.
    """
    from oper.monitoring.json_lines import GrowingReports

    reports = GrowingReports(run)
    last = reports.new(SHOWN_PERIODS)
    follows = sys.stdout.isatty() and not once and not as_json
    if follows:
        _follow(run, reports, last)
        return
    if not last:
        raise OperError(
            f"{run}: has no report yet; a monitor writes one when a period ends, or when "
            "monitor.report() is called"
        )
    emit(as_json, last[-1].to_json(), lambda: new_console().print(view(str(run), last)))


def _follow(run: Path, reports: Any, last: "list[PeriodReport]") -> None:
    """Show the newest reports until Ctrl-C."""
    from rich.live import Live

    with (
        contextlib.suppress(KeyboardInterrupt),  # which is how this ends
        Live(view(str(run), last), console=new_console(), auto_refresh=False) as live,
    ):
        while True:
            time.sleep(_LOOK_SECONDS)
            last = [*last, *reports.new(SHOWN_PERIODS)][-SHOWN_PERIODS:]
            live.update(view(str(run), last), refresh=True)
