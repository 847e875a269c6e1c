"""The emulated kernels under AddressSanitizer: tests of each once more, on tensors whose memory
ends where they do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import build_cuda
from tests.support.cuda import emulator

pytestmark = pytest.mark.check

# Of each kernel what draws its arguments, and what it does not draw; engines of one rank.
TESTS = (
    "test_check_bags.py",
    "test_copied_rows.py",
    "test_forward_bags.py",
    "test_lookup.py::test_bags_of_which_most_have_one_row",
    "test_lookup.py::test_batches_of_unlike_tables",
    "test_merge_gradients.py::test_groups_are_laid_out",
    "test_merge_gradients.py::test_lists_are_merged",
    "test_replica_messages.py::test_any_ranks_and_buckets",
    "test_replica_sums.py::test_any_ranks_and_buckets",
    "test_replica_sums.py::test_touched_rows_are_told_from_padding",
    "test_sort.py::test_more_rows_and_accesses_than_64_bits_tell_apart",
    "test_sort.py::test_runs_are_the_processors",
    "test_sum_gradients.py::test_batches",
    "test_sum_gradients.py::test_runs_of_many_pieces_beside_short_ones",
    "test_training.py::test_nothing_is_trained_by_lengths_that_do_not_fit",
    "test_training.py::test_what_an_id_out_of_range_trains",
    "test_translate.py",
    "test_united_slots.py::test_slots_are_united",
    "test_united_slots.py::test_united_rows_are_found",
    "test_update_rows.py::test_any_lists",
    "test_update_runs.py::test_any_batch",
    "test_weight_gradients.py::test_batches_of_unlike_tables",
)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("sanitized") / "libemulated.so"
    sources = sorted((build_cuda.CSRC / "cuda").glob("*.cu"))
    emulator.build(library, sources, "-O1", "-g1", "-fsanitize=address")
    return library


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """A Python program with AddressSanitizer before all other libraries."""
    libraries = [
        subprocess.run(
            ["g++", f"-print-file-name={name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan", "libstdc++")  # which it asks for exceptions when it starts
    ]
    options = {
        "detect_leaks": 0,  # Python and torch leak by design
        "allocator_may_return_null": 1,  # what cannot be allocated is refused, as elsewhere
        "quarantine_size_mb": 4,  # more is memory that the system must give
    }
    given = ":".join(f"{name}={value}" for name, value in options.items())
    environment = os.environ | {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": given}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=build_cuda.REPOSITORY,
        capture_output=True, text=True, timeout=3600,
    )  # fmt: skip


def test_kernels_read_and_write_nothing_beyond_tensors(sanitized: Path) -> None:
    plugin = ("-p", "tests.support.cuda.given_kernels", "--emulated-kernels", sanitized)
    options = ("-q", "-x", "-s", "-p", "no:cacheprovider", "--hypothesis-profile", "few")
    here = Path(__file__).parent
    tests = (str(here / name) for name in TESTS)
    done = run("-m", "pytest", *plugin, *options, "-k", "emulated", *tests)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "passed" in done.stdout


def test_tensors_that_are_an_element_too_short_are_told(sanitized: Path) -> None:
    done = run("-m", "tests.support.cuda.planted_overruns", sanitized)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("nothing_short")["status"] == 0
    kernel = {
        "run_start_of_sums": "find_gradients",
        "sums": "sum_runs",
        "slots_of_updates": "step_runs",
        "state_of_updates": "step_runs",
    }
    assert sorted(found) == sorted(kernel)
    for name, ended in found.items():
        assert ended["status"] != 0, name
        assert "heap-buffer-overflow" in ended["said"], ended["said"]
        assert kernel[name] in ended["said"], ended["said"]
