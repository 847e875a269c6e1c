"""Sentences outside `oper/cli` name settings by `option` and `spoken`: flags on the command line,
arguments in Python."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

import oper
from oper.cli import app
from oper.logs.batches.log_options import LogKeywords
from tests.support.commands import oper as run_oper

_ROOT = Path(oper.__file__).parent
_FLAG = re.compile(r"(?<![\w-])--(?=[a-z{])")
# Whole commands, which both readers type into a shell, and variables of CSS.
_OTHERS = re.compile(
    r"`[a-z]+ [^`]*`|\boper [a-z]+( [A-Z]+)* --[a-z]+|--nn?[a-z-]+ |var\(--[^)]*\)"
)
# Settings of commands without a public function.
_OF_COMMANDS = {"--churn", "--order", "--scale", "--zipf"}


def _modules() -> list[Path]:
    return [p for p in sorted(_ROOT.rglob("*.py")) if p.parts[len(_ROOT.parts)] != "cli"]


def _is_spoken(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("option", "spoken")
    )


def _texts(tree: ast.AST) -> Iterator[str]:
    """Yield a module's texts except docstrings and the arguments of `option` and `spoken`."""
    others: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            others.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            others |= {id(part) for part in node.values if isinstance(part, ast.Constant)}
        elif _is_spoken(node):
            others |= {id(part) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) not in others and isinstance(node, ast.Constant | ast.JoinedStr):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            yield "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in parts)


def _flags(source: str) -> list[str]:
    return [t for t in _texts(ast.parse(source)) if _FLAG.search(_OTHERS.sub("", t))]


def _spoken_while_imported(source: str) -> list[int]:
    """Return the lines outside of functions that choose words, before the reader is known."""
    found: list[int] = []

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if _is_spoken(node):
            found.append(node.lineno)  # type: ignore[attr-defined]
        for part in ast.iter_child_nodes(node):
            visit(part)

    visit(ast.parse(source))
    return found


def _options_named() -> set[str]:
    named: set[str] = set()
    for path in _ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "option":
                flag = node.args[0]
                named |= {str(flag.value)} if isinstance(flag, ast.Constant) else set()
    return named


def test_no_sentence_names_a_flag_to_a_script() -> None:
    named = {str(p.relative_to(_ROOT)): _flags(p.read_text()) for p in _modules()}
    assert {name: texts for name, texts in named.items() if texts} == {}, (
        "write option('--flag') of oper/base/spoken.py instead"
    )


def test_no_words_are_chosen_while_modules_are_imported() -> None:
    early = {str(p.relative_to(_ROOT)): _spoken_while_imported(p.read_text()) for p in _modules()}
    assert {name: lines for name, lines in early.items() if lines} == {}


def test_settings_exist_on_the_command_line_and_in_python() -> None:
    def flags(command: object) -> Iterator[str]:
        for parameter in getattr(command, "params", ()):
            yield from parameter.opts
        for part in getattr(command, "commands", {}).values():
            yield from flags(part)

    arguments = set(LogKeywords.__annotations__)
    for name in dir(oper):
        public = getattr(oper, name)
        is_error = isinstance(public, type) and issubclass(public, Exception)
        if callable(public) and not is_error:
            arguments |= set(inspect.signature(public).parameters)
    named = _options_named()
    assert named
    assert named - set(flags(get_command(app))) == set()
    in_python = {flag.removeprefix("--").replace("-", "_") for flag in named - _OF_COMMANDS}
    assert in_python - arguments == set()


@pytest.mark.parametrize(
    "source",
    [
        'raise OperError("leave it out with --columns")',
        'raise OperError(f"--rows {rows!r}: selects no sample")',
        'f"(--reserve) of {size}"',
        'names = f"--{name}"',
    ],
)
def test_flags_in_sentences_are_found(source: str) -> None:
    assert _flags(source)


@pytest.mark.parametrize(
    "source",
    [
        "option('--columns')",
        "f\"leave it out with {option('--columns')}\"",
        '"make it anew with `oper plan --tier all`"',
        '"var(--ink)"',
        'def f():\n    """The fields of `--json`, or --json."""',
    ],
)
def test_other_texts_are_not(source: str) -> None:
    assert not _flags(source)


def test_words_chosen_in_constants_are_found() -> None:
    assert _spoken_while_imported("REMEDY = f\"give {option('--ids')}\"") == [1]
    assert not _spoken_while_imported("def remedy():\n    return option('--ids')")


def test_errors_name_flags_or_arguments(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("a,b\n1,2\n3,4\n")
    for flags, keywords, flag, argument in (
        (["--columns", "c"], {"columns": ["c"]}, "--columns 'c'", "`columns` 'c'"),
        (["--rows", "9:9"], {"rows": "9:9"}, "--rows 9:9", "rows='9:9'"),
        (["--sample", "x"], {"sample": "x"}, "--sample 'x'", "`sample` 'x'"),
        (["--ids", "no"], {"ids": "no"}, "--ids no", "ids='no'"),
    ):
        said = run_oper("profile", log, "-o", tmp_path / "p", *flags)
        assert said.status == 2
        assert flag in said.errors
        with pytest.raises(oper.OperError) as raised:
            oper.profile(log, **keywords)
        assert argument in str(raised.value)
        assert "--" not in str(raised.value)
