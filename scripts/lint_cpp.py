"""The C++ linters of `make lint`: clang-format, which .clang-format sets up, and cppcheck.

    python scripts/lint_cpp.py

Both come from wheels, so that all machines have the same versions.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = ("oper/csrc", "benchmarks/runtime/csrc", "tests/support/cuda")
SUFFIXES = (".h", ".cpp", ".cu", ".cuh")

CPPCHECK = (
    "--quiet",
    "--error-exitcode=1",
    "--std=c++20",
    "--language=c++",
    "--enable=warning,performance,portability",
    "--inline-suppr",
    "-Ioper/csrc",
    "-Ioper/csrc/include",
    # torch's headers are not read: its macros define functions.
    "-DTORCH_LIBRARY(name, m)=void library_##name(torch::Library& m)",
    "-DTORCH_LIBRARY_FRAGMENT(name, m)=void define_##name(torch::Library& m)",
    "-DTORCH_LIBRARY_IMPL(name, key, m)=void implement_##name##_##key(torch::Library& m)",
    # Aggregates are initialised by their makers.
    "--suppress=uninitMemberVarNoCtor",
    # Rows of a table are bytes that hold values of several types.
    "--suppress=invalidPointerCast",
)


def main() -> int:
    files = sorted(
        str(path.relative_to(REPOSITORY))
        for folder in FOLDERS
        for path in (REPOSITORY / folder).rglob("*")
        if path.suffix in SUFFIXES
    )
    # CUDA's keywords are not C++: nvcc checks these files, with its warnings as errors.
    sources = [name for name in files if name.endswith(".cpp")]
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    commands = (
        [tool("clang-format"), "--dry-run", "-Werror", *files],
        [tool("cppcheck"), jobs, *CPPCHECK, *sources],
    )
    failed = [subprocess.run(command, cwd=REPOSITORY).returncode != 0 for command in commands]
    return int(any(failed))


def tool(name: str) -> str:
    """Return the program of this name next to this Python, or else on the path."""
    beside = os.path.dirname(sys.executable)
    path = shutil.which(name, path=os.pathsep.join([beside, os.environ.get("PATH", "")]))
    if path is None:
        sys.exit(f"{name} is not installed; `make install` installs what requirements.txt pins")
    return path


if __name__ == "__main__":
    sys.exit(main())
