"""`oper report`: a plan, or two of them side by side, as one HTML page."""

from pathlib import Path

import typer

from oper.base.errors import OperError
from oper.base.formatting import format_bytes
from oper.cli.shared.command import Command
from oper.cli.shared.console import emit, new_console
from oper.cli.shared.output_options import FORCE, JSON
from oper.cli.shared.progress import steps

_EXAMPLES = """
oper report plan --profile profile -o plan.html
oper report plan other-plan -o two-plans.html
"""


def register(app: typer.Typer) -> None:
    """Add `oper report`."""
    app.command("report", cls=Command, epilog=_EXAMPLES)(report)


def report(
    plan: list[Path] = typer.Argument(
        metavar="PLAN", help="A plan folder, or two to put side by side."
    ),
    output: Path = typer.Option(
        ..., "-o", "--output", metavar="FILE", help="The HTML file to write."
    ),
    profile: str | None = typer.Option(
        None,
        "--profile",
        metavar="PROFILE",
        help="The profile that the plan was made from: for accesses, skew, time by kind of row, "
        "and what more memory would do.",
    ),
    compare: Path | None = typer.Option(
        None, "--compare", metavar="FILE", help="A file with what `oper compare --json` printed."
    ),
    drift: list[Path] = typer.Option(
        [],
        "--drift",
        metavar="FILE",
        help="A file with what `oper drift --json` printed; several may be given.",
    ),
    counters: Path | None = typer.Option(
        None,
        "--counters",
        metavar="FILE",
        help="A file with what `oper.counters` counted in a run, as examples/train_dlrm.py "
        "--counters writes it.",
    ),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Write a page that explains a plan, or compares two."""
    from oper.report.write_report import write_report, write_two_plans_report

    if len(plan) > 2:
        raise OperError(f"PLAN: expected one, or two to compare side by side, got {len(plan)}")
    missing: list[str] = []
    if len(plan) == 2:
        for name, value in (
            ("profile", profile),
            ("compare", compare),
            ("drift", drift),
            ("counters", counters),
        ):
            if value:
                raise OperError(
                    f"--{name}: is for a page of one plan, and {plan[0]} and {plan[1]} were given; "
                    "leave it out, or write a page of each"
                )
        with steps("report", total=2) as step:
            write_two_plans_report(plan, output, force, step)
    else:
        with steps("report", total=5) as step:
            step("plan")
            missing = write_report(
                plan[0],
                output,
                profile,
                compare,
                drift,
                counters,
                str(plan[0]),
                force,
                step,
            )
    content = {"report": str(output), "bytes": output.stat().st_size}
    size = format_bytes(output.stat().st_size)

    def text() -> None:
        out = new_console()
        out.print(f"{output}: open it in a browser ({size})")
        for option in missing:
            out.print(f"it could show more with {option}")

    emit(as_json, content, text, written=True)
