"""Options of every command with a result: where it goes and in which form."""

import typer

FORCE = typer.Option(
    False,
    "--force",
    help="Replace what is at -o: a file, or a folder in which oper wrote everything.",
)
JSON = typer.Option(False, "--json", help="Print one JSON object.")
VERBOSE = typer.Option(False, "-v", "--verbose", help="Print more details.")
QUIET = typer.Option(
    False, "-q", "--quiet", help="No progress and no warnings: only the result, if it is no file."
)
