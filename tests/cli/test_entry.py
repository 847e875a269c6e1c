"""The first moments of a command, and the last files that it may open."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oper.files import storage
from tests.cli.test_writes import FOLDER_WRITERS, WRITERS
from tests.support.commands import fine, hidden, oper, shell, tree

PRESS = """
import signal, sys

class Press:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[-1]:
            signal.raise_signal(signal.SIGINT)

module = sys.argv[-1]
sys.meta_path.insert(0, Press())
from oper.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "module",
    ["oper.base.standard_streams", "oper.cli", "typer", "oper.cli.synth", "oper.plan.plan"],
)
def test_ctrl_c_while_modules_are_imported(here: Path, module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRESS, "plan", "show", module],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 130
    assert (done.stdout, done.stderr) == ("", "interrupted; nothing was left half-written\n")


@pytest.mark.parametrize("limit", [5, 8, 12, 20, 30])
@pytest.mark.parametrize(
    "command", ["profile log.parquet --columns C* -o new", "plan p -o new", "plan show q"]
)
def test_hardly_any_open_files(here: Path, command: str, limit: int) -> None:
    before = tree(here)
    status, errors = shell(command, first=f"ulimit -n {limit}; ")
    assert status == 2
    assert errors.startswith("error: Too many open files: expected to open 32 more files, got ")
    assert errors.endswith("`ulimit -n 65536`, and run it again\n")
    assert errors.count("\n") == 1
    assert tree(here) == before


@contextmanager
def most_open_files(limit: int) -> Iterator[list[int]]:
    """Under a limit; yields a list for open files, which are closed at the end."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield opened
    finally:
        for handle in opened:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("name", FOLDER_WRITERS)
def test_no_open_file_is_left_for_the_clean_up(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with most_open_files(200) as opened:

        def open_all(folder: Path) -> None:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))

        monkeypatch.setattr(storage, "_sync_tree", open_all)
        before = tree(here)
        said = oper(*WRITERS[name].split(), "new")
    assert said.status == 2
    assert said.errors.startswith("error: new: cannot be written (Too many open files): allow ")
    assert said.errors.count("\n") == 1
    assert tree(here) == before


@pytest.mark.parametrize("free", range(14))
def test_few_open_files_for_what_is_written(here: Path, free: int) -> None:
    """Whatever is the first that cannot be opened, nothing is left, or all is written."""
    fine(*WRITERS["plan"].split(), "first")
    with most_open_files(200) as opened:
        while True:
            try:
                opened.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                break
        for handle in [opened.pop() for _ in range(free)]:
            os.close(handle)
        said = oper(*WRITERS["plan"].split(), "new")
    assert said.errors.count("\n") == (said.status == 2)
    assert not hidden(here)
    assert Path("new").exists() == (said.status == 0)


def test_what_cannot_be_removed_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sync(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(storage, "_sync_tree", sync)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    said = oper(*WRITERS["plan"].split(), "new")
    (left,) = hidden(here)
    warning, error = said.errors.splitlines()
    assert warning == f"warning: {here / left}: was left behind: it could not be removed; remove it"
    assert error.startswith("error: new: cannot be written (Input/output error): ")
