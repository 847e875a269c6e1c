"""Compile oper/csrc/cuda/*.cu into oper/_cuda.so, the library of device kernels, and, if NVSHMEM's
package is in this environment, oper/csrc/nvshmem/*.cu into oper/_nvshmem.so next to it.

    python scripts/build_cuda.py [--output FILE] [--architectures 80,90,100] [--jobs 2]

The libraries use neither torch nor Python, and CUDA's runtime is linked into them: one build serves
all versions of both. A CUDA compiler is needed, a device is not: nvcc of this environment
(requirements-cuda.txt), or on the path, or in /usr/local/cuda.
"""

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parent.parent
CSRC = REPOSITORY / "oper/csrc"
LIBRARY = REPOSITORY / "oper/_cuda.so"
NVSHMEM_LIBRARY = "_nvshmem.so"  # next to it
NVSHMEM_PACKAGE = "nvidia-nvshmem-cu13==3.4.5"  # version of torch 2.13 for CUDA
ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200
OWN_PTX = 100  # from this architecture on the compiler makes other PTX
# CUB and NVSHMEM choose code by architecture; the library names those it is compiled for.
SEES_ARCHITECTURES = re.compile("<cub/|/nvshmem/|<nvshmem|__CUDA_ARCH_LIST__")
# No contraction of a product and a sum: results are those of the processor's kernels, bit by bit.
FLAGS = ("-std=c++17", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC")
STRICT = ("-Werror", "all-warnings")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=LIBRARY)
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    compiler = toolkit()
    if compiler is None:
        sys.exit(
            "build_cuda: no CUDA compiler: nvcc was looked for in this environment, on the path "
            "and in /usr/local/cuda; `pip install -r requirements-cuda.txt` brings one"
        )
    architectures = [int(number) for number in options.architectures.split(",")]
    made, package = [options.output], nvshmem()
    try:
        with TemporaryDirectory() as folder:
            objects = compile_all(compiler, Path(folder), architectures, options.jobs)
            link(compiler, list(objects), options.output)
        if package is not None:
            made.append(options.output.with_name(NVSHMEM_LIBRARY))
            with TemporaryDirectory() as folder:
                objects = compile_all(compiler, Path(folder), architectures, options.jobs, package)
                link_nvshmem(compiler, package, list(objects), architectures, made[-1])
    except subprocess.CalledProcessError as error:
        sys.exit(f"build_cuda: {' '.join(map(str, error.cmd))}\n{error.stderr}")
    for library in made:
        print(f"build_cuda: {library}, for sm_{', sm_'.join(map(str, architectures))}")
    if package is None:
        print(
            "build_cuda: no NVSHMEM here, which plans for devices of several nodes need: "
            f"`pip install {NVSHMEM_PACKAGE}` brings it"
        )


def toolkit() -> Path | None:
    """Return the folder of a CUDA toolkit, which has bin/nvcc; None if there is no toolkit."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"
    on_path = shutil.which("nvcc")
    folders = [packages, *([Path(on_path).parent] if on_path else []), Path("/usr/local/cuda/bin")]
    toolkits = (toolkit_of(folder / "nvcc") for folder in folders if (folder / "nvcc").exists())
    return next((folder for folder in toolkits if folder is not None), None)


def toolkit_of(nvcc: Path) -> Path | None:
    """Return the folder of the toolkit that nvcc names as its own, because nvcc may be a script on
    the path that calls a compiler in another folder. Return None if nvcc does not run."""
    command: list[str | Path] = [nvcc, "--dryrun", "-x", "cu", "/dev/null"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    folder = Path(top[1].strip()).resolve() if top else None
    return folder if folder is not None and (folder / "bin/nvcc").exists() else None


def nvshmem() -> Path | None:
    """Return the folder of NVSHMEM's package in this environment; None without the package."""
    try:
        package = importlib.util.find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:
        return None
    folders = package.submodule_search_locations if package is not None else None
    return Path(next(iter(folders))) if folders else None


def compile_all(
    toolkit: Path,
    folder: Path,
    architectures: Sequence[int],
    jobs: int | None,
    nvshmem: Path | None = None,
) -> dict[Path, str]:
    """Compile the device kernels or, given NVSHMEM's package, the kernels for it. Return the paths
    of the objects, each with the compiler's text about registers. Raise CalledProcessError if a
    kernel does not compile or has warnings."""
    sources = CSRC / ("cuda" if nvshmem is None else "nvshmem")

    def compile_one(source: Path) -> tuple[Path, str]:
        made = folder / f"{source.stem}.o"
        command: list[str | Path] = [
            toolkit / "bin/nvcc",
            *FLAGS,
            *STRICT,
            "-Xptxas",
            "-v",
            *targets(source, architectures),
        ]
        command += [f"-I{CSRC}", f"-I{CSRC / 'include'}"]
        if nvshmem is not None:  # its calls are functions of its library for devices
            command += ["-isystem", nvshmem / "include", "-rdc=true"]
        command += ["-dc" if nvshmem else "-c", source, "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return made, done.stderr

    with ThreadPoolExecutor(jobs) as pool:
        return dict(pool.map(compile_one, sorted(sources.glob("*.cu"))))


def targets(source: Path, architectures: Sequence[int]) -> list[str]:
    """Return nvcc's options: for each architecture the PTX, and the code to assemble from it.

    The compiler makes PTX, which takes most of the time, once for the architectures that share it,
    such as sm_80 and sm_90. Sources that see the architectures in the preprocessor are compiled for
    each architecture.
    """
    ptx_for = {a: a for a in architectures}
    if not SEES_ARCHITECTURES.search(source.read_text(encoding="utf-8")):
        shared = [a for a in architectures if a < OWN_PTX]
        ptx_for |= dict.fromkeys(shared, min(shared, default=OWN_PTX))
    return [f"-gencode=arch=compute_{ptx},code=sm_{a}" for a, ptx in ptx_for.items()]


def link(toolkit: Path, objects: Sequence[Path], output: Path) -> None:
    """Link a library of objects. It hides its copy of CUDA's runtime from other libraries."""
    command: list[str | Path] = ["g++", "-shared", *objects, *_folders(toolkit)]
    command += ["-lcudart_static", "-ldl", "-lrt", "-lpthread", "-Wl,--exclude-libs,ALL"]
    _make(command, output)


def link_nvshmem(
    toolkit: Path,
    nvshmem: Path,
    objects: Sequence[Path],
    architectures: Sequence[int],
    output: Path,
) -> None:
    """Link a library of the objects for NVSHMEM, with NVSHMEM's part for devices. The part for
    hosts, which torch's own use of NVSHMEM shares, is a library that stays in its package."""
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    command: list[str | Path] = [toolkit / "bin/nvcc", *targets, "-shared", "-Xcompiler", "-fPIC"]
    command += [*objects, *_folders(toolkit), f"-L{nvshmem / 'lib'}", "-l:libnvshmem_host.so.3"]
    command += ["-lnvshmem_device", "-Xlinker", "--exclude-libs,ALL"]
    _make(command, output)


def _folders(toolkit: Path) -> list[str]:
    return [f"-L{toolkit / name}" for name in ("lib", "lib64") if (toolkit / name).is_dir()]


def _make(command: Sequence[str | Path], output: Path) -> None:
    """Run a linker, and replace `output` by its result once that is complete."""
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        subprocess.run([*command, "-o", temporary], capture_output=True, text=True, check=True)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
