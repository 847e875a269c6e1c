"""Compiles oper/csrc/cuda/*.cu into oper/_cuda.so, the library of device kernels.

    python scripts/build_cuda.py [--output FILE] [--architectures 80,90,100] [--jobs 2]

The library knows neither torch nor Python, and CUDA's runtime is linked into it: one build serves
all versions of both. A CUDA compiler is needed, a device is not: nvcc of this environment
(requirements-cuda.txt), or on the path, or in /usr/local/cuda.
"""

import argparse
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
ARCHITECTURES = (80, 90, 100)  # A100, H100 and H200, B200
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
    given = parser.parse_args(arguments)
    found = toolkit()
    if found is None:
        sys.exit(
            "build_cuda: no CUDA compiler: nvcc was looked for in this environment, on the path "
            "and in /usr/local/cuda; `pip install -r requirements-cuda.txt` brings one"
        )
    architectures = [int(number) for number in given.architectures.split(",")]
    try:
        with TemporaryDirectory() as folder:
            objects = compile_all(found, Path(folder), architectures, given.jobs)
            link(found, list(objects), given.output)
    except subprocess.CalledProcessError as error:
        sys.exit(f"build_cuda: {' '.join(map(str, error.cmd))}\n{error.stderr}")
    print(f"build_cuda: {given.output}, for sm_{', sm_'.join(map(str, architectures))}")


def toolkit() -> Path | None:
    """The folder of a CUDA toolkit, which has bin/nvcc; None where there is none."""
    packages = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"
    on_path = shutil.which("nvcc")
    folders = [packages, *([Path(on_path).parent] if on_path else []), Path("/usr/local/cuda/bin")]
    found = (toolkit_of(folder / "nvcc") for folder in folders if (folder / "nvcc").exists())
    return next((folder for folder in found if folder is not None), None)


def toolkit_of(nvcc: Path) -> Path | None:
    """The folder of the toolkit that a compiler is of, as it says itself: nvcc may be a script on
    the path that calls one elsewhere, beside which there are no libraries. None where it does not
    run."""
    command: list[str | Path] = [nvcc, "--dryrun", "-x", "cu", "/dev/null"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=60).stderr
    except (OSError, subprocess.TimeoutExpired):
        return None
    top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
    folder = Path(top[1].strip()).resolve() if top else None
    return folder if folder is not None and (folder / "bin/nvcc").exists() else None


def compile_all(
    toolkit: Path, folder: Path, architectures: Sequence[int], jobs: int | None
) -> dict[Path, str]:
    """Object files by path, each with what the compiler said of registers. CalledProcessError
    where one does not compile, or has warnings."""
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]

    def compile_one(source: Path) -> tuple[Path, str]:
        made = folder / f"{source.stem}.o"
        command: list[str | Path] = [
            toolkit / "bin/nvcc",
            *FLAGS,
            *STRICT,
            "-Xptxas",
            "-v",
            *targets,
        ]
        command += [f"-I{CSRC}", f"-I{CSRC / 'include'}", "-c", source, "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return made, done.stderr

    with ThreadPoolExecutor(jobs) as pool:
        return dict(pool.map(compile_one, sorted((CSRC / "cuda").glob("*.cu"))))


def link(toolkit: Path, objects: Sequence[Path], output: Path) -> None:
    """One library of objects; what it has of CUDA's runtime stays hidden from other libraries."""
    folders = [f"-L{toolkit / name}" for name in ("lib", "lib64") if (toolkit / name).is_dir()]
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    command: list[str | Path] = ["g++", "-shared", "-o", temporary, *objects, *folders]
    command += ["-lcudart_static", "-ldl", "-lrt", "-lpthread", "-Wl,--exclude-libs,ALL"]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True)
        temporary.replace(output)
    finally:
        temporary.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
