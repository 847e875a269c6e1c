"""Usage errors in one line: the value that was expected, the one that was typed, and the remedy.

The parser's own errors are turned into the form that all errors of oper have. The option, its
value and the command come from the error and the words that were typed.
"""

import difflib
import re
from collections.abc import Sequence
from typing import Any

import typer

from oper.base.errors import OperError

UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # which typer does not export


def usage_error(error: Any) -> OperError:
    """Return an error of typer's in the options, as an OperError that says what to give."""
    path = error.ctx.command_path if error.ctx is not None else "oper"
    text = _text(error, path, getattr(error, "typed", ()))
    return OperError(" ".join(text.split()))


def expected(parameter: Any, message: str) -> str:
    """Return the values that a parameter takes by the message that refused one: `a number from 1 to
    64`."""
    if choices := re.search(r"is not one of (.*?)\.?$", message):
        names = re.findall(r"'([^']*)'", choices[1])
        return f"{', '.join(names[:-1])} or {names[-1]}"
    if not re.search(r"integer|number|greater|less", message):
        return message.removeprefix("Value error, ").rstrip(".")
    whole = "a whole number" if _is_whole(parameter) else "a number"
    low, high = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if low is not None and high is not None:
        return f"{whole} from {low:,} to {high:,}"
    return f"{whole} of at least {low:,}" if low is not None else whole


def near(name: str, known: Sequence[str]) -> str:
    """`; did you mean show?`, or nothing where no known name is near."""
    bare = {full.strip("-"): full for full in known}  # dashes are alike in all options
    found = difflib.get_close_matches(name.strip("-"), bare, n=1)
    return f"; did you mean {bare[found[0]]}?" if found else ""


def _text(error: Any, path: str, typed: Sequence[str]) -> str:
    parameter: Any = getattr(error, "param", None)
    message = error.message
    kind = type(error).__name__
    help_text = f"`{path} --help` says more"
    if kind == "MissingParameter":
        if parameter.param_type_name == "argument":
            return f"{path}: {parameter.metavar} is missing; {_form(error)}, and {help_text}"
        takes = f" {parameter.metavar}" if parameter.metavar else ""
        return f"{path}: {parameter.opts[-1]}{takes} is missing; {help_text}"
    if kind == "NoSuchOption":
        options = [name for p in error.ctx.command.get_params(error.ctx) for name in p.opts]
        hint = near(error.option_name, options) or _elsewhere(error)
        return f"{path}: no option {error.option_name}{hint or f'; `{path} --help-all` lists them'}"
    if parameter is not None and kind == "BadParameter":
        name = getattr(parameter, "opts", ["an argument"])[-1]
        value = _value(parameter, typed)
        given = "" if value is None else f" {value!r}"
        return f"{name}{given}: expected {expected(parameter, message)}"
    if kind == "BadOptionUsage":
        if "requires an argument" in message:
            found = [p for p in error.ctx.command.params if error.option_name in p.opts]
            what = found[0].metavar if found and found[0].metavar else "one"
            return f"{path}: {error.option_name}: expected a value ({what}), got none"
        return f"{path}: {error.option_name}: takes no value; leave out what follows the ="
    if unexpected := re.search(r"unexpected extra argument\(?s?\)? \((.*)\)", message):
        return f"{path}: {unexpected[1]!r} is too much; {_form(error)}"
    if unknown := re.search(r"No such command '(.*?)'\.", message):
        group = error.ctx.command
        known = [n for n in group.list_commands(error.ctx) if not group.commands[n].hidden]
        hint = near(unknown[1], known) or f"; there are {', '.join(known)}"
        return f"{path}: no command {unknown[1]!r}{hint}"
    return f"{path}: {message[:1].lower()}{message[1:].rstrip('.')}; {help_text}"


def _elsewhere(error: Any) -> str:
    """`; oper profile has one`, where one other command has the option that this one lacks."""
    root = error.ctx.find_root()
    commands = getattr(root.command, "commands", {})
    having = [
        name
        for name, command in commands.items()
        if any(error.option_name in parameter.opts for parameter in command.params)
    ]
    return f"; `{root.command_path} {having[0]}` has one" if len(having) == 1 else ""


def _form(error: Any) -> str:
    pieces = error.ctx.command.collect_usage_pieces(error.ctx)
    return f"the form is {' '.join([error.ctx.command_path, *pieces])}"


def _is_whole(parameter: Any) -> bool:
    return parameter.type_descriptor.annotation is int


def _value(parameter: Any, typed: Sequence[str]) -> str | None:
    """Return the last value that was typed for an option."""
    found = None
    for number, word in enumerate(typed):
        for name in parameter.opts:
            if word == name:
                found = typed[number + 1] if number + 1 < len(typed) else None
            elif name.startswith("--") and word.startswith(f"{name}="):
                found = word.removeprefix(f"{name}=")
            elif not name.startswith("--") and word.startswith(name) and len(word) > len(name):
                found = word.removeprefix(name)
    return found
