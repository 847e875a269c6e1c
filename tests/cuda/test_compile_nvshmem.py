"""The kernels for NVSHMEM compile for devices without warnings and spilled registers, and link to
NVSHMEM; where its package is in this environment."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import build_cuda
from tests.cuda.conftest import compiled
from tests.support.once import Once

pytestmark = pytest.mark.check

# Those of `pool_bags` are so many that two blocks stay on a multiprocessor, with 32 KB of rows on
# their way; the fetch needs few warps at once, each with a row.
MOST_REGISTERS = {"pool_bags": 128, "fetch_rows": 128, "get_pieces": 128}


@pytest.fixture(scope="module")
def package() -> Path:
    """NVSHMEM's package."""
    found = build_cuda.nvshmem()
    if found is None:
        pytest.skip(f"no NVSHMEM here: pip install {build_cuda.NVSHMEM_PACKAGE}")
    return found


@pytest.fixture(scope="module")
def objects(toolkit: Path, package: Path, once: Once) -> dict[Path, str]:
    return compiled(once, "nvshmem", toolkit, package)


def test_registers_and_spills(objects: dict[Path, str]) -> None:
    pattern = (
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes spill stores"
        r".*?Used (\d+) registers"
    )
    kernels = [k for said in objects.values() for k in re.findall(pattern, said, re.S)]
    architectures = {architecture for _, architecture, _, _ in kernels}
    assert sorted(architectures) == sorted(f"sm_{a}" for a in build_cuda.ARCHITECTURES)
    families = set()
    for name, architecture, spilled, registers in kernels:
        family = next(family for family in MOST_REGISTERS if family in name)
        families.add(family)
        assert int(spilled) == 0, (name, architecture, spilled)
        assert int(registers) <= MOST_REGISTERS[family], (name, architecture, registers)
    assert families == set(MOST_REGISTERS)


def test_the_library_links_and_loads_without_a_device(
    toolkit: Path, package: Path, objects: dict[Path, str], tmp_path: Path
) -> None:
    library = tmp_path / build_cuda.NVSHMEM_LIBRARY
    build_cuda.link_nvshmem(toolkit, package, list(objects), build_cuda.ARCHITECTURES, library)
    script = (
        "import ctypes\n"
        f"ctypes.CDLL({str(package / 'lib/libnvshmem_host.so.3')!r}, mode=ctypes.RTLD_GLOBAL)\n"
        f"library = ctypes.CDLL({str(library)!r})\n"
        "number = library.oper_nvshmem_interface; number.restype = ctypes.c_int64\n"
        "print(number() >> 32)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    header = (build_cuda.CSRC / "include/oper/nvshmem/launchers.h").read_text(encoding="utf-8")
    (number,) = re.findall(r"kNvshmemInterface =\s*\(int64_t\{(\d+)\}", header)
    assert done.stdout.strip() == number, done.stderr
