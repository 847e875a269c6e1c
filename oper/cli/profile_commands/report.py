"""What a command reports of the profile that it wrote."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from oper.cli.profile_commands.profile_text import content_of, left_out_line, print_profile
from oper.cli.shared.console import emit, say

if TYPE_CHECKING:
    from oper.profiling.profile import Profile

OUTPUT = typer.Option(..., "-o", "--output", help="The profile folder to write.", metavar="FOLDER")


def report(output: Path, counted: "list[Profile]", seconds: float, as_json: bool) -> None:
    """Print what the profile folder `output`, or each of its windows, counted."""
    content = content_of(str(output), counted)
    if content["left_out"]:
        say(left_out_line(content["left_out"]))
    content["seconds"] = seconds
    content["accesses_per_second"] = content["accesses"] / seconds
    emit(as_json, content, lambda: print_profile(content), written=True)
