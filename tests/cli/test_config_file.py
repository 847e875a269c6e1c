"""`--config FILE`: a command with it is the command with the same options typed."""

import re
from pathlib import Path

import pytest

from oper import cli
from oper.cli.shared import config_file
from oper.cli.shared.config_file import SECTIONS
from oper.plan.plan import Plan
from tests.support.commands import fine, oper, refused, tree


def as_typed(folder: Path, file: str, command: str, *typed: str) -> None:
    """Assert that a command writes the same with the file as with `typed`."""
    (folder / "project.yaml").write_text(file)
    fine(*command.split(), "--config", "project.yaml", "-o", "by-file")
    fine(*command.split(), *typed, "-o", "by-hand")
    by_file, by_hand = tree(folder / "by-file"), tree(folder / "by-hand")
    assert by_file == by_hand


PLAN = ("--topology", "1x2-a100", "--mode", "inference", "--batch-size", "512")


@pytest.mark.parametrize(
    "file",
    [
        "topology: 1x2-a100\nmode: inference\nbatch-size: 512\n",
        "topology: 1x2-a100\nmode: inference\nbatch_size: '512'\n",
        "plan: {topology: 1x2-a100, mode: inference, batch-size: 512}\n",
        # A section is for its command alone, and comes before what is for all.
        "topology: 1x2-a100\nmode: training\n"
        "plan: {mode: inference, batch-size: 512}\nprofile: {batch-size: 7}\n",
    ],
    ids=["keys", "underscores", "section", "both"],
)
def test_values_are_those_of_the_file(here: Path, file: str) -> None:
    as_typed(here, file, "plan p", *PLAN)


def test_what_is_typed_comes_first(here: Path) -> None:
    file = "topology: dgx-a100\nmode: training\nbatch-size: 512\nforce: yes\n"
    as_typed(here, file, "plan p --topology 1x2-a100 --mode inference", *PLAN)


def test_values_are_texts_as_they_are_written(here: Path) -> None:
    """YAML alone would make 10:20 the number 620, and -1 no text; lists are by commas."""
    file = "columns: [C1, C2]\nmissing: -1\nrows: 10:590\nids: hash:1000\n"
    as_typed(
        here,
        file,
        "profile log.parquet",
        *("--columns", "C1,C2", "--missing", "-1", "--rows", "10:590", "--ids", "hash:1000"),
    )


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("profile log.parquet -o new", "profile: {columns: 'C*', windows: 2}"),
        ("plan p -o new", "plan: {topology: cpu:2}"),
        ("compare p", "compare: {topology: cpu:2, methods: [oper, table_wise]}"),
        ("drift q w@1", "drift: {worse: 10%, json: true}"),
        ("replan q w@1 -o new", "replan: {horizon: 9}"),
        (
            "simulate log.parquet --columns C*",
            "simulate: {workers: 2, batch-size: 16, cache: 90%, warm-up: 1, policy: random}",
        ),
    ],
)
def test_every_command_that_plans_takes_a_file(here: Path, command: str, file: str) -> None:
    Path("project.yaml").write_text(f"{file}\n")
    fine(*command.split(), "--config", "project.yaml")
    assert command.split()[0] in SECTIONS
    others = [name for name in SECTIONS if name != command.split()[0]]
    Path("project.yaml").write_text(file + "\n" + "".join(f"{o}: {{}}\n" for o in others))
    fine(*command.replace("new", "again").split(), "--config", "project.yaml")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (
            "topology: cpu:2\nbatch-sise: 3",
            ["project.yaml, line 2: batch-sise", "did you mean batch-size?"],
        ),
        ("plan:\n  batch-sise: 3", ["line 2: plan.batch-sise", "did you mean batch-size?"]),
        ("zebra: 3", ["line 1: zebra is no option of `oper plan`", "--help"]),
        (
            "columns: C1",
            ["is no option of `oper plan`, but of `oper profile`", "section `profile:`"],
        ),
        (
            "batch-size: many",
            ["line 1: batch-size: expected a whole number of at least 1, got 'many'"],
        ),
        ("mode: train", ["mode: expected training or inference, got 'train'"]),
        ("force: maybe", ["force: expected true or false, got 'maybe'"]),
        ("batch-size: {a: 1}", ["batch-size: expected one value, got keys and values, a"]),
        ("batch-size:", ["batch-size: expected a value, got nothing"]),
        ("batch-size: 3\nbatch_size: 4", ["line 2: batch_size is given twice"]),
        ("plan: 3", ["plan: expected options of `oper plan`, got '3'"]),
        ("- batch-size", ["expected lines such as `batch-size: 65536`, got ['batch-size']"]),
        ("", ["expected lines such as `batch-size: 65536`, got nothing"]),
        ("config: other.yaml", ["config is no option"]),
        ("batch-size: [", ["project.yaml", "is not YAML"]),
    ],
)
def test_files_that_are_refused(here: Path, file: str, words: list[str]) -> None:
    Path("project.yaml").write_text(file)
    refused("plan p --topology cpu:2 -o new --config project.yaml", *words)


BASES = {
    "profile": "profile log.parquet -o new",
    "plan": "plan p -o new --topology 2x2-a100",
    "compare": "compare p --topology 2x2-a100",
    "drift": "drift q w@1",
    "replan": "replan q w@1 -o new",
    "simulate": "simulate log.parquet --columns C*",
}
# Any text is a value of theirs that means no id.
ANY_TEXT = {("simulate", "missing"), ("profile", "missing")}


@pytest.mark.parametrize("section", SECTIONS)
def test_an_error_about_any_value_names_the_file_and_line(here: Path, section: str) -> None:
    command = BASES[section].split()
    context = cli.command().make_context("oper", [], resilient_parsing=True)
    tried = 0
    for name, _ in config_file.options_of(section, context):
        if f"--{name}" in command or f"-{name[0]}" in command or (section, name) in ANY_TEXT:
            continue
        needed = "  by-column: day\n" if name == "every" else ""
        Path("project.yaml").write_text(f"\n{section}:\n  {name}: -7%x\n{needed}")
        said = oper(*command, "--config", "project.yaml")
        assert (said.status, said.out) == (2, ""), (name, said)
        assert said.errors.startswith("error: project.yaml, line 3: "), (name, said)
        assert name.replace("-", " ") in said.errors.replace("-", " "), (name, said)
        tried += 1
    assert tried >= 2


def test_an_error_about_a_typed_value_names_no_file(here: Path) -> None:
    Path("project.yaml").write_text("topology: 2x2-a100\ndob: 2\n")
    command = "plan p -o new --config project.yaml"
    refused(command, "error: project.yaml, line 2: --dob '2': expected a percentage, such as 5%")
    refused(f"{command} --dob 3", "error: --dob '3': expected")
    refused(f"{command} --dob 1 --threshold x", "error: --threshold 'x'")


def test_a_file_that_is_not_there(here: Path) -> None:
    refused("plan p --config absent.yaml", "absent.yaml: no such file")


def test_commands_that_do_not_plan_take_none(here: Path) -> None:
    assert "no option --config" in oper("plan", "show", "q", "--config", "x.yaml").errors


def test_the_file_in_the_documents_serves_three_commands(here: Path) -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "commands.md"
    (example,) = re.findall(r"```yaml\n(.*?)```", document.read_text("utf-8"), flags=re.DOTALL)
    assert "torchrec" in example
    # Whose process takes seconds to start.
    Path("project.yaml").write_text(example.replace("torchrec", "row_wise"))
    fine("profile", "log.parquet", "--config", "project.yaml", "-o", "new")
    fine("plan", "new", "--config", "project.yaml", "-o", "made")
    plan = Plan.load("made")
    assert (plan.topology.name, plan.workload.mode) == ("2x8-h100", "inference")
    assert plan.workload.batch_size == 65_536
    assert "table_wise" in fine("compare", "new", "--config", "project.yaml")
