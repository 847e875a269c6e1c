"""Output of commands: tables and JSON on standard output, warnings on standard error."""

import json
import sys
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console
from rich.table import Table as RichTable

# Columns. The same in a pipe and on a wide terminal, so that outputs can be compared.
WIDTH = 100


def new_console() -> Console:
    """A console for standard output, at most 100 columns wide."""
    real = Console()
    width = min(real.width, WIDTH) if real.is_terminal else WIDTH
    # No markup: a name from a log may look like a[b].
    return Console(width=width, highlight=False, markup=False, emoji=False)


def warn(sentence: str) -> None:
    """Print a warning on standard error; standard output has only the result."""
    print(f"warning: {sentence}", file=sys.stderr)


def warn_of_unused(context: typer.Context, needs: dict[str, str]) -> None:
    """Warn of options that were given without the option that they depend on."""
    for option, needed in needs.items():
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE" and not context.params[needed]:
            name = option.replace("_", "-")
            warn(f"--{name}: has no effect without --{needed.replace('_', '-')}")


def emit(as_json: bool, content: dict[str, Any], text: Callable[[], None]) -> None:
    """Print `content` as one JSON object on standard output, or call `text` to print a text."""
    if as_json:
        json.dump(content, sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    else:
        text()


def new_table(*headers: str, title: str | None = None, left: int = 1) -> RichTable:
    """A table with its first `left` columns left-aligned and the others right-aligned."""
    made = RichTable(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for index, header in enumerate(headers):
        justify = "left" if index < left else "right"
        made.add_column(header, justify=justify, no_wrap=index >= left)  # type: ignore[arg-type]
    return made
