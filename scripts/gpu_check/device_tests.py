"""Tests of tests/cuda that have a variant for the device, as records of a stage."""

import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from scripts import build_cuda

NEEDS = ("torch", "numpy", "pytest", "hypothesis", "msgspec", "yaml")
WITH_RANKS = tuple(
    f"tests/cuda/test_{name}.py"
    for name in ("engine", "training", "mailbox", "replica_allreduce", "measure")
)
OF_TORCHREC = ("tests/cuda/test_torchrec.py",)
OF_GRAPHS = ("tests/cuda/test_graph_step.py", "tests/cuda/test_step_graph.py")
MARGIN_SECONDS = 4.0  # left of a stage when its tests are stopped, to start and to yield the counts
LINE = re.compile(r"(tests/\S+::.*?) *(?:(PASSED|FAILED|ERROR|SKIPPED).*)?\n?")  # of pytest -v


def device_tests(
    library: str | None, which: Sequence[str], dry: Sequence[str], seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield a record for each test that failed or ended the process, then the counts of all.

    On a device it runs the tests `which`, in a dry run the tests `dry` alone, emulated. After a
    test that ended the process the remaining tests run in a new process.
    """
    arguments = [*which, "-k", "on_cuda"] if library is None else [*dry]
    counts: Counter[str] = Counter()
    done: list[str] = []
    processes: list[subprocess.Popen[str]] = []
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        for process in processes:
            process.kill()

    timer = threading.Timer(seconds - MARGIN_SECONDS, stop)
    timer.start()
    code = -1
    try:
        while code < 0 and not stopped.is_set():
            command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
            command += [f"--deselect={test}" for test in done]
            process = subprocess.Popen(
                command, cwd=build_cuda.REPOSITORY, stdout=subprocess.PIPE, stderr=sys.stderr,
                text=True,
            )  # fmt: skip
            processes.append(process)
            assert process.stdout is not None
            running = ""
            for line in process.stdout:
                sys.stderr.write(line)
                if (match := LINE.fullmatch(line)) is None:
                    continue
                running, outcome = match[1], match[2]
                if outcome is not None:
                    done.append(running)
                    running = ""
                    counts[outcome.lower()] += 1
                    if outcome in ("FAILED", "ERROR"):
                        yield {"test": done[-1], "became": outcome.lower(), "failed": True}
            code = process.wait()
            if code < 0 and not stopped.is_set():
                if not running:
                    break  # between tests: the same would happen again
                done.append(running)
                counts["ended the process"] += 1
                yield {"test": running, "became": f"signal {-code}", "failed": True}
    finally:
        timer.cancel()
        stop()
    yield {
        "passed": counts["passed"],
        "not passed": counts["failed"] + counts["error"],
        "skipped": counts["skipped"],
        "ended the process": counts["ended the process"],
        "all run": code in (0, 1),
        "failed": code not in (0, 1) or not counts["passed"],
    }
