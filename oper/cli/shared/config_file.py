"""`--config FILE`: values of a command's options from a YAML file, for what is not typed.

Keys are the options' long names, and values what would be typed. A section that has a command's
name is for that command alone, so that one file can serve a whole project:

    topology: dgx-a100          # of the command that reads the file
    plan: {mode: training, batch-size: 65536}
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from oper.base.errors import OperError
from oper.cli.shared.usage_errors import UsageError, expected, near
from oper.files.yaml_file import Document, KeyPath

SECTIONS = ("profile", "plan", "compare", "drift", "replan", "simulate")
_PLACES = "oper: places of values in the file"  # in the meta of contexts
_NOT_IN_FILES = ("config", "help", "help_all", "install_completion", "show_completion")
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")


def use(context: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values defaults of the command that is parsed; the option's callback."""
    if path is not None and not context.resilient_parsing:
        config = _Config(context, Document.read(path, as_text=True))
        context.default_map = config.defaults()
        context.meta[_PLACES] = config.places
    return path


@contextlib.contextmanager
def naming_places(context: typer.Context) -> Iterator[None]:
    """Within the block, name the file and line in an error that begins with an option whose value
    the file has."""
    try:
        yield
    except OperError as error:
        place = _place(context, str(error))
        if place is None:
            raise
        raise OperError(f"{place}: {error}") from error


def _place(context: typer.Context, message: str) -> str | None:
    """Return the file and line of the option that a message begins with, such as `--batch-size 2:`
    or `batch size:`; None if the file has none."""
    about = message.partition(":")[0]
    for option, (name, place) in context.meta.get(_PLACES, {}).items():
        words = re.escape(option).replace(r"\-", "[- ]")
        source = context.get_parameter_source(name)
        named = re.search(rf"--{words}(?![\w-])|^{words}(?=$| ')", about)
        if named and source is not None and source.name == "DEFAULT_MAP":
            return str(place)
    return None


class _Config:
    def __init__(self, context: Any, document: Document) -> None:
        self._context, self._document = context, document
        self._section = context.command_path.split()[1]
        self._options = dict(_options(context.command, context))
        # By an option's name: that of its parameter, and the file and line of its value.
        self.places: dict[str, tuple[str, str]] = {}

    def defaults(self) -> dict[str, Any]:
        """Return values by the parameters' names; those of the command's section come last."""
        content = self._document.content
        if not isinstance(content, dict):
            self._document.refuse((), "lines such as `batch-size: 65536`", _shown(content))
        values = self._values(content, ())
        for name in SECTIONS:
            given = content.get(name, {})
            if not isinstance(given, dict):
                self._document.refuse((name,), f"options of `oper {name}`", _shown(given))
            if name == self._section:
                values |= self._values(given, (name,))
        return values

    def _values(self, content: dict[str, Any], keys: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, given in content.items():
            if not keys and key in SECTIONS:
                continue
            place = (*keys, key)
            parameter = self._options.get(key.replace("_", "-"))
            if parameter is None:
                self._document.fail(place, self._unknown(key, keys))
            if parameter.name in values:
                self._document.fail(place, "is given twice, with - and with _; keep one")
            values[parameter.name] = self._value(parameter, given, place)
            self.places[key.replace("_", "-")] = parameter.name, self._document.line_of(place)
        return values

    def _value(self, parameter: Any, given: Any, place: KeyPath) -> Any:
        if isinstance(given, dict):
            self._document.refuse(place, "one value", _shown(given))
        items = given if isinstance(given, list) else [given]
        if not items or not all(isinstance(item, str) and item for item in items):
            self._document.refuse(
                place, "a value", f"{_shown(given)}; leave the key out for the default"
            )
        if getattr(parameter, "is_flag", False):
            if items[0].lower() not in (*_YES, *_NO) or len(items) > 1:
                self._document.refuse(place, "true or false", _shown(given))
            return items[0].lower() in _YES
        value = items if parameter.multiple else ",".join(items)
        try:
            parameter.process_value(self._context, value)
        except UsageError as error:
            takes = expected(parameter, str(getattr(error, "message", error)))
            self._document.refuse(place, takes, _shown(given))
        return value

    def _unknown(self, key: str, keys: KeyPath) -> str:
        name = key.replace("_", "-")
        mine = f"is no option of `oper {self._section}`"
        if hint := near(name, [*self._options, *(() if keys else SECTIONS)]):
            return f"{mine}{hint}"
        root = self._context.find_root()
        others = [
            other
            for other in SECTIONS
            if other != self._section and name in dict(options_of(other, root))
        ]
        if others:
            return f"{mine}, but of `oper {others[0]}`: put it into a section `{others[0]}:`"
        return f"{mine}; `oper {self._section} --help-all` lists them"


def _shown(content: Any) -> str:
    if content in (None, "", [], {}):
        return "nothing"
    if isinstance(content, dict):
        return f"keys and values, {', '.join(map(str, content)):.60}"
    return f"{content!r:.80}"


def options_of(section: str, root: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and parameters of a section's options; `root` is the context of `oper`."""
    return _options(_command(root, section), root)


def _options(command: Any, context: Any) -> Iterator[tuple[str, Any]]:
    for parameter in command.get_params(context):
        if parameter.param_type_name == "option" and parameter.name not in _NOT_IN_FILES:
            for name in parameter.opts:
                if name.startswith("--"):
                    yield name.removeprefix("--"), parameter


def _command(root: Any, name: str) -> Any:
    """Return the command, or what `oper NAME` runs without the name of a sub-command."""
    command = root.command.commands[name]
    return getattr(command, "default", command)
