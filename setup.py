"""Builds `oper/csrc` into the torch extension `oper._C`; everything else is in pyproject.toml.

The kernels of devices, `oper/csrc/cuda`, are a library of their own, without torch, which
scripts/build_cuda.py builds. No `-march`: wheels travel, so a kernel that wants more than the
baseline dispatches by itself.
"""

import importlib.util
import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import setup

CSRC = Path("oper/csrc")


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
    sources = sorted(str(path) for files in folders for path in CSRC.glob(files))
    # No contraction: a product and a sum are rounded apart in every version of a kernel, so that
    # ranks on unlike machines agree to the last bit.
    # No errno of sqrt and no traps, which nobody looks at: with them, loops that take roots or
    # choose between sums are not vectorised.
    # torch's headers use a C++20 extension, and every file that includes them would warn of it.
    host_flags = ["-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]
    host_flags += ["-fno-trapping-math", "-Wno-c++20-extensions"]
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
            super().build_extensions()

    return {"ext_modules": [extension], "cmdclass": {"build_ext": BuildExtension}}


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
