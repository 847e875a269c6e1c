"""The `oper` command, with one module for each verb.

An OperError is printed as one line on standard error, without a traceback, and the exit status is
2. Ctrl-C, SIGTERM and SIGHUP end the command with 128 plus the signal's number, after it has
removed what it was writing. Any other exception is a defect and shows its traceback.
"""

import contextlib
import errno
import functools
import importlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from oper import __version__
from oper.base import open_files, process_signals
from oper.base.errors import OperError, OperNotice, OperWarning
from oper.base.spoken import by_command_line
from oper.cli.shared.command import CommandGroup
from oper.cli.shared.console import complain, say, warn
from oper.cli.shared.usage_errors import UsageError, usage_error

# In the order in which they are used.
VERBS = {
    "profile": "profile_commands.profile",
    "profiles": "profile_commands.profiles",
    "topology": "topology",
    "plan": "plan_commands.plan",
    "compare": "compare",
    "doctor": "doctor",
    "drift": "drift",
    "replan": "replan",
    "report": "report",
    "checkpoint": "checkpoint",
    "top": "top",
    "simulate": "simulate",
    "synth": "synth",
}

_START = """
oper profile clicks.parquet -o profile --columns 'C*'
oper plan profile --topology dgx-a100 --batch-size 65536 -o plan
oper plan show plan
"""

_PAPERS = (
    "docs/architecture.md says where in the source the methods of OPER, HET, Herald (LAIA), ESD "
    "and FAE are."
)

INTERRUPTED = 130  # the status that typer gives Ctrl-C


class InOrder(CommandGroup):
    """The commands in the order in which they are used, and the three to start with."""

    examples_heading = "Start here"

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        formatter.write_paragraph()
        formatter.write_text(_PAPERS)


app = typer.Typer(
    name="oper",
    cls=InOrder,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Row-level sharding plans for embedding tables, with a certificate of quality.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=_START,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oper {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    pass


for _module in VERBS.values():
    importlib.import_module(f"oper.cli.{_module}").register(app)


@functools.cache
def command() -> Any:
    """Return the commands with their options, built once rather than for each call of `main`."""
    return typer.main.get_command(app)


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Within the block a warning of oper is one line, without the place in the source."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, OperNotice):
                say(str(message))
            elif issubclass(category, OperWarning):
                warn(str(message))
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        warnings.simplefilter("always", OperWarning)
        yield


def main() -> None:
    """Run the command line; the entry point of the `oper` script."""
    try:
        with process_signals.raised(), by_command_line(), _warnings_as_lines():
            status = command()(prog_name="oper", standalone_mode=False)
        sys.exit(status or 0)  # of typer.Exit, or of Ctrl-C
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help(), file=sys.stderr)  # type: ignore[attr-defined]
        else:
            complain(str(usage_error(error)))
        sys.exit(2)
    except OperError as error:
        complain(str(error))
        sys.exit(2)
    except OSError as error:
        if open_files.are_too_many(error):
            complain(f"{error.strerror}; {open_files.REMEDY}")
        elif error.errno == errno.ENAMETOOLONG:
            complain(f"{str(error.filename)[:80]}…: {error.strerror}")
        elif isinstance(error, PermissionError) and error.filename is not None:
            complain(
                f"{error.filename}: {error.strerror}; allow it (chmod), or choose another path"
            )
        else:
            raise
        sys.exit(2)
    except process_signals.Stopped as stopped:
        # Standard error may be closed: SIGHUP means that the terminal is gone.
        with contextlib.suppress(OSError):
            print(f"stopped by {stopped}; nothing was left half-written", file=sys.stderr)
        sys.exit(128 + stopped.number)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("interrupted; nothing was left half-written", file=sys.stderr)
        raise
