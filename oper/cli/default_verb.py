"""Commands that act and have sub-commands: `oper plan PROFILE` beside `oper plan show PLAN`."""

from typing import Any

import typer
from typer.core import TyperGroup

DEFAULT = "make"


class DefaultVerb(TyperGroup):
    """A group whose command `make` is meant where no other one is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


def verb(help_text: str) -> typer.Typer:
    """A typer application for such a command; register the default one under the name `make`."""
    return typer.Typer(cls=DefaultVerb, help=help_text, no_args_is_help=True, rich_markup_mode=None)
