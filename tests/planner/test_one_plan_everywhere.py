"""One plan, byte for byte, whatever the processor offers and however many threads there are.

Every variant is a process that makes the plans of scripts/plan_digests.py with other kernels: of
OpenBLAS, of NumPy and of the C library. What the processor lacks is left out. ARM is not run here.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = 3600

# The oldest kernels of all, on one processor; those of a processor without AVX-512.
VARIANTS = {
    "oldest": {
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "1",
    },
    "avx2": {
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
        "PYTHONHASHSEED": "2",
    },
    "avx512": {"OPENBLAS_CORETYPE": "SkylakeX", "PYTHONHASHSEED": "3"},
}


def digests(variant: dict[str, str], *options: str) -> list[str]:
    known = set(os.environ) - {"OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "GLIBC_TUNABLES"}
    environment = {name: os.environ[name] for name in known} | variant
    command = [sys.executable, "-m", "scripts.plan_digests", *options]
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def variants() -> dict[str, dict[str, str]]:
    """The variants that this processor can run: only where it has the kernels' instructions, as
    OpenBLAS and NumPy fall back to others without a word."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    needed = {"oldest": {"sse2"}, "avx2": {"avx2", "fma"}, "avx512": {"avx512f", "avx512bw"}}
    return {name: VARIANTS[name] for name in VARIANTS if needed[name] <= flags}


@pytest.mark.check
def test_plans_have_the_same_bytes_by_the_oldest_and_the_newest_kernels() -> None:
    names = list(variants())
    compare([names[0], names[-1]])


@pytest.mark.slow
def test_plans_have_the_same_bytes_on_every_processor() -> None:
    compare(list(variants()))


def compare(names: list[str]) -> None:
    """Make the plans by the variants `names`, at once, and assert that they are equal."""
    if len(set(names)) < 2:
        pytest.skip(f"this processor has the kernels of {set(names)} alone: nothing to compare")
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda name: digests(VARIANTS[name]), names))
    assert len(made[0]) > 60
    assert sum("Error" in line for line in made[0]) == 1  # a tier in inference is refused
    for name, lines in zip(names, made, strict=True):
        assert lines == made[0], name
