"""Bundle the packages that gpu_check needs on a GPU machine without a network.

    python -m scripts.gpu_check.bundle OUT [--architecture 90] [--python PYTHON]

For a machine with torch 2.11 for CUDA 13 and Python 3.12: `OUT/gpu-site.tar.xz` has FBGEMM 1.6.0,
TorchRec 1.6.1 and the packages that they and OPER need and torch does not bring (36 MB);
`OUT/on_device.sh` unpacks it there. `PYTHON`, a Python 3.12 with torch 2.11, builds OPER's
extension as well, and `oper/_cuda.so` is copied if scripts/build_cuda.py has made it. The script
needs pip's index (1 GB of downloads), `pip install zstandard`, GNU tar and xz, but no GPU.
"""

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from scripts import build_cuda
from scripts.gpu_check import prune_fbgemm

# fbgemm 1.X loads under torch 2.(X+5), and torchrec 1.6.1 is of the same release.
WHEELS = (
    "fbgemm-gpu==1.6.0",
    "torchrec==1.6.1",
    "tensordict==0.15.3",
    "cloudpickle==3.1.3",
    "pyvers==0.2.3",
    "torchmetrics==1.0.3",
    "lightning-utilities==0.15.3",
    "pyre-extensions==0.0.32",
    "typing-inspect==0.9.0",
    "mypy-extensions==1.2.0",
    "portalocker==4.4.2",
    "msgspec==0.22.0",
    "highspy==1.15.1",
    "pulp==3.3.2",
    "typer==0.29.2",
)
SOURCES = ("iopath==0.1.10",)  # has no wheel
PYTHON, TORCH = "3.12", "2.11"
PLATFORMS = ("_2_28", "_2_27", "_2_24", "_2_17", "2014", "1")  # of manylinux, newest first
# Tests, and CBC for all systems: OPER solves by HiGHS.
LEFT_OUT = ("pulp/solverdir/cbc", "pulp/tests", "tensordict/tests")
ARCHIVE = "gpu-site.tar.xz"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", type=int, default=90, help="90 is H100 and H200")
    parser.add_argument("--python", type=Path, help=f"a Python {PYTHON} with torch {TORCH}")
    options = parser.parse_args(arguments)
    if options.python is not None:
        check_python(options.python)
    missing = [name for name in ("tar", "xz") if shutil.which(name) is None]
    if importlib.util.find_spec("zstandard") is None:
        missing.append("zstandard (pip install zstandard)")
    if missing:
        sys.exit(f"bundle: missing here: {', '.join(missing)}")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as name:
        site = Path(name) / "site"
        unpack(fetch(Path(name) / "wheels"), site)
        prune_fbgemm.prune_all(site / "fbgemm_gpu", options.architecture)
        archive(site, out / ARCHIVE)
        if options.python is not None:
            build_extension(options.python, Path(name), out)
    shutil.copy(Path(__file__).with_name("on_device.sh"), out)
    if build_cuda.LIBRARY.exists():
        shutil.copy(build_cuda.LIBRARY, out)
    for path in sorted(out.iterdir()):
        print(f"bundle: {path}: {path.stat().st_size:,} bytes")


def fetch(folder: Path) -> list[Path]:
    """Download all packages with pip, and return their files."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", f"--dest={folder}"]
    tags = [f"--platform=manylinux{number}_x86_64" for number in PLATFORMS]
    wheels = ["--only-binary=:all:", f"--python-version={PYTHON}", "--implementation=cp", *tags]
    run(*pip, *wheels, *WHEELS)
    run(*pip, "--no-binary=:all:", *SOURCES)
    return sorted(folder.iterdir())


def unpack(packages: Sequence[Path], site: Path) -> None:
    """Unpack wheels, and the package of a source archive, into one folder."""
    for package in packages:
        if package.suffix == ".whl":
            with zipfile.ZipFile(package) as wheel:
                wheel.extractall(site)
        else:
            name = package.name.split("-")[0]
            inside = package.name.removesuffix(".tar.gz") + f"/{name}"
            run("tar", "-xzf", package, "-C", site, "--strip-components=1", inside)
    for name in LEFT_OUT:
        shutil.rmtree(site / name, ignore_errors=True)


def archive(folder: Path, made: Path) -> None:
    """Pack a folder whose files have long runs of zeros."""
    sparse = folder.with_name("sparse")
    run("cp", "-r", "--sparse=always", folder, sparse)
    tar = ["tar", "--sparse", "--sort=name", "--mtime=@0", "--owner=0", "--group=0"]
    # A long window, because kernels of a library are similar.
    xz = "xz --lzma2=preset=2,dict=64MiB -T1"
    run(*tar, f"--use-compress-program={xz}", "-C", sparse, "-cf", made, ".")


def check_python(python: Path) -> None:
    """Exit if a Python, or its torch, is not the GPU machine's."""
    code = (
        "import sys; from importlib.metadata import version; "
        "print(*sys.version_info[:2], sep='.'); print(version('torch'))"
    )
    expected = f"bundle: --python: expected Python {PYTHON} with torch {TORCH}"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError as problem:
        sys.exit(f"{expected}, got {python} ({problem.strerror})")
    version, _, torch = done.stdout.strip().partition("\n")
    if version != PYTHON or not f"{torch}.".startswith(f"{TORCH}."):
        sys.exit(f"{expected}, got {python}: Python {version}, torch {torch or 'missing'}")


def build_extension(python: Path, folder: Path, out: Path) -> None:
    """Build OPER's extension for another Python and its torch."""
    build: list[str | Path] = [python.absolute(), "setup.py", "--quiet", "build_ext"]
    run(*build, "--build-lib", folder / "lib")
    for extension in (folder / "lib/oper").glob("_C*.so"):
        shutil.copy(extension, out)


def run(*command: str | Path) -> None:
    try:
        subprocess.run(command, check=True, cwd=build_cuda.REPOSITORY)
    except subprocess.CalledProcessError as error:
        sys.exit(f"bundle: exit status {error.returncode} of {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
