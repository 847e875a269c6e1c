"""Options of every command with a result: where it goes and in which form."""

import typer

FORCE = typer.Option(
    False,
    "--force",
    help="Replace what oper wrote at -o.",
)
JSON = typer.Option(False, "--json", help="Print one JSON object.")
VERBOSE = typer.Option(False, "-v", "--verbose", help="Print more details.")
QUIET = typer.Option(False, "-q", "--quiet", help="Print no progress and no warnings.")
