"""The extension and the library of device kernels, built here.

Files that were carried along (scripts/gpu_check/on_device.sh) and fit this checkout are kept.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts import build_cuda

SECONDS = 60.0
NEEDS = ("torch", "setuptools")
# Both libraries record their sources, which are compared when they are loaded (native.py).
LOADS = "from oper.base import native; native.device_ops()"


def records(library: str | None) -> Iterator[dict[str, Any]]:
    if library is not None:
        yield {"emulated kernels": library, "failed": not Path(library).exists()}
        return
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    if run(sys.executable, "-c", LOADS) == 0:
        yield {"carried along": "device kernels and extension", "failed": False}
        return
    major, minor = torch.cuda.get_device_capability()
    kernels = ["scripts/build_cuda.py", "--architectures", f"{major}{minor}"]
    extension = ["setup.py", "--quiet", "build_ext", "--inplace"]
    commands = [("extension", extension), ("device kernels", kernels)]
    if build_cuda.toolkit() is None and build_cuda.LIBRARY.exists():
        yield {"carried along": "device kernels", "failed": False}
        del commands[1]
    for what, command in commands:
        started = time.monotonic()
        code = run(sys.executable, *command)
        seconds = round(time.monotonic() - started, 1)
        yield {"built": what, "seconds": seconds, "failed": code != 0}


def run(*command: str) -> int:
    """Return a command's exit status. Its output goes to the log, as stdout has the records."""
    return subprocess.run(command, cwd=build_cuda.REPOSITORY, stdout=sys.stderr).returncode
