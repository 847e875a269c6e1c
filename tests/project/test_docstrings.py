"""Docstrings begin with a verb or a noun phrase, never with a clause in the place of a noun."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

CLAUSE = re.compile(
    r"(?:What|How|Which|Where|When|Whether|Who|Whose|Why|If|As|Of|That|Those|The same)\b"
)
# Packages that are not revised yet, and their docstrings of this kind. The numbers only fall; a
# package without any leaves the list.
TO_REVISE = {
    "runtime": 136,
}


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
    counts: Counter[str] = Counter()
    wrong = []
    for folder in ("oper", "scripts"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            name = path.relative_to(REPOSITORY).parts[1]
            for number, line in clauses(path.read_text(encoding="utf-8")):
                counts[name] += 1
                if name not in TO_REVISE:
                    wrong.append(f"{path.relative_to(REPOSITORY)}, line {number}: {line}")
    assert not wrong, "\n".join(wrong)
    more = {name: counts[name] for name, most in TO_REVISE.items() if counts[name] > most}
    assert not more, f"new docstrings begin with a clause, in {more}"


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
