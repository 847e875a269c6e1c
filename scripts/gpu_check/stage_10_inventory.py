"""The device, the driver, the compiler and the packages."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from scripts import build_cuda

SECONDS = 5.0
NEEDS: tuple[str, ...] = ()
PACKAGES = (
    "torch", "numpy", "pytest", "hypothesis", "safetensors", "setuptools",
    "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "triton", "msgspec", "pulp",
)  # fmt: skip


def records(library: str | None) -> Iterator[dict[str, Any]]:
    toolkit = build_cuda.toolkit()
    yield {"what": "Python", "found": platform.python_version()}
    yield {"what": "kernel", "found": platform.release()}
    yield {"what": "CUDA compiler", "found": str(toolkit) if toolkit else "missing"}
    for package in PACKAGES:
        try:
            yield {"what": package, "found": importlib.metadata.version(package)}
        except importlib.metadata.PackageNotFoundError:
            yield {"what": package, "found": "missing"}
    if library is not None:
        yield {"what": "device", "found": "emulated"}
    elif shutil.which("nvidia-smi"):
        asked = "name,driver_version,memory.total,compute_cap,clocks.max.memory"
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True)
        yield {"what": "device", "found": said.stdout.strip() or said.stderr.strip()}
    else:
        yield {"what": "device", "found": "no nvidia-smi"}
