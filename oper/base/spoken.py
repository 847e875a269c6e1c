"""Names of settings in sentences that both Python and the command line show, and paths in commands.

A sentence of an error, a warning or a printed plan names flags (`--hold-out 20%`) if the `oper`
command prints it, and arguments (`hold_out='20%'`) if a script does.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

_to_terminal = False  # of the process: threads that a command starts warn in its words too


@contextlib.contextmanager
def by_command_line() -> Iterator[None]:
    """Make sentences name flags within the block, because the `oper` command prints them."""
    global _to_terminal
    before, _to_terminal = _to_terminal, True
    try:
        yield
    finally:
        _to_terminal = before


def spoken(command_line: str, python: str) -> str:
    """Return the words for whoever reads the sentence: a user of the command, or of Python."""
    return command_line if _to_terminal else python


def option(flag: str, value: object = None) -> str:
    """Return the name of a setting, with a value or without, in the form to type: `--ids vocab`, or
    `ids='vocab'`. True is the value of a flag that takes none: `--no-header`."""
    name = flag.removeprefix("--").replace("-", "_")
    if value is None:
        return spoken(flag, f"`{name}`")
    text = f"{value:g}" if isinstance(value, float) else str(value)
    typed = shlex.quote(text) if text.isprintable() else repr(text)
    return spoken(flag if value is True else f"{flag} {typed}", f"{name}={value!r}")


def typed_path(path: Path | str) -> str:
    """Return a path as a word of a command that can be copied into a shell.

    `./` comes before a name that begins with a dash, which commands would take for an option.
    Control characters, and bytes that are not UTF-8, are escaped.
    """
    text = str(path)
    text = f"./{text}" if text.startswith("-") else text
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"  # bash and zsh read it


def _escaped(character: str) -> str:
    if character in "'\\":
        return f"\\{character}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(character))


def all_figures(verbose: bool = False) -> str:
    """Return who has the figures that a text leaves out; with `verbose` -v prints them too."""
    return spoken("--json and -v have" if verbose else "--json has", "to_json() has")
