"""A process that asked for it is killed with the one that started it."""

import signal
import subprocess
import sys
import time

CHILD = """
import os, sys, time
from oper.base import process_signals
{before}
process_signals.end_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
{after}
"""


def test_a_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(after="time.sleep(60)"), CHILD.format(before="")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert runs(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 60
    while runs(child):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_parent_that_was_gone_before() -> None:
    # The child closes its output, of which it prints nothing, long before it has slept.
    late = CHILD.format(before="time.sleep(1)")
    begun = time.monotonic()
    said = subprocess.run(
        [sys.executable, "-c", PARENT.format(after=""), late], capture_output=True, check=True
    )
    assert said.stdout == b""
    assert time.monotonic() - begun < 50


def runs(process: int) -> bool:
    """Whether it has not ended; one that nobody waited for is a zombie."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
