"""YAML (and JSON, its subset) with the line of each value, so that errors can name it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from oper.base.errors import OperError
from oper.files.input_files import YAML, read_text
from oper.files.json_file import MOST_DIGITS

_MOST_ALIASED = 100_000  # values that aliases add to a document when they are written out

KeyPath = tuple[str | int, ...]  # keys and indices from the document's root to a value


@dataclass(frozen=True)
class Document:
    """Content of a document, its source as errors name it, and the line of each value."""

    content: Any
    source: str
    lines: dict[KeyPath, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str, as_text: bool = False) -> "Document":
        """Read a file; raise OperError if it is missing, not YAML, or repeats a key. `as_text`: all
        values stay texts; otherwise YAML reads 10:20 as a number of seconds."""
        path = Path(path)
        text = read_text(path, YAML)
        try:
            loader = yaml.BaseLoader(text) if as_text else yaml.SafeLoader(text)
            node = loader.get_single_node()
            lines: dict[KeyPath, int] = {}
            content = None
            if node is not None:
                _check_size(node, path)
                _collect_lines(node, (), lines, path)
                content = loader.construct_document(node)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark
            keys = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise OperError(
                f"{path}{keys}: is not YAML ({error.problem}); correct it there"
            ) from error
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise OperError(f"{path}: is not YAML ({reason})") from error
        except RecursionError as error:
            raise OperError(f"{path}: is nested more deeply than any file of this kind") from error
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            # PyYAML raises these for a scalar that is not of the type that its form or tag states.
            raise OperError(
                f"{path}: has a value that cannot be read ({type(error).__name__}: "
                f"{str(error)[:80]}); correct or quote it"
            ) from error
        return cls(content, str(path), lines)

    def where(self, keys: KeyPath) -> str:
        """Return the place of a value, `FILE, line 4: links[1][2]`."""
        name = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in keys).removeprefix(".")
        return f"{self.line_of(keys)}: {name}" if name else self.line_of(keys)

    def line_of(self, keys: KeyPath) -> str:
        """Return `FILE, line 4`, the nearest known line."""
        known = (self.lines.get(keys[:n]) for n in range(len(keys), -1, -1))
        line = next((n for n in known if n is not None), None)
        return self.source if line is None else f"{self.source}, line {line}"

    def fail(self, keys: KeyPath, problem: str) -> NoReturn:
        """Raise OperError about the value under `keys`."""
        raise OperError(f"{self.where(keys)} {problem}")

    def refuse(self, keys: KeyPath, expected: str, got: str) -> NoReturn:
        """Raise OperError: the value under `keys` is `got` rather than `expected`."""
        raise OperError(f"{self.where(keys)}: expected {expected}, got {got}")


def _check_size(root: yaml.Node, path: Path) -> None:
    """Raise OperError if aliases make a small text a huge document, or one without an end."""
    sizes: dict[int, int] = {}  # values of each node with its aliases written out
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if id(node) in open_nodes:
            raise OperError(
                f"{path}, line {node.start_mark.line + 1}: an anchor holds an alias of itself; "
                "write the values out"
            )
        if id(node) in sizes:
            return sizes[id(node)]
        open_nodes.add(id(node))
        inner: list[Any] = []
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        elif isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        total = 1 + sum(map(size, inner))
        open_nodes.remove(id(node))
        sizes[id(node)] = total
        if total > len(sizes) + _MOST_ALIASED:
            raise OperError(
                f"{path}, line {node.start_mark.line + 1}: its aliases stand for more than "
                f"{_MOST_ALIASED:,} values; write them out"
            )
        return total

    size(root)


def _collect_lines(node: yaml.Node, keys: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    lines.setdefault(keys, node.start_mark.line + 1)
    is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
    if is_number and len(node.value) > MOST_DIGITS:
        raise OperError(
            f"{path}, line {node.start_mark.line + 1}: a number of {len(node.value):,} characters, "
            f"{node.value[:20]}…, and at most {MOST_DIGITS} were expected"
        )
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _collect_lines(child, (*keys, index), lines, path)
    elif isinstance(node, yaml.MappingNode):
        for key, child in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise OperError(f"{path}, line {line}: expected a name as a key, got a {key.id}")
            inner = (*keys, str(key.value))
            if inner in lines:
                raise OperError(
                    f"{path}, line {line}: {key.value!r} is given twice, first on line "
                    f"{lines[inner]}; keep one"
                )
            lines[inner] = line
            _collect_lines(child, inner, lines, path)
