"""Kernels compiled for the emulator (emulator.h): as plain C++, without CUDA."""

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[2] / "oper/csrc"
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
