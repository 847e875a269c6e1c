"""What may come of reading a file: success or an OperError of one line, soon and in bounded memory.

Time is of the processor, as the machine may be busy; memory is what the process may map beyond what
it had mapped before.
"""

import resource
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

from oper.base.errors import OperError

MOST_SECONDS = 5.0
MOST_BYTES = 4 << 30


class Outcomes:
    """Outcomes by kind, and the defects among them with the seeds that make them again."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.defects: list[str] = []
        signal.signal(signal.SIGPROF, _stop)
        _limit_memory()

    def of(self, what: str, seed: str, read: Callable[[], object]) -> None:
        """Read, and note what came of it; `seed` says how to do it again."""
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, 4 * MOST_SECONDS)
        try:
            read()
            outcome = "read"
        except OperError as error:
            outcome = "refused"
            if "\n" in str(error):
                self._defect(what, seed, f"more than one line: {error!s:.300}")
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            outcome = "defect"
            self._defect(
                what,
                seed,
                f"{type(error).__name__}: {error!s:.200} ({where.filename}:{where.lineno})",
            )
        signal.setitimer(signal.ITIMER_PROF, 0)
        if (seconds := time.process_time() - begun) > MOST_SECONDS:
            self._defect(what, seed, f"{seconds:.1f} s")
        self.counts[what, outcome] += 1

    def report(self) -> str:
        """Counts by kind of input, and the defects, each once."""
        kinds = sorted({what for what, _ in self.counts})
        lines = [
            f"{what:24} {self.counts[what, 'read']:8,} read "
            f"{self.counts[what, 'refused']:8,} refused {self.counts[what, 'defect']:6,} defects"
            for what in kinds
        ]
        return "\n".join([*lines, *dict.fromkeys(self.defects)])

    def _defect(self, what: str, seed: str, reason: str) -> None:
        self.defects.append(f"DEFECT {what}, seed {seed}: {reason}")


def _stop(number: int, frame: Any) -> None:
    raise TimeoutError("takes without end")


def _limit_memory() -> None:
    with open("/proc/self/statm", encoding="utf-8") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MOST_BYTES, hard))
