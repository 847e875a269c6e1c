"""The kernels compile for devices without warnings, within bounds of registers, and with as many
reads on their way as memory needs: without a device, from what the compiler made."""

import functools
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from scripts import build_cuda

pytestmark = pytest.mark.check

# Registers a thread at the most: the 65,536 of a multiprocessor over the threads that are to be on
# it. Above, ptxas would spill, which no kernel may.
MOST_REGISTERS = {
    "pool_bags": 64,
    "pool_short_bags": 64,
    "translate_ids": 40,
    "check_bags": 32,
    "post_report": 32,
    "accesses_by_rank": 40,
    "make_words": 40,
    "find_runs": 40,
    "list_words": 32,
    "find_united": 32,
    "copy_rows": 40,
    "redirect": 32,
    "list_forwarded": 40,
    "count_forwarded": 32,
    "write_forwarded": 40,
    "list_lengths": 32,
    "keep_accesses": 40,
    "take_received": 40,
    "move_vectors": 40,
    "number_bags": 32,
    "find_gradients": 32,
    "sum_runs": 64,
    "add_pieces": 64,
    "weight_gradients": 64,
    "step_rows": 64,
    "step_runs": 64,
    "lay_out_gradients": 64,
    "match_rows": 40,
    "count_rows": 64,
    "place_rows": 32,
    "add_rows": 64,
    "mark_replicas": 32,
    "unite_words": 40,
    "scan_tiles": 64,
    "list_replicas": 40,
    "aggregate_rows": 64,
    "sum_slice": 64,
    "add_buffers": 32,
    "gather_slices": 40,
    "mark_touched": 32,
    "write_header": 64,
    "write_message": 64,
    "read_headers": 40,
    "take_numbers": 32,
    "add_messages": 64,
}
# Those of steps that are captured, which read their settings from memory.
READS_SETTINGS, MOST_WITH_SETTINGS = re.compile("step_r(ows|uns)I.*Li[14]ELb1E"), 80
# CUB's are not ours to bound. What ptxas spills of them, in bytes: of a pass of the sort of pairs,
# whose keys have 64 bits and values 32.
PAIRS = "DeviceRadixSortOnesweepKernelINS1_5radix10policy_hubImijE"
CUB_SPILLS = {(PAIRS, "sm_100"): 8}
# In flight on each of an H200's 132 multiprocessors: 4.8 TB/s for 0.75 µs are 27 KB (Little's law).
LEAST_BYTES_IN_FLIGHT = 32 << 10


class Kernel(NamedTuple):
    name: str
    architecture: str
    registers: int
    spilled: int

    @property
    def is_cub(self) -> bool:
        return self.name.startswith("_ZN3cub")


@pytest.fixture(scope="module")
def kernels(objects: dict[Path, str]) -> list[Kernel]:
    found = []
    pattern = (
        r"Compiling entry function '(\w+)' for '(sm_\d+)'.*?(\d+) bytes spill stores"
        r".*?Used (\d+) registers"
    )
    for said in objects.values():
        for name, architecture, spilled, registers in re.findall(pattern, said, re.S):
            found.append(Kernel(name, architecture, int(registers), int(spilled)))
    return found


def family(kernel: str) -> str:
    return next(name for name in MOST_REGISTERS if name in kernel)


def most_registers(kernel: str) -> int:
    return MOST_WITH_SETTINGS if READS_SETTINGS.search(kernel) else MOST_REGISTERS[family(kernel)]


def test_every_kernel_is_there_for_every_architecture(kernels: list[Kernel]) -> None:
    by_architecture = defaultdict(set)
    for kernel in kernels:
        by_architecture[kernel.architecture].add(kernel.name)
    assert sorted(by_architecture) == sorted(f"sm_{a}" for a in build_cuda.ARCHITECTURES)
    first, *others = by_architecture.values()
    assert all(names == first for names in others)
    ours = {kernel.name for kernel in kernels if not kernel.is_cub}
    assert {family(name) for name in ours} == set(MOST_REGISTERS)


def test_ptx_is_made_once_for_the_architectures_that_share_it() -> None:
    lookup, sort = (build_cuda.CSRC / f"cuda/{name}.cu" for name in ("lookup", "sort"))
    assert build_cuda.targets(lookup, (90, 80, 100, 120)) == [
        "-gencode=arch=compute_80,code=sm_90",
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_100,code=sm_100",
        "-gencode=arch=compute_120,code=sm_120",
    ]
    assert build_cuda.targets(lookup, (100,)) == ["-gencode=arch=compute_100,code=sm_100"]
    assert build_cuda.targets(sort, (80, 90)) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
    ]


def test_sources_that_see_the_architectures_are_compiled_for_each() -> None:
    """Other sources and headers ask only whether they are compiled for a device."""
    sees = re.compile(r"__CUDA_ARCH__(?!\))|__CUDA_ARCH_\w*[A-Z]_|<cub/|<nvshmem")
    texts = {
        path: path.read_text(encoding="utf-8")
        for path in build_cuda.CSRC.rglob("*")
        if path.suffix in (".cu", ".cuh", ".h")
    }
    found = {path for path, text in texts.items() if sees.search(text)}
    known = {path for path, text in texts.items() if build_cuda.SEES_ARCHITECTURES.search(text)}
    assert found <= known
    interface, sort = sorted(path for path in found if path.parent.name == "cuda")
    assert (interface.name, sort.name) == ("interface.cu", "sort.cu")
    for path in sorted((build_cuda.CSRC / "nvshmem").glob("*.cu")):
        assert build_cuda.targets(path, (80, 90)) == build_cuda.targets(sort, (80, 90))


def test_registers_and_spills(kernels: list[Kernel]) -> None:
    ours = [kernel for kernel in kernels if not kernel.is_cub]
    beyond = [k for k in ours if k.registers > most_registers(k.name) or k.spilled]
    assert not beyond, beyond


def test_what_is_spilled_of_cub(kernels: list[Kernel]) -> None:
    """Its sort and its selection are there, and nothing else of it that nobody named."""
    cub = [kernel for kernel in kernels if kernel.is_cub]
    for name in ("DeviceRadixSortOnesweepKernel", "DeviceSelectSweepKernel"):
        assert any(name in kernel.name for kernel in cub)
    for kernel in cub:
        named = (of for (name, on), of in CUB_SPILLS.items()
                 if name in kernel.name and on == kernel.architecture)  # fmt: skip
        assert kernel.spilled <= max(named, default=0), kernel


def test_the_library_links_and_loads_without_a_device(
    toolkit: Path, objects: dict[Path, str], tmp_path: Path
) -> None:
    library = tmp_path / "_cuda.so"
    build_cuda.link(toolkit, list(objects), library)
    script = (
        f"import ctypes; library = ctypes.CDLL({str(library)!r})\n"
        "text = library.oper_cuda_error; text.restype = ctypes.c_char_p; print(text(1).decode())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "invalid argument", done.stderr


@functools.cache
def listings(toolkit: Path, made: Path) -> dict[str, list[tuple[str, str]]]:
    """Instructions of each kernel for sm_90, as (operation, operands)."""
    dumped = subprocess.run(
        [toolkit / "bin/cuobjdump", "--dump-sass", "--gpu-architecture", "sm_90", made],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = {}
    for part in re.split(r"\n\s+Function : ", dumped)[1:]:
        name, body = part.split("\n", 1)
        found[name.strip()] = re.findall(
            r"/\*[0-9a-f]{4}\*/\s+(?:@!?U?P\w+ )?([A-Z]\S*) ?(.*?);", body
        )
    return found


def reads_in_flight(instructions: list[tuple[str, str]], width: str) -> int:
    """Reads of `width` bits before what the first of them read is used."""
    waiting: set[int] = set()
    most = 0
    for operation, operands in instructions:
        numbers = [int(n) for n in re.findall(r"\bR(\d+)", operands)]
        if operation.startswith("LDG") and f".{width}" in operation:
            waiting.add(numbers[0])
            most = max(most, len(waiting))
        elif any(first <= n < first + 4 for first in waiting for n in numbers):
            waiting.clear()
    return most


# Kernels for rows of fp32 without weights, by 16 bytes: lookups and sums of dim 64, on 16 lanes;
# products with rows, of which there is one kernel for all dims; updates by one list of gradients,
# and by gradients of rows that are read once.
@pytest.mark.parametrize(
    ("source", "kernel"),
    [
        ("lookup", "pool_bags.*Float32RowELi16ELi16ELi4ELb0E"),
        ("lookup", "pool_short_bags.*Float32RowELi16ELi16E"),
        ("sum_gradients", "sum_runs.*Float32RowELi16ELi16E"),
        ("weight_gradients", "weight_gradients.*Float32RowELi4E(?!.*Lb1EEv$)"),
        ("row_groups", "add_rows"),
        *(("update_rows", f"step_rows.*{name}ELi4ELb0E") for name in ("3Sgd", "Adagrad", "Adam")),
        *(("update_runs", f"step_runs.*{name}ELi4E") for name in ("3Sgd", "Adagrad", "Adam")),
    ],
)
def test_rows_are_read_by_sixteen_bytes_and_enough_are_on_their_way(
    toolkit: Path, objects: dict[Path, str], kernels: list[Kernel], source: str, kernel: str
) -> None:
    if not (toolkit / "bin/cuobjdump").exists():
        pytest.skip("no cuobjdump beside nvcc: pip install -r requirements-cuda.txt")
    made = next(path for path in objects if path.stem == source)
    registers = {k.name: k.registers for k in kernels if k.architecture == "sm_90"}
    seen = 0
    for name, instructions in listings(toolkit, made).items():
        if not re.search(kernel, name):
            continue
        seen += 1
        reads = reads_in_flight(instructions, "128")
        threads = min(2048, 65536 // (-(-registers[name] // 8) * 8) // 256 * 256)
        assert reads * 16 * threads >= LEAST_BYTES_IN_FLIGHT, (name, reads, threads)
    assert seen
