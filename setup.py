"""Builds `oper/csrc` into the torch extension `oper._C`; everything else is in pyproject.toml.

Objects stay in build/objects, each named by a hash of everything it is made from. A build that
follows an interrupted one, or one in another environment with the same torch, uses them again.

The kernels of devices, `oper/csrc/cuda`, are a library of their own, without torch, which
scripts/build_cuda.py builds. No `-march`: wheels travel, so a kernel that wants more than the
baseline dispatches by itself.
"""

import functools
import hashlib
import importlib.machinery
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError, OptionError

CSRC = Path("oper/csrc")
OBJECTS = Path("build/objects")
DAYS_KEPT = 7  # for objects that no build uses: other branches and flags have theirs until then

FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-DNDEBUG", "-fwrapv"),
    *("-Wall", "-Wno-ignored-attributes"),  # of vector types in containers, which need none
    # No contraction: a product and a sum are rounded apart in every version of a kernel, so that
    # ranks on unlike machines agree to the last bit.
    "-ffp-contract=off",
    # No errno of sqrt and no traps, which nobody looks at: with them, loops that take roots or
    # choose between sums are not vectorised.
    *("-fno-math-errno", "-fno-trapping-math"),
    # The compiler writes no temporary files, which it would leave if it were killed.
    "-pipe",
)


# Files that are compiled together: torch's headers, and the templates that each unit makes of them,
# take some six seconds, more than most files. A file is in the unit with the longest pattern that
# it matches; names in anonymous namespaces differ within a unit. The longest units come first, so
# that processors end together.
UNITS = {
    "gradients": ("cpu/step/gradients.cpp",),
    "lookup": ("cpu/step/lookup.cpp", "cpu/step/update.cpp"),
    "others": ("*.cpp",),
    "step": ("cpu/step/*.cpp",),
    "scheduler": ("cpu/allreduce/*.cpp", "cpu/scheduler/*.cpp"),
    "device": ("device/*.cpp",),
}


class Unit(NamedTuple):
    """Sources that are compiled together, and the object that they are compiled to."""

    sources: list[Path]
    object: Path


class Toolchain:
    """The compiler, the torch to build for, and the flags that all units share."""

    def __init__(self, torch: Path | None) -> None:
        assert torch is not None, "without torch there is no extension to build"
        self.cxx = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        asked = (shlex.split(os.environ.get(name, "")) for name in ("CPPFLAGS", "CFLAGS"))
        self.flags = [*FLAGS, *(flag for flags in asked for flag in flags)]
        self.link_flags = ["-shared", "-shared-libgcc", "-fopenmp"]
        self.link_flags += shlex.split(os.environ.get("LDFLAGS", ""))
        headers = torch / "include"
        found = (headers, headers / "torch/csrc/api/include", sysconfig.get_path("include"))
        self.includes = [
            f"-I{CSRC / 'include'}",
            f"-I{CSRC}",
            *(f"-isystem{path}" for path in found),
        ]
        self.libraries = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
        try:
            asked_version = [*self.cxx, "--version"]
            compiler = subprocess.run(asked_version, capture_output=True, text=True).stdout
        except OSError as problem:
            message = f"expected a C++20 compiler; found no {self.cxx[0]} ({problem.strerror}): "
            raise CompileError(message + "install one, or set CXX to its name") from None
        # The places of torch and Python are left out: another environment has the same headers.
        versions = (compiler, sysconfig.get_platform(), sys.version)
        made_of = (*versions, self.flags, (torch / "version.py").read_text())
        self.digest = digest_of(repr(made_of).encode())

    def unit(self, name: str, sources: list[Path]) -> Unit:
        """Return a unit whose object is named by everything that it is made from."""
        contents = [path.read_bytes() for path in (*sources, *included_by(sources))]
        made_of = digest_of(self.digest.encode(), *contents)
        return Unit(sources, OBJECTS / f"{name}-{made_of}.o")

    def compile(self, unit: Unit) -> None:
        sources = [part for source in unit.sources for part in ("-include", source)]
        options = [*self.flags, *self.includes, *sources]
        self.run([*options, "-x", "c++", "-c", os.devnull], unit.object, CompileError)

    def link(self, objects: Iterable[Path]) -> Path:
        """Return the library of these objects. The command has none of the flags that Python itself
        was linked with, which may name another compiler or C++ runtime."""
        names = sorted(path.name for path in objects)
        made_of = digest_of(self.digest.encode(), repr((names, self.link_flags)).encode())
        library = OBJECTS / f"_C-{made_of}.so"
        if not library.exists():
            parts = [str(OBJECTS / name) for name in names]
            self.run([*self.link_flags, *parts, *self.libraries], library, LinkError)
        return library

    def run(self, arguments: Sequence[str | Path], made: Path, error: type[Exception]) -> None:
        """Run the compiler, and put the file that it makes in its place once it is whole."""
        part = made.with_name(f".{made.name}.{os.getpid()}")
        command = [*self.cxx, *map(str, arguments), "-o", str(part)]
        try:
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
            if done.stderr:
                print(f"\n{done.stderr.rstrip()}", file=sys.stderr, flush=True)
            if done.returncode:
                raise error(f"exit status {done.returncode}: {shlex.join(command)}")
            part.replace(made)
        finally:
            part.unlink(missing_ok=True)


class DistributionForTorch(Distribution):
    """A distribution whose wheels require the release of torch that their extension is built for;
    its source archives do not."""

    install_requires: list[str]

    def run_command(self, command: str) -> None:
        torch = torch_folder()
        if torch is not None and command in ("dist_info", "editable_wheel", "bdist_wheel"):
            version = (torch / "version.py").read_text(encoding="utf-8")
            major, minor = re.findall(r"^__version__ = .(\d+)\.(\d+)", version, re.M)[0]
            needed = f"torch=={major}.{minor}.*"
            distribution: Any = self
            distribution.metadata.install_requires = distribution.install_requires = [
                needed if re.match("torch *[<=>]", requirement) else requirement
                for requirement in distribution.install_requires
            ]
        super().run_command(command)


class Progress:
    """A line on a terminal that counts the units; elsewhere one line for all of them."""

    def __init__(self, total: int, kept: int) -> None:
        self.total, self.started = total, kept
        self.lock = threading.Lock()
        self.on_terminal = sys.stderr.isatty()
        if not self.on_terminal:
            print(f"oper: compiling {total - kept} of {total} units", file=sys.stderr, flush=True)

    def start_unit(self) -> None:
        with self.lock:
            self.started += 1
            if self.on_terminal:
                line = f"\r\033[Koper: compiling {self.started} of {self.total}"
                print(line, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.on_terminal:
            print(file=sys.stderr, flush=True)


class BuildExtension(build_ext):
    """The command that compiles the units that build/objects lacks, on all processors, and links
    them."""

    def build_extension(self, extension: Extension) -> None:
        OBJECTS.mkdir(parents=True, exist_ok=True)
        toolchain = Toolchain(torch_folder())
        units = [toolchain.unit(name, sources) for name, sources in sources_by_unit().items()]
        compile_missing(toolchain, units)
        library = toolchain.link(unit.object for unit in units)
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(library, target)
        remove_old({library, *(unit.object for unit in units)})

    def copy_file(self, infile: Any, outfile: Any, *_: Any, **__: Any) -> tuple[str, int]:
        """Put a whole file in the place of another, which processes may have loaded."""
        part = Path(outfile).with_name(f".{Path(outfile).name}.{os.getpid()}")
        shutil.copy(infile, part)
        part.replace(outfile)
        return str(outfile), 1


def compile_missing(toolchain: Toolchain, units: Sequence[Unit]) -> None:
    """Compile the units that have no object. After an error or Ctrl-C no unit is started."""
    missing = [unit for unit in units if not unit.object.exists()]
    if not missing:
        return
    pool = ThreadPoolExecutor(jobs())
    progress = Progress(len(units), len(units) - len(missing))
    stopped = threading.Event()

    def compile_one(unit: Unit) -> None:
        if stopped.is_set():
            return
        progress.start_unit()
        try:
            toolchain.compile(unit)
        except BaseException:
            stopped.set()
            raise

    try:
        for compiled in as_completed([pool.submit(compile_one, unit) for unit in missing]):
            compiled.result()
    finally:
        stopped.set()
        pool.shutdown()
        progress.end()


def jobs() -> int:
    """Return the number of units to compile at once: MAX_JOBS, as for torch's extensions, or the
    number of processors. Raise OptionError if MAX_JOBS is another value than a positive integer."""
    given = os.environ.get("MAX_JOBS")
    if not given:
        return len(os.sched_getaffinity(0))
    if not re.fullmatch("0*[1-9][0-9]*", given):
        raise OptionError(f"MAX_JOBS: expected a positive integer, got {given!r}")
    return int(given)


def remove_old(used: set[Path]) -> None:
    """Remove the objects and parts of objects that no build has used for DAYS_KEPT."""
    for path in used:
        os.utime(path)
    oldest = time.time() - DAYS_KEPT * 24 * 3600
    for path in OBJECTS.iterdir():
        with suppress(FileNotFoundError):  # another build removes or renames it
            if path not in used and path.stat().st_mtime < oldest:
                path.unlink()


def sources_by_unit() -> dict[str, list[Path]]:
    """Return the sources of each unit."""
    units: dict[str, list[Path]] = {name: [] for name in UNITS}
    patterns = [(len(each), each, name) for name, unit in UNITS.items() for each in unit]
    for source in sorted(CSRC.glob("**/*.cpp")):
        *_, name = max(pattern for pattern in patterns if source.match(pattern[1]))
        units[name].append(source)
    return {name: sources for name, sources in units.items() if sources}


def included_by(sources: Iterable[Path]) -> list[Path]:
    """Return the headers of oper/csrc that files include, and those that they include."""
    found: set[Path] = set()
    waiting = list(sources)
    while waiting:
        new = directly_included(waiting.pop()) - found
        waiting += new
        found |= new
    return sorted(found)


@functools.cache
def directly_included(path: Path) -> frozenset[Path]:
    """Return the headers of oper/csrc that a file includes."""
    names = re.findall(r'^\s*#\s*include\s*"(.+)"', path.read_text(encoding="utf-8"), re.M)
    folders = (path.parent, CSRC / "include", CSRC)
    headers = (next(filter(Path.is_file, (f / name for f in folders)), None) for name in names)
    return frozenset(header for header in headers if header is not None)


def digest_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


def torch_folder() -> Path | None:
    """Return the folder of torch without importing it, which takes seconds."""
    # An isolated build sees only build-system.requires. torch is not among them, as pip would
    # fetch one of another ABI for the build: use the one the package is being installed beside.
    places = [*sys.path, sysconfig.get_path("platlib")]
    found = importlib.machinery.PathFinder.find_spec("torch", places)
    return Path(found.origin).parent if found is not None and found.origin else None


def extension_arguments() -> dict[str, Any]:
    """Return the arguments of setup() that build the extension; without torch, say so and return
    none."""
    if torch_folder() is None:
        print(
            "oper: torch is not installed here, so the extension oper._C is left out. "
            "To get it, install torch, then `pip install --force-reinstall --no-deps .`",
            file=sys.stderr,
        )
        return {}
    extension = Extension(
        "oper._C",
        sources=[str(path) for paths in sources_by_unit().values() for path in paths],
        depends=sorted(map(str, CSRC.glob("**/*.h"))),
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildExtension},
        "distclass": DistributionForTorch,
    }


setup(**extension_arguments())
