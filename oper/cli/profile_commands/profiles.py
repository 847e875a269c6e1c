"""`oper profiles`: show what profiles counted, and sum those of parts of a log."""

import time
from pathlib import Path

import typer

from oper.cli.profile_commands.profile_text import content_of, print_profile
from oper.cli.profile_commands.report import OUTPUT, report
from oper.cli.shared.console import emit
from oper.cli.shared.output_options import FORCE, JSON


def register(app: typer.Typer) -> None:
    """Add `oper profiles show` and `oper profiles merge`."""
    verbs = typer.Typer(
        help="Show what profiles counted; sum them.", no_args_is_help=True, rich_markup_mode=None
    )
    verbs.command("show")(show)
    verbs.command("merge")(merge)
    app.add_typer(verbs, name="profiles")


def show(
    profile: str = typer.Argument(help="A profile, or one of its windows: PROFILE@3."),
    check: bool = typer.Option(False, "--check", help="Verify all checksums first."),
    as_json: bool = JSON,
) -> None:
    """Print what a profile counted."""
    from oper.profiling.profile import Profile

    content = content_of(profile, Profile.open_parts(profile, check=check))
    emit(as_json, content, lambda: print_profile(content))


def merge(
    profiles: list[str] = typer.Argument(help="Profiles of parts of one log, for the same tables."),
    output: Path = OUTPUT,
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Sum profiles of parts of a log."""
    from oper.files.storage import atomic_folder
    from oper.profiling.profile import FORMAT, Profile
    from oper.profiling.profile import merge as add_up

    started = time.perf_counter()
    opened = [Profile.open(name, check=True) for name in profiles]
    with atomic_folder(output, FORMAT, force) as folder:
        merged = add_up(opened, folder)
        merged.save_vocabularies(folder)
        merged.write(folder)
    report(output, [merged], time.perf_counter() - started, as_json)
