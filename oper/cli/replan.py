"""`oper replan`: a new plan from an older one, moving only rows for which that pays."""

from pathlib import Path
from typing import Any

import typer

from oper.base.formatting import format_bytes, format_duration, format_share, plural
from oper.cli.shared.command import ConfigurableCommand
from oper.cli.shared.console import emit, new_console, new_table
from oper.cli.shared.output_options import FORCE, JSON
from oper.cli.shared.progress import steps

_MOST_RANKS = 8


_EXAMPLES = """
oper replan plan windows@3 -o plan-new --horizon 100000
"""


def register(app: typer.Typer) -> None:
    """Add `oper replan`."""
    app.command("replan", cls=ConfigurableCommand, epilog=_EXAMPLES)(replan)


def replan(
    plan: Path = typer.Argument(metavar="PLAN", help="The plan folder to start from."),
    profile: str = typer.Argument(
        metavar="PROFILE", help="A newer profile of its tables, or a window: PROFILE@3."
    ),
    output: Path = typer.Option(
        ..., "-o", "--output", help="The plan folder to write.", metavar="FOLDER"
    ),
    horizon: int = typer.Option(
        10_000,
        "--horizon",
        min=1,
        help="Iterations within which a move must save what its bytes cost.",
        metavar="N",
    ),
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Make a new plan from an older one, moving few rows."""
    from oper.files.storage import check_output
    from oper.plan.plan import FORMAT
    from oper.planner.replan.replan import replan_and_save
    from oper.profiling.profile import Profile

    check_output(output, FORMAT, force)
    opened = Profile.load(profile, check=True)
    with steps("replan", 4) as step:
        made = replan_and_save(plan, opened, output, horizon, step, force)
    content = {"plan": str(output), "from": str(plan), "profile": profile, **made.to_json()}
    emit(as_json, content, lambda: _print(content), written=True)


def _print(content: dict[str, Any]) -> None:
    out = new_console()
    out.print(replan_sentence(content))
    out.print()
    table = new_table("plan", "iteration", "rows moved", "bytes moved", "time to move")
    table.add_row("as it was", format_duration(content["old_objective_seconds"]), "0", "0 B", "-")
    for label, seconds, moved in (
        ("replanned", content["objective_seconds"], content),
        ("from scratch", content["fresh_objective_seconds"], content["fresh"]),
    ):
        table.add_row(
            label,
            format_duration(seconds),
            f"{moved['moved_rows']:,}",
            format_bytes(moved["moved_bytes"]),
            format_duration(moved["seconds"]),
        )
    out.print(table)
    if not content["changed_rows"]:
        return
    if content["gain_share"] is not None and content["bytes_share"] is not None:
        out.print(
            f"{format_share(content['gain_share'], 1)} of the gain of a plan made from scratch, "
            f"for {format_share(content['bytes_share'])} of its bytes"
        )
    out.print(
        f"{plural(content['changed_rows'], 'row')} in moves.npy have other holders or slots; "
        f"{format_bytes(content['local_bytes'])} of them only change slots on their rank"
    )
    _print_links(out, content["bytes_by_link"])


def replan_sentence(content: dict[str, Any]) -> str:
    """What was gained, and by how much moving; or that nothing moves."""
    before, after = (
        format_duration(content[name]) for name in ("old_objective_seconds", "objective_seconds")
    )
    within = f"pays off within {content['horizon']:,} iterations (--horizon)"
    if not content["changed_rows"]:
        return (
            f"{content['plan']}: nothing moves, as no move {within}; under {content['profile']} an "
            f"iteration of {content['from']} takes {before}"
        )
    return (
        f"{content['plan']}: under {content['profile']} an iteration takes {after} instead of "
        f"{before} with {content['from']}, for moving {format_bytes(content['moved_bytes'])} once; "
        f"each move {within}"
    )


def _print_links(out: Any, matrix: list[list[float]]) -> None:
    """Bytes by link; with many ranks only the links with most bytes."""
    ranks = len(matrix)
    if ranks <= _MOST_RANKS:
        out.print("bytes sent to a rank (line) by another (column):")
        table = new_table("to \\ from", *(str(rank) for rank in range(ranks)))
        for reader, row in enumerate(matrix):
            cells = ["-" if r == reader else format_bytes(b) for r, b in enumerate(row)]
            table.add_row(str(reader), *cells)
        out.print(table)
        return
    links = [
        (matrix[to][source], source, to)
        for to in range(ranks)
        for source in range(ranks)
        if to != source and matrix[to][source]
    ]
    table = new_table("from", "to", "bytes", left=2)
    for amount, source, to in sorted(links, reverse=True)[:_MOST_RANKS]:
        table.add_row(str(source), str(to), format_bytes(amount))
    out.print(table)
    if len(links) > _MOST_RANKS:
        out.print(f"and {len(links) - _MOST_RANKS:,} more pairs of ranks; --json has them all")
