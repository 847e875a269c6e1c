"""The library of device kernels and the extension, built here; and whether an operator's error
comes to Python.

Where there is no compiler for devices, a library that was carried along is used as it is.
"""

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from scripts import build_cuda

SECONDS = 150.0
NEEDS = ("torch", "setuptools")
# Sizes that do not fit, which torch refuses, and addresses that are no whole numbers, which our
# operator does.
A_MISTAKE = """
import sys, torch
from oper.base import native
try:
    torch.zeros(2) + torch.zeros(3)
except RuntimeError:
    print("torch's own error was raised", file=sys.stderr)
try:
    native.ops().redirect(*[torch.zeros(1)] * 4)
except TypeError:
    pass
"""


def records() -> Iterator[dict[str, Any]]:
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    major, minor = torch.cuda.get_device_capability()
    kernels = [sys.executable, "scripts/build_cuda.py", "--architectures", f"{major}{minor}"]
    extension = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    commands = [("device kernels", kernels), ("extension", extension)]
    if build_cuda.toolkit() is None and build_cuda.LIBRARY.exists():
        yield {"carried along": "device kernels", "bytes": build_cuda.LIBRARY.stat().st_size}
        del commands[0]
    for what, command in commands:
        started = time.monotonic()
        # What compilers print goes to the log, as stdout has the records.
        code = subprocess.run(command, cwd=build_cuda.REPOSITORY, stdout=sys.stderr).returncode
        yield {
            "built": what,
            "seconds": round(time.monotonic() - started, 1),
            "failed": code != 0,
        }
    yield told_of_a_mistake()


def told_of_a_mistake() -> dict[str, Any]:
    """Whether an operator's error was raised. On one machine the process ended by signal 11 there;
    where it does, a debugger's account of it goes to the log."""
    command = [sys.executable, "-X", "faulthandler", "-c", A_MISTAKE]
    code = subprocess.run(command, cwd=build_cuda.REPOSITORY, stdout=sys.stderr).returncode
    debugger = next(filter(None, map(shutil.which, ("gdb", "cuda-gdb"))), None)
    if code and debugger:
        account = [debugger, "--batch", "-ex", "run", "-ex", "backtrace 40"]
        account += ["-ex", "info sharedlibrary", "--args", *command]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(account, cwd=build_cuda.REPOSITORY, stdout=sys.stderr, timeout=60)
    return {"an operator's error": "raised" if code == 0 else f"exit {code}", "failed": code != 0}
