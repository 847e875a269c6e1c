"""Permitted outcomes of reading a file: success or an OperError of one line, soon and in bounded
memory.

Time is processor time, because the machine may be busy; memory is the limit on additional mappings
of the process. Each outcome is a line of a log, which survives a crash.
"""

import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oper.base.errors import OperError

MOST_SECONDS = 5.0
MOST_BYTES = 4 << 30


class Outcomes:
    """Log of outcomes: seed, kind of file, outcome and fault, separated by tabs."""

    def __init__(self, log: Path) -> None:
        self._log = open(log, "a", encoding="utf-8")  # noqa: SIM115  (as long as the process)
        signal.signal(signal.SIGPROF, _stop)
        _limit_memory()

    def of(self, what: str, seed: int, read: Callable[[], object]) -> None:
        """Read, and log the outcome; `seed` reproduces it."""
        self._log.write(f"{seed}\t{what}\t")
        self._log.flush()  # it may crash
        begun, wrong = time.process_time(), ""
        signal.setitimer(signal.ITIMER_PROF, 4 * MOST_SECONDS)
        try:
            read()
            outcome = "read"
        except OperError as error:
            outcome = "refused"
            if "\n" in str(error):
                wrong = f"more than one line: {error!s:.300}"
        except Exception as error:
            at, outcome = traceback.extract_tb(error.__traceback__)[-1], "failed"
            wrong = f"{type(error).__name__}: {error!s:.200} ({at.filename}:{at.lineno})"
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not wrong and (seconds := time.process_time() - begun) > MOST_SECONDS:
            wrong = f"{seconds:.1f} s"
        self._log.write(f"{outcome}\t{' '.join(wrong.split())}\n")


def report(log: Path) -> tuple[str, list[str]]:
    """Return the counts by kind of file, and the defects in a log."""
    counts: Counter[tuple[str, str]] = Counter()
    defects = []
    for line in log.read_text(encoding="utf-8").splitlines():
        seed, what, outcome, wrong = line.split("\t")
        counts[what, outcome] += 1
        if wrong:
            defects.append(f"DEFECT {what}, seed {seed}: {wrong}")
    lines = [
        f"{what:24} {counts[what, 'read']:8,} read {counts[what, 'refused']:8,} refused"
        for what in sorted({what for what, _ in counts})
    ]
    return "\n".join([*lines, f"{sum(counts.values()):,} files"]), defects


def _stop(number: int, frame: Any) -> None:
    raise TimeoutError("takes without end")


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="utf-8") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_BYTES, hard))
