"""The `oper` command: one module a verb, gathered here.

A user's mistake (OperError) is one line on standard error and exit status 2, without a
traceback; Ctrl-C is exit status 130. Everything else is a defect and shows its traceback.
"""

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from oper import __version__
from oper.errors import OperError

VERBS = ("synth", "profile", "topology", "plan", "compare", "drift", "replan")

INTERRUPTED = 130  # the status that typer gives Ctrl-C


class InOrder(TyperGroup):
    """The commands in the order in which they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)


app = typer.Typer(
    name="oper",
    cls=InOrder,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Row-level sharding plans for embedding tables, with a certificate of quality.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
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


for _verb in VERBS:
    importlib.import_module(f"oper.cli.{_verb}").register(app)


def main() -> None:
    """Run the command line; the entry point of the `oper` script."""
    try:
        app(prog_name="oper")
    except OperError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("interrupted; nothing was left half-written", file=sys.stderr)
        raise
