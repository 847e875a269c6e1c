"""Operator errors that end the process: the conditions under which they are raised.

On one machine an operator's wrong argument ended the process by signal 11, instead of raising as
elsewhere. Each try is a process that makes a mistake under other conditions: torch's own operator,
ours before CUDA and after it, thrown in libc10 and in the extension; with other settings of the
loader; with an extension built here, if another was carried along; and the same throw in an
extension of one file, by other flags. The log has the toolchain, the mapped libraries and a
debugger's account of a try that ended.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts import build_cuda

SECONDS = 60.0
TRY_SECONDS = 30.0  # so that a try that hangs leaves the stage time for a debugger
NEEDS = ("torch", "setuptools")
CARRIED = build_cuda.REPOSITORY / ".gpu"

TORCHS = """
import torch
try: torch.zeros(2) + torch.zeros(3)
except RuntimeError: print("raised")
"""
# Addresses that are not whole numbers: TypeError, thrown in the extension.
OURS = """
import torch
from oper.base import native
try: native.ops().redirect(*[torch.zeros(1)] * 4)
except TypeError: print("raised")
"""
# TORCH_CHECK throws in libc10.
IN_LIBC10 = """
from oper.base import native
try: native.ops().load_device_library("/nonexistent.so")
except RuntimeError: print("raised")
"""
ON_DEVICE = """
import torch
from oper.base import native
native.device_ops()
one = torch.zeros(1, device="cuda")
try: native.ops().redirect(*[one] * 4)
except (TypeError, ValueError): print("raised")
"""
ONE_FILE = """
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>
static int64_t f(const at::Tensor& t) {
  TORCH_CHECK_TYPE(t.scalar_type() == at::kLong, "dtype ", t.scalar_type());
  return 1;
}
TORCH_LIBRARY(one, m) {
  m.def("f(Tensor t) -> int");
  m.impl("f", c10::DispatchKey::CompositeExplicitAutograd, f);
}
"""
OF_ONE_FILE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
try: torch.ops.one.f(torch.zeros(1))
except TypeError: print("raised")
"""
FLAGS = {
    "as ours": (),
    "hardening off": ("-fcf-protection=none", "-fno-stack-protector", "-U_FORTIFY_SOURCE"),
    "symbols bound inside": ("-Wl,-Bsymbolic-functions", "-Wl,-O1"),
    "-O1": ("-O1",),
    "libgcc and libstdc++ in it": ("-static-libgcc", "-static-libstdc++"),
}
MAPPED = """
import torch
if torch.cuda.is_available(): torch.cuda.init()
from oper.base import native
native.ops()
words = ("gcc_s", "stdc++", "unwind", "c10", "_C.", "_cuda", "cudart", "gomp", "asan")
files = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(*sorted(file for file in files if any(word in file for word in words)), sep="\\n")
"""


def records(library: str | None) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            told = pool.submit(describe_machine)
            outcomes = [pool.submit(*attempt) for attempt in tries(folder, library is not None)]
            for outcome in outcomes:
                yield outcome.result()
            told.result()
        if any(outcome.result()["failed"] for outcome in outcomes):
            debug(OURS)


def tries(folder: Path, dry: bool) -> Iterator[Sequence[Any]]:
    """Yield each try as a function and its arguments; in a dry run one of each kind."""
    yield try_code, "torch's own error", TORCHS
    yield try_code, "ours", OURS
    flags = dict(list(FLAGS.items())[:1]) if dry else FLAGS
    for name, added in flags.items():
        yield try_one_file, name, added, folder
    if dry:
        return
    yield try_code, "ours, thrown in libc10", IN_LIBC10
    yield try_code, "ours, on the device", ON_DEVICE
    yield try_code, "ours, without C++ traces", OURS, {"TORCH_SHOW_CPP_STACKTRACES": "0"}
    yield try_code, "ours, symbols bound at start", OURS, {"LD_BIND_NOW": "1"}
    runtime = ":".join(map(compilers_file, ("libstdc++.so.6", "libgcc_s.so.1")))
    yield try_code, "ours, the compiler's C++ runtime first", OURS, {"LD_PRELOAD": runtime}
    if list(CARRIED.glob("_C*.so")):
        yield try_built_here, folder


def try_code(
    name: str,
    code: str,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str | Path] = (),
    folder: Path = build_cuda.REPOSITORY,
) -> dict[str, Any]:
    """Run code that makes a mistake, and return a record that says whether it was raised."""
    command = [sys.executable, "-X", "faulthandler", "-c", code, *map(str, arguments)]
    variables = os.environ | (environment or {})
    # The folder's own `oper` comes first: -c puts the working directory there.
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=TRY_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"try": name, "exit": "late", "raised": False, "failed": True}
    if done.stderr:
        print(f"---- {name}\n{done.stderr}", file=sys.stderr, flush=True)
    raised = done.returncode == 0 and "raised" in done.stdout
    return {"try": name, "exit": done.returncode, "raised": raised, "failed": not raised}


def try_one_file(name: str, flags: Sequence[str], folder: Path) -> dict[str, Any]:
    """Compile the extension of one file with flags, and make its mistake."""
    import torch

    root = Path(torch.__file__).parent
    source, made = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(ONE_FILE)
    command: list[str | Path] = ["c++", "-shared", "-fPIC", "-O3", "-std=c++20", "-fopenmp"]
    command += [f"-I{sysconfig.get_path('include')}", f"-I{root / 'include'}"]
    command += [*flags, source, "-o", made, f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    name = f"one file: {name}"
    return failure_of_build(name, command) or try_code(name, OF_ONE_FILE, arguments=[made])


def try_built_here(folder: Path) -> dict[str, Any]:
    """Build the extension here next to the carried one, and make its mistake."""
    name, build = "ours, built here", [sys.executable, "setup.py", "--quiet", "build_ext"]
    build += ["--build-lib", str(folder / "lib")]
    if (failure := failure_of_build(name, build)) is not None:
        return failure
    leave_out = shutil.ignore_patterns("_C*.so", "csrc")
    here = build_cuda.REPOSITORY / "oper"
    shutil.copytree(here, folder / "lib/oper", ignore=leave_out, dirs_exist_ok=True)
    return try_code(name, OURS, folder=folder / "lib")


def failure_of_build(name: str, command: Sequence[str | Path]) -> dict[str, Any] | None:
    """Run a compiler. Return the record of a try whose extension could not be built; None if it
    was built."""
    done = subprocess.run(command, cwd=build_cuda.REPOSITORY, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    print(f"---- {name}\n{done.stderr}", file=sys.stderr, flush=True)
    return {"try": name, "exit": "not built", "raised": False, "failed": True}


def compilers_file(name: str) -> str:
    """Return the path of one of the compiler's libraries."""
    command = ["c++", f"-print-file-name={name}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def describe_machine() -> None:
    """Write the toolchain, Python's link flags, the extension's libraries and those mapped to the
    log."""
    said = ["---- machine"]
    for command in (["c++", "--version"], ["ld", "--version"], ["ldd", "--version"]):
        with contextlib.suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True)
            said += done.stdout.splitlines()[:1]
    names = ("LD_", "GLIBC", "TORCH_", "CXX", "CC", "CFLAGS", "LDFLAGS", "PYTORCH_")
    said += [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(names)]
    for name in ("CC", "CXX", "LDSHARED", "LDCXXSHARED", "CFLAGS", "LDFLAGS", "BLDSHARED"):
        said.append(f"{name}: {sysconfig.get_config_var(name)}")
    for extension in build_cuda.REPOSITORY.glob("oper/_C*.so"):
        for command in (["readelf", "-d"], ["readelf", "-lW"], ["readelf", "-p", ".comment"]):
            with contextlib.suppress(OSError):
                read = subprocess.run([*command, extension], capture_output=True, text=True)
                said.append(read.stdout)
    mapped = subprocess.run(
        [sys.executable, "-c", MAPPED], cwd=build_cuda.REPOSITORY, capture_output=True, text=True
    )
    said.append(mapped.stdout + mapped.stderr)
    print("\n".join(said), file=sys.stderr, flush=True)


def debug(code: str) -> None:
    """Write a debugger's account of code that ended its process to the log, if there is one."""
    debugger = next(filter(None, map(shutil.which, ("gdb", "cuda-gdb"))), None)
    if debugger is None:
        return
    account = [debugger, "--batch", "-ex", "run", "-ex", "backtrace 40", "-ex", "x/6i $rip"]
    account += ["-ex", "info sharedlibrary", "--args", sys.executable, "-c", code]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(account, cwd=build_cuda.REPOSITORY, stdout=sys.stderr, timeout=TRY_SECONDS)
