"""Commands whose help has options in groups, and examples as they are typed at its end.

Plain text of at most 80 columns, the same on a terminal and in a pipe. An option is in the group
that its `rich_help_panel` names, which without rich is only a name, or among the usual ones. Help
has the usual options, in at most 40 lines; `--help-all` has all groups.
"""

import contextlib
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from oper.base.errors import OperError
from oper.cli.shared import config_file
from oper.cli.shared.console import quietly
from oper.cli.shared.input_checks import check_before_missing, check_input
from oper.cli.shared.output_options import QUIET
from oper.cli.shared.usage_errors import UsageError
from oper.files.input_files import refuse_url

ADVANCED = "Advanced"  # the group of options that a first run does not need
READING = "Reading the log"
TABLES_GROUP = "Tables"
WINDOWS = "Windows"
_USUAL = "Options"
HELP_ALL = "--help-all"
_WITH_ALL = "oper: help with all groups"  # in the meta of contexts
_ORDER = ("Arguments", _USUAL, READING, TABLES_GROUP)  # then the others, ADVANCED last


def write_options(parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """Write a section for each group, in which options stand in the order of the parameters.

    Without --help-all there are arguments and usual options alone, and --help-all is one of them if
    there are others.
    """
    groups: dict[str, list[tuple[str, str]]] = {name: [] for name in _ORDER}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None:
            is_argument = parameter.param_type_name == "argument"
            panel = "Arguments" if is_argument else parameter.rich_help_panel or _USUAL
            name = _argument(parameter) if is_argument else record[0]
            groups.setdefault(panel, []).append((name, record[1].replace(".  [", ". [")))
    others = [name for name in groups if groups[name] and name not in ("Arguments", _USUAL)]
    if not others:
        groups[_USUAL] = [row for row in groups[_USUAL] if row[0] != HELP_ALL]
    hidden = () if ctx.meta.get(_WITH_ALL) else others
    for name in sorted(groups, key=lambda name: name == ADVANCED):
        if groups[name] and name not in hidden:
            with formatter.section(name):
                formatter.write_dl(groups[name])


def write_examples(epilog: str | None, formatter: Any, heading: str = "Examples") -> None:
    """Write the lines as they are, indented; a wrapped command could not be copied."""
    if epilog:
        with formatter.section(heading):
            for line in filter(str.strip, epilog.splitlines()):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _argument(parameter: Any) -> str:
    """Return `PLAN`, or `LOG...` if there may be several."""
    return f"{parameter.metavar}{'...' if parameter.nargs == -1 else ''}"


_CONFIG = typer.Option(
    None,
    "--config",
    metavar="FILE",
    is_eager=True,  # its values are defaults of the options that are parsed after it
    callback=config_file.use,
    help="Take options that are not typed from a YAML file.",
)


_HELP_ALL = typer.Option(False, HELP_ALL, expose_value=False, help="Show all options and exit.")


def _takes_path(parameter: Any) -> bool:
    """Return whether a parameter is a path or, like PROFILE and NAME|FILE, may contain one."""
    is_path = parameter.type_descriptor.annotation in (Path, list[Path])
    return is_path or "FILE" in (parameter.metavar or "")


@functools.cache
def _shared_options() -> dict[str, Any]:
    """Return the options that commands have without saying so, by their names."""
    app = typer.Typer(add_completion=False)

    @app.command()
    def shared(
        quiet: bool = QUIET, config: Path | None = _CONFIG, help_all: bool = _HELP_ALL
    ) -> None:
        pass

    return {parameter.name: parameter for parameter in get_command(app).params}


class _WithAllHelp:
    """A command, or a group of them, with --help-all after --help, which come before all errors."""

    def get_params(self, ctx: Any) -> list[Any]:
        return [*super().get_params(ctx), _shared_options()["help_all"]]  # type: ignore[misc]

    def help_if_asked(self, ctx: Any, args: list[str]) -> None:
        """Print help and exit if an option asks for it, whatever else was typed."""
        if not ctx.resilient_parsing and (asked := self._first_help(ctx, args)):
            ctx.meta[_WITH_ALL] = asked == HELP_ALL
            typer.echo(ctx.get_help())
            ctx.exit()

    def _first_help(self, ctx: Any, args: list[str]) -> str | None:
        """Return the first option that asks for help; None if it is the value of another one."""
        typed = args[: args.index("--")] if "--" in args else args
        asked = [word for word in typed if word in (*ctx.help_option_names, HELP_ALL)]
        with contextlib.suppress(UsageError):  # of other words
            given, *_ = self.make_parser(ctx).parse_args(args=list(args))  # type: ignore[attr-defined]
            if not (given.get("help") or given.get("help_all")):
                return None
            return asked[0] if asked else "-h"  # in one word with other flags: -hq
        return asked[0] if asked else None


class Command(_WithAllHelp, TyperCommand):
    """A command with --quiet; its epilog is its examples, as they are typed."""

    has_config = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        shared = _shared_options()
        self.params.append(shared["quiet"])
        if self.has_config:
            self.params.append(shared["config"])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.help_if_asked(ctx, args)
        typed = list(args)
        try:
            if not ctx.resilient_parsing:
                self._check_paths(ctx, typed)
            return super().parse_args(ctx, args)
        except UsageError as error:
            if type(error).__name__ == "MissingParameter" and not ctx.resilient_parsing:
                for parameter, value in self._given(ctx, typed):
                    check_before_missing(parameter.metavar or "", value)
            # For `usage_error`; the parser of words itself does not say of which command.
            error.typed, error.ctx = typed, getattr(error, "ctx", None) or ctx  # type: ignore[attr-defined]
            raise

    def _check_paths(self, ctx: Any, typed: list[str]) -> None:
        """Raise OperError if a path is not what its parameter takes, or `Path` would forget what
        was typed: an empty text, which it takes for the current folder, the / at the end of a
        file's name, and one of the two of a URL."""
        for parameter, value in self._given(ctx, typed):
            if not _takes_path(parameter):
                continue
            is_output = parameter.name == "output"
            if is_output and parameter.metavar == "FILE" and value.endswith("/"):
                raise OperError(
                    f"--output {value!r}: a file was to be written, and what ends in / is a "
                    "folder; choose another path"
                )
            if not value:
                argument = parameter.param_type_name == "argument"
                name = parameter.metavar if argument else parameter.opts[-1]
                what = "a name or a path" if "NAME" in (parameter.metavar or "") else "a path"
                raise OperError(f"{name} '': expected {what}; the current folder is '.'")
            if is_output:
                refuse_url(value, written=True)
            else:
                check_input(parameter.metavar or "", value)

    def _given(self, ctx: Any, typed: list[str]) -> Iterator[tuple[Any, str]]:
        """Yield what was typed for each parameter."""
        given, *_ = self.make_parser(ctx).parse_args(args=list(typed))
        for parameter in self.get_params(ctx):
            value = given.get(parameter.name)
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str):
                    yield parameter, text

    def invoke(self, ctx: Any) -> Any:
        ctx.params.pop("config", None)
        with quietly(ctx.params.pop("quiet", False)), config_file.naming_places(ctx):
            return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return [
            "[OPTIONS]",
            *(_argument(p) if p.required else f"[{_argument(p)}]" for p in arguments),
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter)


class ConfigurableCommand(Command):
    """A command with --config too."""

    has_config = True


class CommandGroup(_WithAllHelp, TyperGroup):
    """A command that has commands, which come first in its help; its epilog is examples too."""

    examples_heading = "Examples"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self.help_if_asked(ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter, self.examples_heading)
