"""Commands whose help has options in groups, and examples as they are typed at its end.

Plain text of at most 80 columns, the same on a terminal and in a pipe. An option is in the group
that its `rich_help_panel` names, which without rich is only a name, or among the usual ones.
"""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

ADVANCED = "Advanced"  # the group of options that a first run does not need
READING = "Reading the log"
TABLES_GROUP = "Tables"
WINDOWS = "Windows"
_USUAL = "Options"
_ORDER = ("Arguments", _USUAL, READING, TABLES_GROUP)  # then the others, ADVANCED last


def write_options(parameters: Iterable[Any], ctx: Any, formatter: Any) -> None:
    """A section for each group, in which options stand in the order of the parameters."""
    groups: dict[str, list[tuple[str, str]]] = {name: [] for name in _ORDER}
    for parameter in parameters:
        record = parameter.get_help_record(ctx)
        if record is not None:
            is_argument = parameter.param_type_name == "argument"
            panel = "Arguments" if is_argument else parameter.rich_help_panel or _USUAL
            name = _argument(parameter) if is_argument else record[0]
            groups.setdefault(panel, []).append((name, record[1].replace(".  [", ". [")))
    for name in sorted(groups, key=lambda name: name == ADVANCED):
        if groups[name]:
            with formatter.section(name):
                formatter.write_dl(groups[name])


def write_examples(epilog: str | None, formatter: Any, heading: str = "Examples") -> None:
    """The lines as they are, indented; a wrapped command could not be copied."""
    if epilog:
        with formatter.section(heading):
            for line in filter(str.strip, epilog.splitlines()):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _argument(parameter: Any) -> str:
    """`PLAN`, or `LOG...` where there may be several."""
    return f"{parameter.metavar}{'...' if parameter.nargs == -1 else ''}"


class Command(TyperCommand):
    """A command; its epilog is its examples, as they are typed."""

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


class CommandGroup(TyperGroup):
    """A command that has commands, which come first in its help; its epilog is examples too."""

    examples_heading = "Examples"

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        write_options(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter, self.examples_heading)
