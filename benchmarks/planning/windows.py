"""Windows of a profile: their size on the disk, and what writing, summing and pricing them takes.

Criteo-Kaggle sizes, drawn as `oper synth criteo-kaggle --counts --windows N` does. Needed are a row
number and a count, 4 bytes each, for every row that a window read. Each line is a command in a
process of its own: its processor time, and its largest resident set, mapped files included.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import parser, publish
from oper.cli.shared.console import new_table
from oper.profiling.profile import Profile

_WORKLOAD = "--topology dgx-a100 --mode inference --batch-size 131072 --extra-memory 1%"
COMMANDS = {
    "draw and write the windows": "synth criteo-kaggle --counts --scale {1} --windows {2} -o {0}/w",
    "plan for the first": f"plan {{0}}/w@0 {_WORKLOAD} -o {{0}}/plan",
    "show their sum": "profiles show {0}/w",
    "write their sum": "profiles merge {0}/w -o {0}/sum",
    "drift in every window": "drift {0}/plan {0}/w --all-windows",
}


def measure(windows: int, scale: float, folder: Path) -> list[dict[str, Any]]:
    """The lines of the table; the windows are left in `folder`."""
    lines = []
    for name, command in COMMANDS.items():
        words = command.format(folder, scale, windows).split()
        quiet = [
            (os.POSIX_SPAWN_OPEN, output, os.devnull, os.O_WRONLY, 0)
            for output in (sys.stdout.fileno(), sys.stderr.fileno())
        ]
        arguments = [sys.executable, "-m", "oper", *words]
        process = os.posix_spawn(sys.executable, arguments, os.environ, file_actions=quiet)
        _, status, used = os.wait4(process, 0)
        assert os.waitstatus_to_exitcode(status) == 0, f"oper {' '.join(words)}"
        seconds = used.ru_utime + used.ru_stime
        lines.append({"command": name, "cpu_seconds": seconds, "peak_mb": used.ru_maxrss / 1024})
    return lines


def sizes(folder: Path, windows: int) -> dict[str, Any]:
    """Bytes of the windows' counters, beside what their rows need."""
    read = [int(np.count_nonzero(Profile.load(f"{folder}@{n}").accesses)) for n in range(windows)]
    return {
        "windows": windows,
        "rows": Profile.load(f"{folder}@0").rows,
        "rows_read": sum(read) / windows,
        "needed_bytes": 8 * sum(read),
        "bytes": sum(path.stat().st_size for path in folder.rglob("*.npy")),
    }


def table(lines: list[dict[str, Any]]) -> Any:
    """A line for each command."""
    made = new_table("command", "processor time", "peak memory")
    for line in lines:
        made.add_row(line["command"], f"{line['cpu_seconds']:.1f} s", f"{line['peak_mb']:,.0f} MB")
    return made


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--windows", type=int, default=35, help="windows of the log")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = measure(given.windows, given.scale, Path(folder))
        found = sizes(Path(folder) / "w", given.windows)
    publish(
        given,
        {**found, "commands": lines},
        lambda: table(lines),
        f"{found['windows']} windows of {found['rows']:,} rows, of which one reads "
        f"{found['rows_read']:,.0f}:",
        f"{found['bytes'] / 1e6:,.1f} MB of counters, and {found['needed_bytes'] / 1e6:,.1f} MB "
        f"are needed ({found['bytes'] / found['needed_bytes']:.3f} times that)",
    )


if __name__ == "__main__":
    main()
