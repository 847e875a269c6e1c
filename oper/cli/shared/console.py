"""Output of commands: tables and JSON on standard output, warnings and errors on standard error.

Names come from logs and may hold anything. They become printable here, before the width of a table
is measured; JSON escapes by itself.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from oper.base.formatting import printable

# Columns. The same in a pipe and on a wide terminal, so that outputs can be compared.
WIDTH = 100

_QUIET = ContextVar("quiet", default=False)
_INTO: ContextVar[io.StringIO | None] = ContextVar("into", default=None)


@contextlib.contextmanager
def quietly(quiet: bool) -> Iterator[None]:
    """Within the block, if `quiet`, print no progress, no warning and no text about a file that was
    written, as --quiet asks."""
    token = _QUIET.set(quiet)
    try:
        yield
    finally:
        _QUIET.reset(token)


def is_quiet() -> bool:
    """Return whether a command was asked to print its result alone."""
    return _QUIET.get()


class _PlainConsole(Console):
    def print(self, *things: Any, **options: Any) -> None:
        """Print; except on a terminal, without the spaces at the ends of lines that pad tables."""
        if self.is_terminal:
            super().print(*things, **options)
            return
        with self.capture() as captured:
            super().print(*things, **options)
        lines = (line.rstrip(" ") for line in captured.get().split("\n"))
        super().print("\n".join(lines), end="", soft_wrap=True)

    def render_str(self, text: str, **options: Any) -> Text:  # what rich does with all text
        return super().render_str(printable(text, kept="\n"), **options)


class _PlainTable(RichTable):
    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row, in which a line end belongs to a name, unlike in a header."""
        texts = (printable(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*texts, **options)


def new_console() -> Console:
    """Return a console for standard output, at most 100 columns wide, or for `printed`."""
    if (into := _INTO.get()) is not None:
        plain: Any = {"color_system": None, "force_terminal": False, "force_jupyter": False}
        return _PlainConsole(
            file=into, width=WIDTH, highlight=False, markup=False, emoji=False, **plain
        )
    real = Console()
    width = min(real.width, WIDTH) if real.is_terminal else WIDTH
    # No markup: a name from a log may look like a[b].
    return _PlainConsole(width=width, highlight=False, markup=False, emoji=False)


def printed(show: Callable[[], None]) -> str:
    """Return what a function prints on the console, as in a pipe, without the last line end."""
    into = io.StringIO()
    token = _INTO.set(into)
    try:
        show()
    finally:
        _INTO.reset(token)
    return into.getvalue().removesuffix("\n")


def warn(sentence: str) -> None:
    """Print a warning on standard error; standard output has only the result."""
    say(f"warning: {sentence}")


def say(sentence: str) -> None:
    """Print a sentence on standard error, unless only the result is asked for."""
    if not is_quiet():
        _print_error_line(sentence)


def complain(sentence: str) -> None:
    """Print why a command fails on standard error, as one line."""
    _print_error_line(f"error: {sentence}")


def _print_error_line(sentence: str) -> None:
    print(printable(sentence), file=sys.stderr)


def tell(sentence: str) -> None:
    """Print a sentence on standard output as one line, however long, which can be copied."""
    new_console().print(sentence, soft_wrap=True)


def warn_of_unused(context: typer.Context, needs: dict[str, str]) -> None:
    """Warn of options that were given without the option that they depend on."""
    for option, needed in needs.items():
        source = context.get_parameter_source(option)
        if source is not None and source.name == "COMMANDLINE" and not context.params[needed]:
            name = option.replace("_", "-")
            warn(f"--{name}: has no effect without --{needed.replace('_', '-')}")


def emit(
    as_json: bool, content: dict[str, Any], text: Callable[[], None], written: bool = False
) -> None:
    """Print `content` as one JSON object on standard output, or call `text` to print a text.

    `written`: whether the result is a file or folder, so that --quiet needs no text about it.
    """
    if as_json:
        json.dump(content, sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    elif not (written and is_quiet()):
        text()


def new_table(*headers: str, title: str | None = None, left: int = 1) -> RichTable:
    """Return a table with its first `left` columns left-aligned and the others right-aligned."""
    made = _PlainTable(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    for index, header in enumerate(headers):
        justify = "left" if index < left else "right"
        made.add_column(header, justify=justify, no_wrap=index >= left)  # type: ignore[arg-type]
    return made


def facts_table(facts: Sequence[tuple[str, str]]) -> RichTable:
    """Return a table of names on the left and sentences on the right, which wrap."""
    table = RichTable.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for name, sentence in facts:
        table.add_row(name, sentence)
    return table
