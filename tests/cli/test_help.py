"""The help of every command: groups of options, 80 columns, and examples that run as they stand."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.main import get_command

from oper.cli import VERBS, app
from oper.cli.shared.default_subcommand import DEFAULT
from tests.support.checkpoint.saved_folders import Part, write
from tests.support.commands import fine, oper, refused, tree
from tests.support.monitoring.reports import a_report


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(what is typed, the command), in the order of use; sub-commands follow their command."""
    yield path, command
    for name in getattr(command, "commands", {}) if path else VERBS:
        if name != DEFAULT:
            yield from commands(command.commands[name], (*path, name))


COMMANDS = dict(commands(get_command(app)))


def examples(path: tuple[str, ...]) -> list[str]:
    """The commands at the end of a help text, each on one line."""
    text = fine(*path, "--help").replace("\\\n", " ")
    heading = "Examples:" if path else "Start here:"
    section, *_ = text.partition(f"\n{heading}\n")[2].split("\n\n")
    return [line.strip() for line in section.splitlines()]


def options_in(text: str) -> set[str]:
    """Return the options that a help text lists, without their short names."""
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", text, flags=re.MULTILINE))


def options_of(command: Any) -> dict[str, Any]:
    """Return the options of a command, or of the one that it runs by default, by long name."""
    command = getattr(command, "default", command)
    params = [p for p in command.params if p.param_type_name == "option"]
    return {name: p for p in params for name in p.opts if name.startswith("--")}


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["--help", "-h", "--help-all"])
def test_a_help_text_reads_well_in_80_columns(path: tuple[str, ...], flag: str) -> None:
    text = fine(*path, flag)
    assert flag == "--help-all" or len(text.splitlines()) <= 40
    assert text.startswith(f"Usage: {' '.join(('oper', *path))} [OPTIONS]")
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert not {"<str>", "<int", "<path>"} & set(text.split())
    headings = [line for line in text.splitlines() if line.endswith(":") and line[:1].strip()]
    assert headings[-1] == ("Examples:" if path else "Start here:")
    if "Advanced:" in headings:
        assert headings.index("Options:") < headings.index("Advanced:")
        after = headings[headings.index("Advanced:") + 1 :]
        assert set(after) <= {"Commands:", "Examples:"}


def test_the_help_text_says_where_the_papers_methods_are() -> None:
    document = next(word for word in fine("--help").split() if word.startswith("docs/"))
    text = Path(__file__).parents[2].joinpath(document).read_text(encoding="utf-8")
    _, found, index = text.partition("\n## Where the papers' methods are\n")
    assert found
    for name in ("OPER", "HET", "Herald", "LAIA", "ESD", "FAE"):
        assert name in index.partition("\n## ")[0]


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_lists_usual_options_and_help_all_lists_all(path: tuple[str, ...]) -> None:
    usual, every = (options_in(fine(*path, flag)) for flag in ("--help", "--help-all"))
    options = options_of(COMMANDS[path])
    assert every - {"--help", "--help-all"} == set(options)
    assert usual <= every
    assert {name for name, option in options.items() if option.required} <= usual
    # It is mentioned only if it has more to say.
    assert ("--help-all" in usual) == (usual < every)
    if usual == every:
        assert fine(*path, "--help-all") == fine(*path, "--help")


@pytest.mark.parametrize(
    "command", ["plan p --topology cpu:2 -o new", "profile log.parquet -o new"]
)
def test_help_all_comes_before_anything_is_done(here: Path, command: str) -> None:
    before = tree(here)
    text = fine(*command.split(), "--help-all")
    assert "\nAdvanced:\n" in text
    assert tree(here) == before


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("plan --help --json", "oper plan"),
        ("plan --json --help", "oper plan"),
        ("plan absent --topology nowhere -hq", "oper plan"),
        ("plan p --xyzzy --batch-size many --help", "oper plan"),
        ("plan --config absent.yaml --help", "oper plan"),
        ("plan show absent --xyzzy -h", "oper plan show"),
        ("profiles --help show", "oper profiles"),
        ("topology --xyzzy --help", "oper topology"),
        ("--xyzzy --help plan", "oper"),
    ],
)
def test_help_comes_before_errors(here: Path, command: str, usage: str) -> None:
    assert fine(*command.split()).startswith(f"Usage: {usage} [OPTIONS]")


def test_the_first_of_two_helps_is_shown(here: Path) -> None:
    assert "\nAdvanced:\n" in fine("plan", "--help-all", "--json", "--help")
    assert "\nAdvanced:\n" not in fine("plan", "--help", "--json", "--help-all")


def test_help_as_a_value_or_an_argument_is_no_option(here: Path) -> None:
    refused("plan absent --topology cpu:2 -o --help", "absent: no such folder")
    refused("plan show -- --help", "--help: no such folder")


def test_mistyped_options_are_found_among_all(here: Path) -> None:
    refused(
        "plan p --treshold 1% -o new", "oper plan: no option --treshold; did you mean --threshold?"
    )
    refused("profile log.parquet --delimeter ;", "no option --delimeter; did you mean --delimiter?")
    refused("plan p --xyzzy", "oper plan: no option --xyzzy; `oper plan --help-all` lists them")


def test_unusual_options_are_advanced() -> None:
    for path in (("plan",), ("compare",)):
        usual, _, advanced = fine(*path, "--help-all").partition("\nAdvanced:\n")
        for option in ("--threshold", "--dob", "--balance", "--capacity"):
            assert f"\n  {option} " not in usual
            assert f"\n  {option} " in "\n" + advanced
        assert "--topology" in usual.partition("\nOptions:\n")[2]


MODEL = """
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig


def make(plan):
    tables = [
        EmbeddingBagConfig(t.rows, t.dim, name=t.name, feature_names=[t.name]) for t in plan.tables
    ]
    return EmbeddingBagCollection(tables, device="meta")
"""


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory, with the log, model, checkpoint and run that the examples name."""
    random = np.random.default_rng(0)
    samples = 16_384  # of which the simulator needs some iterations
    columns = {f"C{n}": (random.zipf(1.2, samples) - 1) % (3000 * n) for n in (1, 2, 3)}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    (tmp_path / "model.py").write_text(MODEL)
    weight = torch.rand(3000, 4)
    write(tmp_path / "checkpoint", {"embedding_bags.C1.weight": (weight, [Part((0, 3000))])}, {})
    (tmp_path / "run.jsonl").write_text(a_report().line())
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("there")
def test_every_example_runs() -> None:
    """In the order of use, each once: later ones read what earlier ones wrote."""
    first = examples(())
    assert len(first) == 3
    lines = {line: None for path in COMMANDS if path for line in examples(path)}
    assert set(first) <= set(lines)
    named = {
        path
        for path in COMMANDS
        for line in examples(path)
        if line.startswith(f"oper {' '.join(path)}")
    }
    assert named == set(COMMANDS), "a command is in none of its own examples"
    for line in lines:
        said = oper(*shlex.split(line)[1:])
        assert said.status == 0, (line, said)
