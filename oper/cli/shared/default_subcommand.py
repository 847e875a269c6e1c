"""Commands with a default sub-command: `oper plan PROFILE` and `oper plan show PLAN`."""

import copy
from pathlib import Path
from typing import Any

import typer

from oper.base.errors import OperError
from oper.cli.shared.command import HELP_ALL, CommandGroup
from oper.cli.shared.usage_errors import near

DEFAULT = "make"
_NOT_TYPED = "\0make"  # which nobody can type: stands for its name until the command is looked up


class _Untyped(typer.Context):
    """The default sub-command's context where the user did not type its name."""

    @property
    def command_path(self) -> str:
        """The command as the user typed it, for the usage line of errors."""
        assert self.parent is not None, "a sub-command has its group's context"
        return self.parent.command_path


class DefaultVerb(CommandGroup):
    """A group that runs its command `make` unless another one is named; its help shows both."""

    @property
    def default(self) -> Any:
        """Command that runs if no other command is named."""
        return self.commands[DEFAULT]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h", HELP_ALL):
            self._refuse_near_names(ctx, args[0])
            args = [_NOT_TYPED, *args]
        return super().parse_args(ctx, args)

    def _refuse_near_names(self, ctx: Any, word: str) -> None:
        """Raise OperError if a word is neither a folder nor a command, and near to a command's."""
        names = [name for name in self.commands if name != DEFAULT]
        hint = "" if Path(word.partition("@")[0]).exists() else near(word, names)
        if hint and not ctx.resilient_parsing:
            raise OperError(f"{ctx.command_path}: no folder and no command {word!r}{hint}")

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if args[0] != _NOT_TYPED:
            return super().resolve_command(ctx, args)
        # A command of its own: that of the name is used by other parses too.
        command = copy.copy(self.default)
        command.context_class = _Untyped
        return DEFAULT, command, args[1:]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        default = self.default
        named = type(ctx)(default, info_name=ctx.info_name, parent=ctx.parent)
        default.format_usage(named, formatter)
        default.format_help_text(named, formatter)
        default.format_options(named, formatter)
        self.format_commands(ctx, formatter)
        default.format_epilog(named, formatter)


def verb(help_text: str) -> typer.Typer:
    """Return a typer application for such a command; register the default as `make`."""
    return typer.Typer(cls=DefaultVerb, help=help_text, no_args_is_help=True, rich_markup_mode=None)
