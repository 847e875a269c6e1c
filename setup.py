"""Builds `oper/csrc` into the torch extension `oper._C`; everything else is in pyproject.toml.

The kernels of devices, `oper/csrc/cuda`, are a library of their own, without torch, which
scripts/build_cuda.py builds. No `-march`: wheels travel, so a kernel that wants more than the
baseline dispatches by itself.
"""

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import setup

CSRC = Path("oper/csrc")
TORCH_HEADERS = CSRC / "torch_headers.h"


def extension_arguments() -> dict:
    """Arguments of setup() that build the extension; none, with a word about it, without torch."""
    if importlib.util.find_spec("torch") is None:
        # An isolated build sees only build-system.requires. torch is not among them, as pip would
        # fetch one of another ABI for the build: use the one the package is being installed beside.
        sys.path.append(sysconfig.get_path("platlib"))
    if importlib.util.find_spec("torch") is None:
        print(
            "oper: torch is not installed here, so the extension oper._C is left out. "
            "To get it, install torch, then `pip install --force-reinstall --no-deps .`",
            file=sys.stderr,
        )
        return {}

    from torch.utils import cpp_extension

    folders = ("*.cpp", "cpu/**/*.cpp", "device/*.cpp")
    # The largest first, so that no processor is left alone with one at the end.
    found = [path for files in folders for path in sorted(CSRC.glob(files))]
    sources = [str(path) for path in sorted(found, key=lambda path: -path.stat().st_size)]
    # No contraction: a product and a sum are rounded apart in every version of a kernel, so that
    # ranks on unlike machines agree to the last bit.
    # No errno of sqrt and no traps, which nobody looks at: with them, loops that take roots or
    # choose between sums are not vectorised.
    # torch's headers need C++20 from 2.14 on.
    host_flags = ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]
    host_flags += ["-fno-trapping-math"]
    extension = cpp_extension.CppExtension(
        name="oper._C",
        sources=sources,
        include_dirs=[str((CSRC / "include").resolve()), str(CSRC.resolve())],
        depends=sorted(map(str, CSRC.glob("**/*.h"))),
        extra_compile_args={"cxx": host_flags},
        extra_link_args=["-fopenmp"],
    )
    print("oper: building oper._C", file=sys.stderr)

    class BuildExtension(cpp_extension.BuildExtension):
        def build_extensions(self) -> None:
            if not self.use_ninja:
                compile_at_once(self.compiler)
            # Python was built with debug information, which here takes a quarter of the time:
            # CFLAGS=-ggdb asks for it.
            if "-g" in self.compiler.compiler_so:
                self.compiler.compiler_so.remove("-g")
            if sys.platform == "linux":
                link = link_command()
                self.compiler.set_executables(linker_so=link, linker_so_cxx=link)
            for extension in self.extensions:
                if headers := precompiled(self.compiler, extension, Path(self.build_temp)):
                    extension.extra_compile_args["cxx"] += ["-include", str(headers)]
            super().build_extensions()

    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


def link_command() -> list[str]:
    """Return the linker's command without the flags that Python itself was linked with, which may
    name another compiler or C++ runtime than the one that compiles the extension."""
    asked = shlex.split(os.environ.get("LDFLAGS", ""))
    return [os.environ.get("CXX", "c++"), "-shared", "-shared-libgcc", *asked]


def precompiled(compiler: Any, extension: Any, folder: Path) -> Path | None:
    """torch's headers, read once and not by every file: what GCC is to include in their place, or
    None with another compiler."""
    import torch

    cxx = os.environ.get("CXX", "c++")
    version = subprocess.run([cxx, "--version"], capture_output=True, text=True).stdout
    if "Free Software Foundation" not in version:
        return None
    # GCC takes a precompiled header only where it was made with the same options.
    include = [f"-I{path}" for path in (*extension.include_dirs, *compiler.include_dirs)]
    options = [*compiler.compiler_so[1:], *include, *extension.extra_compile_args["cxx"]]
    options += ["-DTORCH_API_INCLUDE_EXTENSION_H", "-DTORCH_EXTENSION_NAME=_C"]
    # It does not notice that the headers are others by now: then this one has another name.
    content = TORCH_HEADERS.read_bytes()
    made_of = f"{version}{torch.__version__}{cxx}{options}".encode() + content
    headers = folder.resolve() / hashlib.sha256(made_of).hexdigest()[:16] / TORCH_HEADERS.name
    made = headers.with_suffix(".h.gch")
    if not made.exists():
        headers.parent.mkdir(parents=True, exist_ok=True)
        headers.write_bytes(content)
        whole = made.with_suffix(".part")
        subprocess.run(
            [cxx, *options, "-x", "c++-header", str(headers), "-o", str(whole)], check=True
        )
        whole.rename(made)
    return headers


def compile_at_once(compiler: Any) -> None:
    """Without ninja, setuptools compiles one file after another: let it use all processors."""
    compile_some = compiler.compile

    def compile_all(sources: list[str], *arguments: Any, **options: Any) -> list[str]:
        def compile_one(source: str) -> list[str]:
            return compile_some([source], *arguments, **options)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return [made for objects in pool.map(compile_one, sources) for made in objects]

    compiler.compile = compile_all


setup(**extension_arguments())
