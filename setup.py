"""Builds `oper/csrc` into the torch extension `oper._C`; everything else is in pyproject.toml.

CPU always, CUDA only where torch was built for it and `oper/csrc/cuda` has sources. No `-march`:
wheels travel, so a kernel that wants more than the baseline dispatches by itself.
"""

import importlib.util
import sys
import sysconfig
from pathlib import Path

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

    import torch
    from torch.utils import cpp_extension

    sources = sorted(map(str, [*CSRC.glob("*.cpp"), *CSRC.glob("cpu/**/*.cpp")]))
    cuda_sources = sorted(map(str, CSRC.glob("cuda/**/*.cu")))
    with_cuda = torch.version.cuda is not None and bool(cuda_sources)
    extension_class = cpp_extension.CUDAExtension if with_cuda else cpp_extension.CppExtension
    # No contraction: a product and a sum are rounded apart in every version of a kernel, so that
    # ranks on unlike machines agree to the last bit.
    # No errno of sqrt and no traps, which nobody looks at: with them, loops that take roots or
    # choose between sums are not vectorised.
    # torch's headers use a C++20 extension, and every file that includes them would warn of it.
    host_flags = ["-O3", "-std=c++17", "-fopenmp", "-ffp-contract=off", "-fno-math-errno"]
    host_flags += ["-fno-trapping-math", "-Wno-c++20-extensions"]
    extension = extension_class(
        name="oper._C",
        sources=sources + (cuda_sources if with_cuda else []),
        include_dirs=[str((CSRC / "include").resolve()), str(CSRC.resolve())],
        depends=sorted(map(str, CSRC.glob("**/*.h"))),
        extra_compile_args={"cxx": host_flags, "nvcc": ["-O3", "-std=c++17"]},
        extra_link_args=["-fopenmp"],
    )
    print(f"oper: building oper._C for {'CPU and CUDA' if with_cuda else 'CPU'}", file=sys.stderr)
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension},
    }


setup(**extension_arguments())
