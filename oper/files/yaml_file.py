"""YAML (and JSON, its subset) with the line of each value, so that errors can name it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from oper.base.errors import OperError

KeyPath = tuple[str | int, ...]  # keys and indices from the document's root to a value


@dataclass(frozen=True)
class Document:
    """The content of a document, its source as errors name it, and the line of each value."""

    content: Any
    source: str
    lines: dict[KeyPath, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str) -> "Document":
        """Read a file; OperError where it is missing, not YAML, or repeats a key."""
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            content = yaml.safe_load(text)
        except FileNotFoundError as error:
            raise OperError(f"{path}: no such file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise OperError(f"{path}: cannot be read as text ({error})") from error
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            keys = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise OperError(
                f"{path}{keys}: is not YAML ({error.problem}); correct it there"
            ) from error
        except yaml.YAMLError as error:
            raise OperError(f"{path}: is not YAML ({error})") from error
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _collect_lines(node, (), lines, path)
        return cls(content, str(path), lines)

    def where(self, keys: KeyPath) -> str:
        """`FILE, line 4: links[1][2]`, with the nearest line that is known."""
        name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in keys).removeprefix(".")
        known = (self.lines.get(keys[:n]) for n in range(len(keys), -1, -1))
        line = next((n for n in known if n is not None), None)
        source = self.source if line is None else f"{self.source}, line {line}"
        return f"{source}: {name}" if name else source

    def fail(self, keys: KeyPath, problem: str) -> NoReturn:
        """Raise OperError about the value under `keys`."""
        raise OperError(f"{self.where(keys)} {problem}")


def _collect_lines(node: yaml.Node, keys: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    lines.setdefault(keys, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _collect_lines(child, (*keys, index), lines, path)
    elif isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            inner = (*keys, str(key.value))
            line = key.start_mark.line + 1
            if inner in lines:
                raise OperError(
                    f"{path}, line {line}: {key.value!r} is given twice, first on line "
                    f"{lines[inner]}; keep one"
                )
            lines[inner] = line
            _collect_lines(child, inner, lines, path)
