"""`oper doctor`: what would not fit, before a job: plan, model, memory, ranks, versions."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oper.base.formatting import plural
from oper.cli.shared.command import Command
from oper.cli.shared.console import emit, new_console
from oper.cli.shared.log_arguments import takes_log
from oper.cli.shared.output_options import JSON

if TYPE_CHECKING:
    from oper.logs import LogKeywords

_EXAMPLES = """
oper doctor plan model.py:make
oper doctor plan model.py:make --topology dgx-h100
oper doctor plan model.py:make --batch clicks.parquet
"""


def register(app: typer.Typer) -> None:
    """Add `oper doctor`."""
    app.command("doctor", cls=Command, epilog=_EXAMPLES)(takes_log(doctor))


def doctor(
    plan: Path = typer.Argument(metavar="PLAN", help="A plan folder."),
    model: str = typer.Argument(
        metavar="FILE.py:FUNCTION",
        help="A Python file and the function in it that returns the model. It takes nothing, or "
        "the plan; tables may be on the meta device.",
    ),
    topology: str | None = typer.Option(
        None,
        "--topology",
        metavar="NAME|FILE",
        help="What the devices hold. [default: the plan's topology, if it is a preset, or the "
        "devices here]",
    ),
    batch: Path | None = typer.Option(
        None,
        "--batch",
        metavar="FILE",
        help="Samples with the row ids that the script gives the model, in any format of logs: "
        "are they numbered as the profile's?",
    ),
    profile: str | None = typer.Option(
        None,
        "--profile",
        metavar="PROFILE",
        help="With --batch: the plan's profile, whose counts tell more than the plan's own.",
    ),
    as_json: bool = JSON,
    *,
    reading: "LogKeywords",
) -> None:
    """Say before a job what would not fit.

    Compares the plan with the model's tables, the memory of every rank with what it needs, and
    ranks and versions with what is here; with --batch, how often ids are read with how often the
    profile counted them. The exit status is 1 if something does not fit.
    """
    from oper.diagnosis.doctor import doctor as diagnose

    given: LogKeywords = reading if batch is not None else {}
    found = diagnose(plan, model, topology, batch=batch, profile=profile, **given)

    def text() -> None:
        out = new_console()
        for finding in found.findings:
            level = "WRONG" if finding.level == "problem" else finding.level
            out.print(f"{level:<5} {finding.about}: {finding.says}")
            if finding.do:
                out.print(f"      to do: {finding.do}")
        wrong = len(found.problems)
        verdict = f"{plural(wrong, 'thing')} would not fit" if wrong else "all fits"
        out.print(f"{plan} and {model}: {verdict}")

    emit(as_json, {"plan": str(plan), "model": model, **found.to_dict()}, text)
    if found.problems:
        raise typer.Exit(1)
