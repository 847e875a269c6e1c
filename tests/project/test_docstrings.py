"""Docstrings begin with a verb or a noun phrase, never with a clause in the place of a noun."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

CLAUSE = re.compile(
    r"(?:What|How|Which|Where|When|Whether|Who|Whose|Why|If|As|Of|That|Those|The same)\b"
)


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and the first line of each docstring in the source of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.body[0].lineno, docstring.splitlines()[0]


def clauses(source: str) -> list[tuple[int, str]]:
    """Return the line number and the first line of each docstring that begins with a clause."""
    return [(number, line) for number, line in first_lines(source) if CLAUSE.match(line)]


def test_no_docstring_begins_with_a_clause() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)}, line {number}: {line}"
        for folder in ("oper", "scripts")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for number, line in clauses(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("docstring", "is_clause"),
    [
        ("What a step takes.", True),
        ("Of the bytes: a saving.", True),
        ("The same for bags.", True),
        ("Seconds of a step.", False),
        ("Offset of each row.", False),
        ("Ask the owner.", False),
    ],
)
def test_clauses_are_told_from_nouns_and_verbs(docstring: str, is_clause: bool) -> None:
    source = f'def price() -> None:\n    """{docstring}"""\n'
    assert bool(clauses(source)) == is_clause
