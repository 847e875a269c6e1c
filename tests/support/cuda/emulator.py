"""Kernels compiled for the emulator (emulator.h): as plain C++, without CUDA."""

import ctypes
import hashlib
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from scripts.install import contents_hash
from tests.support.once import made_once

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[2]
CSRC = REPOSITORY / "oper/csrc"
# Libraries of the runs before, each in a folder that is named by all that it was made from.
KEPT = REPOSITORY / "build/emulated"
# As the extension is compiled (setup.py): a product and a sum are rounded apart.
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")


def build(
    output: Path,
    sources: Sequence[Path],
    *flags: str,
    shared: bool = True,
    before: Sequence[Path] = (),
    objects: Sequence[Path] = (),
) -> None:
    """Compile .cu files, each a job of its own, into a library or a program, with `objects` that
    were compiled before. Headers are looked for in `before` first."""
    options = [*FLAGS, *flags, "-Wno-unknown-pragmas", *(f"-I{folder}" for folder in before)]
    options += [f"-I{CSRC / 'include'}", f"-I{CSRC}", f"-I{HERE}"]
    made = [output.with_name(f"{source.stem}.o") for source in sources]
    jobs = [
        subprocess.Popen(["g++", *options, "-x", "c++", "-c", source, "-o", path])
        for source, path in zip(sources, made, strict=True)
    ]
    codes = [job.wait() for job in jobs]
    assert not any(codes), "the kernels do not compile as C++"
    kind = ["-shared"] if shared else []
    subprocess.run(["g++", *flags, *kind, *made, *objects, "-o", output], check=True)


def kept(kernels: str) -> Path:
    """The library of the kernels in a folder of CSRC. Where nothing that it is made from has
    changed the next run has it as well, as `make check` after `make test`."""

    def make(folder: Path) -> None:
        build(folder / f"lib{kernels}.so", sorted((CSRC / kernels).glob("*.cu")))

    files = sorted(path for top in (CSRC, HERE) for path in top.rglob("*.*") if path.is_file())
    sources = [path for path in files if path.suffix != ".pyc"]
    compiler = subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout
    made_from = hashlib.sha256(compiler + contents_hash(*sources).encode()).hexdigest()[:16]
    KEPT.mkdir(parents=True, exist_ok=True)
    return made_once(KEPT, f"{kernels} {made_from}", make) / f"lib{kernels}.so"


class Emulator:
    """What tests set of the emulator in a library that `oper.load_device_library` loaded."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))

    def order(self, seed: int) -> None:
        """The order in which the threads of a block go on: 0 by number, others drawn."""
        self._library.emulate_order(ctypes.c_uint64(seed))

    def busy(self, busy: bool) -> None:
        """Whether streams seem to have work that does not end."""
        self._library.emulate_busy(int(busy))

    def queries(self) -> int:
        """How often streams were asked whether their work is done."""
        self._library.emulated_queries.restype = ctypes.c_uint64
        return int(self._library.emulated_queries())

    def launches(self) -> int:
        """Return the number of kernels that this thread has launched."""
        self._library.emulated_launches.restype = ctypes.c_uint64
        return int(self._library.emulated_launches())

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Inside, streams seem to be captured."""
        self._library.emulate_capture(1)
        try:
            yield
        finally:
            self._library.emulate_capture(0)

    @contextmanager
    def device(self, multiprocessors: int, blocks_of_each: int) -> Iterator[Callable[[], int]]:
        """Inside, kernels are launched on such a device and not run; gives what tells the blocks of
        the last launch."""
        self._library.emulated_blocks.restype = ctypes.c_uint64
        self._library.emulate_device(multiprocessors, blocks_of_each, 1)
        try:
            yield lambda: int(self._library.emulated_blocks())
        finally:
            self._library.emulate_device(1, 2, 0)
