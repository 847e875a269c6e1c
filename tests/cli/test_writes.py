"""Commands write whole or not at all: places taken, full disks, Ctrl-C."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oper.files import temporaries
from tests.support.commands import SYNTH, fine, oper, refused, tree

WRITERS = {
    "profile": "profile log.parquet --columns C* -o",
    "windows": "profile log.parquet --columns C* --windows 2 -o",
    "mapped": "profile log.parquet --columns C* --memory-limit 0 -o",
    "vocabularies": "profile log.parquet --columns C* --ids vocab -o",
    "merge": "profiles merge w@0 w@1 -o",
    "plan": "plan p --topology cpu:2 -o",
    "replan": "replan q w@1 -o",
    "counts": f"{SYNTH} --counts -o",
    "synth": f"{SYNTH} -o",
}
FOLDER_WRITERS = [name for name in WRITERS if name != "synth"]


@pytest.mark.parametrize("name", FOLDER_WRITERS)
def test_places_that_are_taken(here: Path, name: str) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep")
    for place in ("mine", "log.parquet", "log.parquet/deep"):
        refused(f"{WRITERS[name]} {place}", place, "choose another path")


@pytest.mark.parametrize("name", FOLDER_WRITERS)
def test_nothing_is_written_into_a_folder_of_opers(here: Path, name: str) -> None:
    for folder in ("q", "p", "w"):
        held = tree(here / folder)
        refused(f"{WRITERS[name]} {folder}/inner/new", f"lies in {here / folder}, which oper wrote")
        assert tree(here / folder) == held


def test_a_taken_place_is_told_before_the_work(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*_: object) -> None:
        raise AssertionError("planned, to find that the plan cannot be written")

    monkeypatch.setattr("oper.planner.make_plan.plan_and_placement", work)
    monkeypatch.setattr("oper.planner.replan.replan.replan", work)
    monkeypatch.setattr("oper.measure.launch.measure_local", work)
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep")
    refused("plan p --topology cpu:2 -o mine", "mine")
    refused("replan q p -o mine", "mine")
    refused("topology measure --ranks 2 -o mine", "mine", "folder")


def test_logs_are_written_to_files(here: Path) -> None:
    Path("folder.parquet").mkdir()
    refused(f"{SYNTH} -o folder.parquet", "folder.parquet", "another path")
    refused(f"{SYNTH} -o log.parquet/x.parquet", "log.parquet", "another path")


@pytest.mark.parametrize("command", ["report q", "topology measure --ranks 2"])
@pytest.mark.parametrize("place", ["new/", "log.parquet/"])
def test_files_are_not_written_to_names_of_folders(here: Path, command: str, place: str) -> None:
    refused(f"{command} --force -o {place}", f"'{place}': a file was to be written", "another path")


@pytest.mark.parametrize(
    "command", ["report q", "topology measure --ranks 2", "plan p", "replan q p"]
)
def test_devices_and_pipes_are_not_written_to(here: Path, command: str) -> None:
    os.mkfifo("pipe")
    topology = " --topology cpu:2" if command == "plan p" else ""
    for place in ("/dev/null", "pipe"):
        said = oper(*f"{command}{topology} --force -o {place}".split())
        assert said.status == 2
        assert said.errors.startswith(f"error: {place}: exists and is not a ")


# A full disk and Ctrl-C in the middle of a write


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Files cannot grow beyond a size, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk(here: Path, name: str, there: bool) -> None:
    """Nothing is left where nothing was, and what was there before stays."""
    place = "new.parquet" if name == "synth" else "new"
    command = f"{WRITERS[name]} {place}"
    if there:
        fine(*command.split())
        command += " --force"
    with largest_file(100):
        refused(command, place, "cannot be written", "free space")


@pytest.mark.parametrize("name", WRITERS)
def test_a_disk_that_fails_at_last(here: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    place = "new.parquet" if name == "synth" else "new"
    refused(f"{WRITERS[name]} {place}", place, "No space left on device")


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", WRITERS)
def test_ctrl_c_while_writing(
    here: Path, name: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "new.parquet" if name == "synth" else "new"
    command = f"{WRITERS[name]} {place}"
    if there:
        fine(*command.split())
        command += " --force"
    before = tree(here)
    pressed: list[int] = []

    def fsync(handle: int) -> None:
        # Files are flushed by several threads, and Ctrl-C is pressed once.
        pressed.append(handle)
        if len(pressed) == 1:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        said = oper(*command.split())
    assert said.status == 130, said
    assert said.errors == "interrupted; nothing was left half-written\n"
    assert said.out == ""
    assert tree(here) == before


@pytest.mark.parametrize("name", ["plan", "synth"])
def test_ctrl_c_just_after_the_temporary_file_is_made(
    here: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = tree(here)
    lock = temporaries._lock
    pressed: list[int] = []

    def press(handle: int) -> bool:
        if not pressed:
            pressed.append(handle)
            signal.raise_signal(signal.SIGINT)
        return lock(handle)

    with monkeypatch.context() as patch:
        patch.setattr(temporaries, "_lock", press)
        said = oper(*f"{WRITERS[name]} new.parquet".split())
    assert pressed
    assert said.status == 130, said
    assert tree(here) == before


def test_ctrl_c_from_a_terminal(tmp_path: Path) -> None:
    """The real signal to a process of its own, as soon as its temporary file is there."""
    script = "import sys; from oper.cli import main; main()"
    command = "synth criteo-kaggle --scale 0.01 --samples 50000000 -o log.parquet"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 600
        while not any(tmp_path.iterdir()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert (out, errors) == ("", "interrupted; nothing was left half-written\n")
    assert not list(tmp_path.iterdir())
