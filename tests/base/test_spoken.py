"""Names of settings: flags where the command speaks, arguments where a script does."""

import os
import subprocess
import warnings
from pathlib import Path

import pytest

import oper
from oper.base.errors import OperWarning
from oper.base.spoken import all_figures, by_command_line, option, spoken, typed_path
from tests.support.commands import fine


def test_settings_have_the_names_of_whoever_is_spoken_to() -> None:
    assert option("--hold-out") == "`hold_out`"
    assert option("--ids", "vocab") == "ids='vocab'"
    with by_command_line():
        assert option("--hold-out") == "--hold-out"
        assert option("--ids", "vocab") == "--ids vocab"
        assert option("--list-separator", "|") == "--list-separator '|'"
        assert option("--delimiter", "\x01") == r"--delimiter '\x01'"
        assert option("--rows", "") == "--rows ''"
        assert option("--sample", 0.1 + 0.2) == "--sample 0.3"
        assert option("--no-header", True) == "--no-header"
        assert spoken("a", "b") == "a"
        assert all_figures() == "--json has"
    assert option("--no-header", True) == "no_header=True"
    assert spoken("a", "b") == "b"


@pytest.mark.parametrize(
    "name",
    ["plan", "-lead", "-", "a b", "it's", 'say "a"', "$HOME", "~", "a\nb", "é\t'\\", "\udcff0"],
)
def test_a_shell_reads_a_typed_path_as_the_path(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("found")
    command = f"cat {typed_path(name)}"
    assert (
        subprocess.run(
            ["bash", "-c", os.fsencode(command)], cwd=tmp_path, capture_output=True, check=True
        ).stdout
        == b"found"
    )
    assert command.isprintable()


def test_a_command_in_a_script_leaves_the_script_its_names() -> None:
    fine("--version")
    assert option("--columns") == "`columns`"


def test_warnings_of_a_script_name_no_flag(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text("a,b,when\n" + "".join(f"{n % 7},1.5,{n}\n" for n in range(400)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        profile = oper.profile(log)
        oper.make_plan(profile, "cpu:1", oper.Workload("training", "distinct", 64))
    said = [str(each.message) for each in found if issubclass(each.category, OperWarning)]
    assert any("`columns`" in each for each in said)
    assert any("extra_memory" in each for each in said)
    assert not any("--" in each for each in said), said
    done = fine("profile", log, "-o", tmp_path / "p", "-q")
    assert done == ""
