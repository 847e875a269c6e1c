"""Standard output and error that are full, closed, or left by their reader, in real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import shell

COMMANDS = ["topology show cpu:2", "topology show cpu:2 --json", "--version", "--help"]
WRITES = "synth criteo-kaggle --scale 0.0001 --samples 50 -o log.parquet"


@pytest.mark.parametrize(
    ("command", "redirected", "why"),
    [
        *((command, ">/dev/full", "No space left on device") for command in COMMANDS),
        *((command, ">&-", "Bad file descriptor") for command in COMMANDS[:1]),
    ],
)
def test_output_that_cannot_be_written(command: str, redirected: str, why: str) -> None:
    status, errors = shell(f"{command} {redirected}")
    assert status == 2
    assert errors.startswith(f"error: standard output: cannot be written ({why})")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "buffered"),
    [
        (COMMANDS[0], {}),
        (COMMANDS[0], {"PYTHONUNBUFFERED": "1"}),
        (COMMANDS[1], {}),
        (COMMANDS[3], {"PYTHONUNBUFFERED": "1"}),
    ],
)
def test_a_reader_that_has_gone(command: str, buffered: dict[str, str]) -> None:
    """`| head` closes it: no word, and the status of a program that SIGPIPE ends."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "oper", *command.split()],
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=600,
        check=False,
        env=os.environ | buffered,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&-", "2>&- >&- <&-"])
def test_errors_that_cannot_be_written(redirected: str) -> None:
    """They are not printed elsewhere, and change no status."""
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m oper plan show nothing {redirected}'],
        stdout=subprocess.PIPE,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, b"")


def test_files_are_whole_where_the_output_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that prints nothing needs no standard output."""
    monkeypatch.chdir(tmp_path)
    assert shell(f"{WRITES} >/dev/full")[0] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.parquet", "log.tables.yaml"]
    assert shell(f"{WRITES} --force -q >&-") == (0, "")


def test_an_encoding_without_the_characters() -> None:
    assert shell("topology show 2x2-a100 >/dev/null", PYTHONIOENCODING="ascii") == (0, "")
