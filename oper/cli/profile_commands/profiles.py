"""`oper profiles`: show what profiles counted, and sum those of parts of a log."""

import time
from pathlib import Path

import typer

from oper.cli.profile_commands.profile_text import OUTPUT, print_profile, report_written
from oper.cli.shared.command import Command, CommandGroup
from oper.cli.shared.console import emit
from oper.cli.shared.output_options import FORCE, JSON

_SHOW_EXAMPLES = """
oper profiles show profile
oper profiles show windows@3
"""
_MERGE_EXAMPLES = """
oper profiles merge windows@0 windows@1 -o first-half
"""


def register(app: typer.Typer) -> None:
    """Add `oper profiles show` and `oper profiles merge`."""
    verbs = typer.Typer(
        cls=CommandGroup,
        help="Show what profiles counted; sum them.",
        epilog=_SHOW_EXAMPLES + _MERGE_EXAMPLES,
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    verbs.command("show", cls=Command, epilog=_SHOW_EXAMPLES)(show)
    verbs.command("merge", cls=Command, epilog=_MERGE_EXAMPLES)(merge)
    app.add_typer(verbs, name="profiles")


def show(
    profile: str = typer.Argument(
        metavar="PROFILE", help="A profile, or one of its windows: PROFILE@3."
    ),
    check: bool = typer.Option(False, "--check", help="Verify all checksums first."),
    as_json: bool = JSON,
) -> None:
    """Print what a profile counted."""
    from oper.profiling.profile import Profile
    from oper.profiling.profile_summary import summarise

    summary = summarise(Profile.load_windows(profile, check=check))
    content = {"profile": profile, **summary.to_dict()}
    emit(as_json, content, lambda: print_profile(profile, summary))


def merge(
    profiles: list[str] = typer.Argument(
        metavar="PROFILE", help="Profiles of parts of one log, for the same tables."
    ),
    output: Path = OUTPUT,
    force: bool = FORCE,
    as_json: bool = JSON,
) -> None:
    """Sum profiles of parts of a log."""
    from oper.files.storage import atomic_folder
    from oper.profiling.profile import FORMAT, Profile
    from oper.profiling.profile import merge as add_up

    started = time.perf_counter()
    opened = [Profile.load(name, check=True) for name in profiles]
    with atomic_folder(output, FORMAT, force) as folder:
        merged = add_up(opened, folder)
        merged.save_vocabularies(folder)
        merged.write(folder)
    report_written(output, [merged], time.perf_counter() - started, as_json)
