"""setup.py on a small project: compiled files, kept objects, progress, interruptions."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.install import REPOSITORY

pytestmark = pytest.mark.check

# In the order in which setup.py compiles them: four units, of which the second has two files.
GRADIENTS, LOOKUP, UPDATE = "cpu/step/gradients.cpp", "cpu/step/lookup.cpp", "cpu/step/update.cpp"
DEVICE, OTHER = "device/one.cpp", "other.cpp"
SOURCES = [GRADIENTS, LOOKUP, UPDATE, OTHER, DEVICE]
SECONDS = 600
# It notes each source that it compiles, and never ends with the source that `stops_at` names.
COMPILER = """#!/bin/sh
for argument in "$@"; do
  case $argument in
  *.cpp)
    echo "$argument" >> compiled
    if [ "$argument" = "$(cat stops_at 2>/dev/null)" ]; then touch reached; exec sleep 600; fi ;;
  esac
done
exec c++ "$@"
"""


class Project:
    """A copy of setup.py, five sources, and two headers, one of which includes the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        shutil.copy(REPOSITORY / "setup.py", folder)
        self.write("oper/__init__.py", "")
        self.write("oper/csrc/include/oper/outer.h", '#include "oper/inner.h"\n')
        self.write("oper/csrc/include/oper/inner.h", "#pragma once\n")
        for source in SOURCES:
            header = '#include "oper/outer.h"\n' if source in (UPDATE, OTHER) else ""
            function = f'extern "C" int {Path(source).stem}() {{ return 1; }}\n'
            self.write(f"oper/csrc/{source}", header + function)
        compiler = self.write("compiler", COMPILER)
        compiler.chmod(0o755)
        self.environment = {
            **{key: value for key, value in os.environ.items() if key != "CFLAGS"},
            "CXX": str(compiler),
            "MAX_JOBS": "1",
            "TMPDIR": str(self.temporary),
        }
        self.command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(self, **options: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=self.environment,
            start_new_session=True,
            text=True,
            **options,  # type: ignore[call-overload]
        )

    def build(self, *flags: str) -> tuple[int, str]:
        """Return the exit status and the text of a build with these CFLAGS."""
        (self.folder / "compiled").unlink(missing_ok=True)
        self.environment["CFLAGS"] = " ".join(flags)
        process = self.start(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(timeout=SECONDS)
        return process.returncode, output

    def compiled(self) -> list[str]:
        """Return the sources that the last build compiled."""
        noted = self.folder / "compiled"
        names = noted.read_text().split() if noted.exists() else []
        return [name.removeprefix("oper/csrc/") for name in names]

    def rebuilt(self, *flags: str) -> list[str]:
        status, output = self.build(*flags)
        assert status == 0, output
        return self.compiled()

    def library(self) -> Path:
        (found,) = (self.folder / "oper").glob("_C*.so")
        return found


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


def test_a_build_makes_the_library_and_leaves_no_temporary_files(project: Project) -> None:
    assert project.rebuilt() == SOURCES
    exported = subprocess.run(
        ["nm", "--dynamic", "--defined-only", project.library()], capture_output=True, text=True
    ).stdout
    assert {line.split()[-1] for line in exported.splitlines()} >= {
        "gradients",
        "lookup",
        "update",
        "one",
        "other",
    }
    assert not list(project.temporary.iterdir())
    assert not list((project.folder / "build").rglob(".*"))


def test_objects_are_used_until_what_they_are_made_from_changes(project: Project) -> None:
    assert project.rebuilt() == SOURCES
    assert project.rebuilt() == []
    source = project.folder / "oper/csrc" / DEVICE
    before = source.read_text()
    source.write_text(before + "\n// changed")
    assert project.rebuilt() == [DEVICE]
    source.write_text(before)
    assert project.rebuilt() == [], "the object of the text before is still there"
    project.write("oper/csrc/include/oper/inner.h", "#pragma once\n// changed\n")
    assert project.rebuilt() == [LOOKUP, UPDATE, OTHER], "two units include it through another"
    assert project.rebuilt("-DCHANGED") == SOURCES
    assert project.rebuilt() == []
    # Only times change: a clone, or a cache of a CI.
    for path in project.folder.rglob("*.cpp"):
        os.utime(path)
    assert project.rebuilt() == []
    project.library().unlink()
    assert project.rebuilt() == []
    assert project.library().exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_build_goes_on_where_it_was(project: Project, how: signal.Signals) -> None:
    stops_at = project.write("stops_at", f"oper/csrc/{OTHER}")
    process = project.start(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + SECONDS
    while not (project.folder / "reached").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, how)
    assert process.wait(SECONDS) != 0
    assert project.compiled() == [GRADIENTS, LOOKUP, UPDATE, OTHER], "and no further one"
    assert not list((project.folder / "oper").glob("_C*"))
    assert not list(project.temporary.iterdir())
    stops_at.unlink()
    assert project.rebuilt() == [OTHER, DEVICE]
    assert project.library().exists()


def test_an_error_of_the_compiler_ends_the_build_and_keeps_finished_objects(
    project: Project,
) -> None:
    source = project.folder / "oper/csrc" / UPDATE
    before = source.read_text()
    source.write_text("nonsense;\n" + before)
    status, output = project.build()
    assert status != 0
    assert "nonsense" in output
    assert f"oper/csrc/{UPDATE}:1" in output
    assert project.compiled() == [GRADIENTS, LOOKUP, UPDATE], "and no further one"
    source.write_text(before)
    assert project.rebuilt() == [LOOKUP, UPDATE, OTHER, DEVICE]


def test_a_missing_compiler_is_named(project: Project) -> None:
    project.environment["CXX"] = "no-such-compiler -stdlib=any"
    status, output = project.build()
    assert status != 0
    assert "expected a C++20 compiler; found no no-such-compiler (No such file" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("jobs", ["0", "two", "-1"])
def test_another_number_of_jobs_than_a_positive_one_is_refused(project: Project, jobs: str) -> None:
    project.environment["MAX_JOBS"] = jobs
    status, output = project.build()
    assert status != 0
    assert f"MAX_JOBS: expected a positive integer, got {jobs!r}" in output
    assert "Traceback" not in output


def test_objects_that_no_build_uses_are_removed_after_days(project: Project) -> None:
    project.rebuilt("-DOTHER")
    others = set((project.folder / "build/objects").glob("*.o"))
    project.rebuilt()
    used = set((project.folder / "build/objects").glob("*.o")) - others
    assert len(used) == len(others) == 4
    long_ago = time.time() - 8 * 24 * 3600
    for path in (project.folder / "build/objects").iterdir():
        os.utime(path, (long_ago, long_ago))
    project.rebuilt()
    assert set((project.folder / "build/objects").glob("*.o")) == used
    assert project.rebuilt() == []


def test_progress_is_shown_on_a_terminal_alone(project: Project) -> None:
    own, terminal = pty.openpty()
    process = project.start(stdout=terminal, stderr=terminal, stdin=terminal)
    os.close(terminal)
    shown = b""
    try:
        while part := os.read(own, 1 << 16):
            shown += part
    except OSError:  # the terminal's last user has ended
        pass
    os.close(own)
    assert process.wait(SECONDS) == 0
    lines = shown.decode().replace("\x1b[K", "").strip().split("\r")
    counted = [line for line in lines if "compiling" in line]
    assert counted == [f"oper: compiling {n} of 4" for n in (1, 2, 3, 4)]

    status, output = project.build("-DCHANGED")
    assert status == 0
    assert output == "oper: compiling 4 of 4 units\n"
    assert project.build() == (0, "")


def test_progress_counts_what_an_interrupted_build_has_finished(project: Project) -> None:
    project.rebuilt()
    (made,) = (project.folder / "build/objects").glob("device-*.o")
    made.unlink()
    assert project.build()[1] == "oper: compiling 1 of 4 units\n"
    assert project.compiled() == [DEVICE]
