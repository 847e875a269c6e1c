"""The library of device kernels and the extension, built here.

Where there is no compiler for devices, a library that was carried along is used as it is.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from scripts import build_cuda

SECONDS = 150.0
NEEDS = ("torch", "setuptools")


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
