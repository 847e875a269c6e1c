"""Output within the block does not appear; output before and after does."""

import subprocess
import sys

SCRIPT = """
import ctypes
from oper.base import standard_streams
libc = ctypes.CDLL(None)
print("before", flush=False)
with standard_streams.native_output_dropped():
    libc.puts(b"from C")
    with standard_streams.native_output_dropped():
        libc.puts(b"from C, further in")
    libc.puts(b"from C again")
libc.puts(b"C after")
libc.fflush(None)
print("after")
"""


def test_only_what_is_printed_within_is_dropped() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["before", "C after", "after", ""]


def test_a_closed_standard_output_is_no_error() -> None:
    closed = "import os; os.close(1)\n" + SCRIPT.replace("print(", "str(").replace(
        ", flush=False", ""
    )
    done = subprocess.run([sys.executable, "-c", closed], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
