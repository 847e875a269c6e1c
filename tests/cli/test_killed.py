"""Commands that are stopped or killed: what they leave, and what the next one does about it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oper.files import temporaries
from oper.plan.plan import Plan
from tests.support.commands import SYNTH, Before, fine, hidden, oper, tree

PLAN = "plan p --topology cpu:2 -o"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_command(
    here: Path, number: signal.Signals, before: Before, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first one while files are written, a second one while it is cleaned up."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    remove = shutil.rmtree
    pressed: list[str] = []

    def press_again(*arguments: object, **options: object) -> None:
        pressed.append("again")
        signal.raise_signal(number)
        remove(*arguments, **options)  # type: ignore[arg-type]

    expected = tree(here)
    before("_sync_tree", lambda: signal.raise_signal(number))
    monkeypatch.setattr(shutil, "rmtree", press_again)
    said = oper(*PLAN.split(), "q", "--force")
    assert said.status == 128 + number
    assert said.errors.endswith("nothing was left half-written\n")
    assert said.errors.count("\n") == 1
    assert pressed
    assert tree(here) == expected
    after = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == handlers


def test_signals_while_a_folder_is_replaced(
    here: Path, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait until the new folder has its name and the old one is gone."""
    real = os.rename
    fine(*PLAN.split(), "new")
    expected = tree(here)

    def rename(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGINT)
        real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    assert oper(*PLAN.split(), "new", "--force").status == 130
    assert tree(here) == expected


# SIGHUP goes the way of SIGTERM, as above.
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_native_code(here: Path, number: signal.Signals) -> None:
    """Python cannot raise anything: the next command removes the temporary."""
    endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select max(x) from c"
    script = f"""
import sqlite3, threading
from oper.base import process_signals
from oper.files import storage
process_signals._GRACE_SECONDS = 0.1
def sync(folder):
    threading.Timer(1, print, ("there",), {{"flush": True}}).start()
    sqlite3.connect(":memory:").execute({endless!r}).fetchone()
storage._sync_tree = sync
from oper.cli import main
main()
"""
    assert_stopped(number, script, *PLAN.split(), "new")
    assert len(hidden(here)) == 1
    fine(*PLAN.split(), "new")
    assert not hidden(here)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_a_process_that_catches_them(number: signal.Signals) -> None:
    """A library may do so in the middle of its import."""
    script = """
import contextlib, time
from oper.base import process_signals
process_signals._GRACE_SECONDS = 0.1
with process_signals.raised():
    with contextlib.suppress(BaseException):
        print("there", flush=True)
        time.sleep(60)
    time.sleep(60)
"""
    assert_stopped(number, script)


def assert_stopped(number: signal.Signals, script: str, *arguments: str) -> None:
    """A script that prints "there" ends by a signal that it does not obey, with one line."""
    command = [sys.executable, "-c", script, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert errors.startswith(f"stopped by {number.name} in the middle of a step; ")
    assert errors.count("\n") == 1


def test_signals_wait_for_the_native_library() -> None:
    script = """
import importlib, signal
from oper.base import native
imported = []
def load(name):
    signal.raise_signal(signal.SIGINT)
    imported.append(name)
    return real(name)
real, importlib.import_module = importlib.import_module, load
try:
    native.ops()
except KeyboardInterrupt:
    print(imported)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=True
    )
    assert done.stdout == "['oper._C']\n"


def test_ignored_signals_stay_ignored(here: Path, before: Before) -> None:
    """nohup sets the signal so."""
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        before("_sync_tree", lambda: signal.raise_signal(signal.SIGHUP))
        fine(*PLAN.split(), "new")
    finally:
        signal.signal(signal.SIGHUP, handler)


# SIGINT and SIGHUP go the way of SIGTERM: test_signals_end_a_command.
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_and_run_again(tmp_path: Path, number: signal.Signals) -> None:
    """The next command removes the leftovers of a killed command, but not those of a living one."""
    process, other = (start_long(tmp_path) for _ in range(2))
    try:
        process.send_signal(number)
        out, errors = process.communicate(timeout=600)
        if number == signal.SIGKILL:
            assert len(hidden(tmp_path)) == 2
        else:
            assert process.returncode == 128 + number
            assert (out, errors) == (
                "",
                f"stopped by {number.name}; nothing was left half-written\n",
            )
        fine(*SYNTH.split(), "-o", tmp_path / "log.parquet")
        assert len(hidden(tmp_path)) == 1
        assert other.poll() is None
    finally:
        for each in (process, other):
            each.kill()
            each.communicate()
    fine(*SYNTH.split(), "-o", tmp_path / "log.parquet", "--force")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.parquet", "log.tables.yaml"]


@pytest.mark.parametrize("last", ["one step", "first of two steps"])
def test_killed_between_two_names(here: Path, last: str) -> None:
    """The folder that stood there is put back, or removed where the new one has its name."""
    fine(*PLAN.split(), "new")
    if last == "one step":
        die = "real = renames.exchange; renames.exchange = lambda *a: real(*a) and os._exit(9)"
    else:
        die = (
            "renames._renameat2 = lambda *_: False; real = overwrite_rules.is_wholly\n"
            "storage.folder_refusal = lambda f, k, overwrite: os._exit(9) if 'old' in f.name else 0"
        )
    script = "import os, sys\nfrom oper.files import overwrite_rules, storage\n"
    script += f"from oper.files import atomic_renames as renames\n{die}\n"
    script += "from oper.cli import main; main()"
    command = [sys.executable, "-c", script, *PLAN.split(), "new", "--force"]
    assert subprocess.run(command, check=False).returncode == 9
    assert hidden(here)
    assert Path("new").exists() == (last == "one step")
    said = oper(*PLAN.split(), "new")
    assert said.status == 2
    assert "new: exists" in said.errors
    Plan.load("new")
    assert not hidden(here)


def test_an_old_folder_that_is_not_wholly_ours_is_not_swept(here: Path) -> None:
    fine(*PLAN.split(), "new")
    name = temporaries.hidden_name(Path("new"), temporaries.OLD)
    shutil.copytree("new", name)
    Path(name, "theirs.txt").write_text("theirs")
    fine(*PLAN.split(), "new", "--force")
    assert Path(name, "theirs.txt").read_text() == "theirs"


def test_what_other_hosts_write_is_not_swept(here: Path) -> None:
    Path(".new.0000000012345678.oper-tmp").mkdir()
    Path(".new.tmp").mkdir()
    fine(*PLAN.split(), "new")
    assert hidden(here) == [".new.0000000012345678.oper-tmp", ".new.tmp"]


def test_without_locks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some network file systems: all works, and leftovers stay."""

    def flock(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    left = temporaries.hidden_name(Path("new"), temporaries.UNFINISHED)
    left.mkdir()
    fine(*PLAN.split(), "new")
    fine(*PLAN.split(), "new", "--force")
    assert hidden(here) == [left.name]


def start_long(folder: Path) -> "subprocess.Popen[str]":
    """A command in a process of its own that takes minutes, once its temporary file is there."""
    known = len(hidden(folder))
    # However busy the machine is, the command has the time to clean up.
    script = "from oper.base import process_signals; process_signals._GRACE_SECONDS = 60.0\n"
    script += "from oper.cli import main; main()"
    command = "synth criteo-kaggle --scale 0.01 --samples 50000000 -o log.parquet"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command.split()],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 600
    while len(hidden(folder)) == known:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process
