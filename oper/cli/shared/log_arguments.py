"""The options of all commands that read a log: columns, rows, missing and bad ids."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal

import typer

from oper.cli.shared.command import READING

PARAMETER = "reading"
_KIND = inspect.Parameter.KEYWORD_ONLY

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "columns": (
        list[str] | None,
        typer.Option(
            None,
            "--columns",
            metavar="NAMES",
            help="Columns of ids, by name or pattern: 'C*'.",
        ),
    ),
    "dense": (
        list[str] | None,
        typer.Option(
            None,
            "--dense",
            metavar="NAMES",
            help="Columns of numbers that are not ids.",
            rich_help_panel=READING,
        ),
    ),
    "label": (
        str | None,
        typer.Option(
            None,
            "--label",
            help="The column of the label.",
            metavar="NAME",
            rich_help_panel=READING,
        ),
    ),
    "time": (
        str | None,
        typer.Option(
            None, "--time", help="The column of the time.", metavar="NAME", rich_help_panel=READING
        ),
    ),
    "missing": (
        str | None,
        typer.Option(
            None,
            "--missing",
            help="A value that means no id, in addition to nulls: -1.",
            metavar="VALUE",
        ),
    ),
    "rows": (
        str | None,
        typer.Option(
            None,
            "--rows",
            help="A part of the log: 0:64000, or 0:80%.",
            metavar="FROM:TO",
            rich_help_panel=READING,
        ),
    ),
    "values": (
        list[str] | None,
        typer.Option(
            None,
            "--values",
            metavar="NAMES",
            help="Arrays of ids in a jagged .npz.",
            rich_help_panel=READING,
        ),
    ),
    "lengths": (
        list[str] | None,
        typer.Option(
            None,
            "--lengths",
            metavar="NAMES",
            help="Arrays of bag sizes, one for each of --values.",
            rich_help_panel=READING,
        ),
    ),
    "no_header": (
        bool,
        typer.Option(
            False,
            "--no-header",
            help="A CSV's first line is a sample; columns are column_1, column_2, …",
            rich_help_panel=READING,
        ),
    ),
    "delimiter": (
        str | None,
        typer.Option(
            None,
            "--delimiter",
            help=r"Separator of a CSV's columns: ';', '::', tab, space, '\x01'.",
            metavar="TEXT",
            rich_help_panel=READING,
        ),
    ),
    "list_separator": (
        str | None,
        typer.Option(
            None,
            "--list-separator",
            help="Separator of the ids in a CSV field.",
            metavar="SEP",
        ),
    ),
    "on_bad_id": (
        Literal["error", "skip"],
        typer.Option(
            "error",
            "--on-bad-id",
            metavar="error|skip",
            help="Stop at an id that has no row, or skip and count it.",
            rich_help_panel=READING,
        ),
    ),
}


def takes_log(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a log to a command, which gets them as its parameter `reading`, the
    keywords of oper's functions that read a log (`LogKeywords`).

    Options that may be given several times also accept names separated by commas.
    """

    @functools.wraps(command)
    def with_options(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in _OPTIONS}
        for name in ("columns", "dense", "values", "lengths"):
            if given[name] is not None:
                given[name] = tuple(part for value in given[name] for part in value.split(","))
            elif name != "dense":
                given[name] = ()
        command(**arguments, **{PARAMETER: given})

    signature = inspect.signature(command)
    names = [name for name in signature.parameters if name != PARAMETER]
    own = [signature.parameters[name].replace(kind=_KIND) for name in names]
    added = [
        inspect.Parameter(name, _KIND, default=option, annotation=kind)
        for name, (kind, option) in _OPTIONS.items()
    ]
    # --force and --json stay last, as in the help of other commands.
    end = next(place for place, name in enumerate(names) if name in ("force", "as_json"))
    parameters = own[:end] + added + own[end:]
    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options
