"""Lookups of ranks on two nodes, by NVSHMEM's gets in the kernel and by a fetch of distinct rows:
the bits of the processor's kernel, in any order of threads. NVSHMEM itself is a fake
(tests/support/cuda/fake_nvshmem.h), which finds the faults that are planted here."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oper.base import native
from scripts import build_cuda
from tests.support.cuda import fake_nvshmem
from tests.support.cuda.emulator import build
from tests.support.cuda.nvshmem_lookups import Lookup, Ready, node_of, serve
from tests.support.examples import examples
from tests.support.runtime import mortal_ranks
from tests.support.runtime.ranks import Ranks


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Processes that start NVSHMEM once."""
    with Ranks(request.param) as started:
        yield started


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4) as started:
        yield started


# Rows of one piece and of many, of no whole pieces, and longer than what a warp holds at once;
# stages of one row a group, of some, and of more than a bag.
LOOKUPS = [
    Lookup(1),
    Lookup(2, dim=20, stage=1, weighted=True),
    Lookup(3, dim=64, stage=7, mean=True, samples=30),
    Lookup(4, dim=200, stage=2),  # parts of a row beyond the stage
    Lookup(5, dim=200, stage=20, weighted=True),  # parts of a row that are there
    Lookup(6, dim=5, stage=3),
    Lookup(7, "fp16", dim=33, mean=True, int32=True),
    Lookup(8, "bf16", dim=64, stage=1, weighted=True),
    Lookup(9, "int8", dim=32),
    Lookup(10, "int8", dim=33, stage=1),
    Lookup(11, longest=1, samples=40),
    Lookup(12, longest=0),
]


def assert_right(found: list[Any]) -> None:
    for of_rank in found:
        assert of_rank["wrong"] == 0, of_rank
        assert of_rank["tried"] > 0
        assert of_rank["left"] == 0


def test_lookups_of_all_shapes(ranks: Ranks, emulated: Path, emulated_nvshmem: Path) -> None:
    given = (str(emulated), str(emulated_nvshmem), LOOKUPS)
    found = ranks.run(ranks.most, serve, *given, True)
    assert_right(found)
    assert sum(of_rank["far"] for of_rank in found) > 1000  # what was to be asked for


@given(
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(["fp32", "fp16", "bf16", "int8"]),
    dim=st.sampled_from([4, 6, 8, 36, 64, 130]),
    weighted=st.booleans(),
    mean=st.booleans(),
    longest=st.sampled_from([1, 3, 20]),
    stage=st.integers(1, 8),
)
@examples(8)
def test_any_lookup(
    four: Ranks,
    emulated: Path,
    emulated_nvshmem: Path,
    seed: int,
    dtype: str,
    dim: int,
    weighted: bool,
    mean: bool,
    longest: int,
    stage: int,
) -> None:
    orders = (0, seed + 1)
    lookup = Lookup(seed, dtype, dim, weighted, mean, longest, stage=stage, orders=orders)
    found = four.run(4, serve, str(emulated), str(emulated_nvshmem), [lookup], True)
    assert_right(found)


def test_what_has_pointers_is_not_asked_for(emulated: Path, emulated_nvshmem: Path) -> None:
    given = (str(emulated), str(emulated_nvshmem))
    lookups = [Lookup(1), Lookup(13, dim=64)]
    for of_rank in mortal_ranks.run(2, serve, *given, lookups, False):
        assert of_rank["gets"] == of_rank["far"]  # each access of another node's row once


def test_a_group_of_threads_waits_once_for_all_that_it_asked_for(
    emulated: Path, emulated_nvshmem: Path
) -> None:
    """A bag's rows fit its group's stage, and are asked for by sixteen threads."""
    lookup = Lookup(14, dim=64, longest=40, samples=12, stage=40)
    given = (str(emulated), str(emulated_nvshmem), [lookup], False)
    for of_rank in mortal_ranks.run(2, serve, *given):
        assert of_rank["wrong"] == 0
        assert 0 < of_rank["quiets"] <= lookup.samples * len(lookup.orders) < of_rank["gets"] / 2


def _short_stage(rank: int, group: Any, kernels: str, library: str) -> str:
    native.ops().load_device_library(kernels)
    fake_nvshmem.start(library, rank, group, node_of(rank, 2))
    ready = Ready(Lookup(1, dim=200), rank, group)
    stage = native.ops().allocate_symmetric(100, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="rows may be longer than its stage has room for"):
        ready.found(stage)
    return "refused"


def test_a_stage_that_is_too_small(emulated: Path, emulated_nvshmem: Path) -> None:
    found = mortal_ranks.run(2, _short_stage, str(emulated), str(emulated_nvshmem))
    assert found == ["refused"] * 2


# Faults: what is planted in a header, and whether lookups are wrong or the fake ends the process.
WRONG, ENDS = "wrong", "ends"
FAULTS = {
    "no quiet": ("row_gets", "if (any_asked && lane == 0) nvshmem_quiet();", "", ENDS),
    "a quiet before all have asked": (
        "row_gets",
        "const bool any_asked = __ballot_sync(mask, asked) != 0;\n"
        "  __syncwarp(mask);  // all threads of the group have asked",
        "const bool any_asked = asked;",
        ENDS,
    ),
    "a quiet of each thread": (
        "row_gets",
        "if (any_asked && lane == 0) nvshmem_quiet();",
        "if (any_asked) nvshmem_quiet();",
        ENDS,
    ),
    "no wait for the others' rows": (
        "row_gets",
        "__syncwarp(mask);  // what any",
        "// what any",
        WRONG,
    ),
    "rows asked for before all have read the stage": (
        "row_gets",
        "__syncwarp(mask);  // all threads of the group have read",
        "// all threads of the group have read",
        WRONG,
    ),
    "rows of the stage read by the cache for what stays": (
        "row_gets",
        "return load_arrived<kBytes>(place);",
        "return load_row<kBytes>(place);",
        ENDS,
    ),
    "the stage of another group": ("row_gets", "a.stage + group *", "a.stage + 0 * group *", WRONG),
    "a part of a row whose chunk is gone": (
        "row_gets",
        "if (is_there && end - n <= a.chunk)",
        "if (is_there)",
        WRONG,
    ),
    "a row of the next rank": (
        "row_gets",
        "static_cast<int>(owner));",
        "static_cast<int>(owner) + 1);",
        ENDS,
    ),
    "a row beyond the arena": (
        "row_gets",
        "arena + slot_of(address) * a.row_bytes,",
        "arena + (slot_of(address) << 30),",
        ENDS,
    ),
    "no quiet of the fetch": ("fetch_rows", "nvshmem_quiet();", "(void)0;", ENDS),
    "a quiet of each thread of the fetch": ("fetch_rows", "asked && lane == 0", "asked", ENDS),
    "no quiet of the pieces": ("get_pieces", "nvshmem_quiet();", "(void)0;", ENDS),
    "a quiet of each thread of the pieces": (
        "get_pieces",
        "asked && threadIdx.x % kWarpThreads == 0",
        "asked",
        ENDS,
    ),
    "a piece of the next rank": (
        "get_pieces",
        "static_cast<int>(piece.rank));",
        "static_cast<int>(piece.rank + 1));",
        ENDS,
    ),
    "every other piece": ("get_pieces", "n += warps", "n += 2 * warps", WRONG),
    "lanes that fetch unlike rows": (
        "fetch_rows",
        "static_cast<int>(owner));",
        "static_cast<int>(owner + lane % 2));",
        ENDS,
    ),
}


def _serve_or_lose(
    rank: int, group: Any, kernels: str, library: str, lookups: list[Lookup]
) -> dict[str, int] | None:
    try:
        return serve(rank, group, kernels, library, lookups, True)
    except RuntimeError:  # of the group, as the other rank was ended
        return None


@pytest.mark.check
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(
    emulated: Path, emulated_nvshmem: Path, tmp_path: Path, name: str
) -> None:
    header, right, fault, outcome = FAULTS[name]
    folder = tmp_path / "oper/nvshmem"
    folder.mkdir(parents=True)
    for part in (build_cuda.CSRC / "include/oper/nvshmem").iterdir():
        text = part.read_text()
        if part.stem == header:
            assert text.count(right) == 1
            text = text.replace(right, fault)
        (folder / part.name).write_text(text)
    library = tmp_path / "libfaulty.so"
    sources = sorted((build_cuda.CSRC / "nvshmem").glob("*.cu"))
    (faulty,) = (s for s in sources if f"nvshmem/{header}.cuh" in s.read_text())
    others = [emulated_nvshmem.with_name(f"{s.stem}.o") for s in sources if s != faulty]
    build(library, [faulty], "-O0", "-Wno-unused", before=[tmp_path], objects=others)
    lookups = [Lookup(1, stage=2), Lookup(4, dim=200, stage=2, longest=20)]
    given = (_serve_or_lose, str(emulated), str(library), lookups)
    if outcome == WRONG:
        assert sum(of_rank["wrong"] for of_rank in mortal_ranks.run(2, *given)) > 0
    else:  # the other rank may wait for this one for ever
        assert mortal_ranks.run(2, *given, silent=(1,))[0] is None


def _unlike_sizes(rank: int, group: Any, library: str) -> None:
    fake_nvshmem.start(library, rank, group, rank)
    native.ops().allocate_symmetric(1000 + rank, torch.device("cpu"))


def test_the_fake_finds_allocations_of_unlike_sizes(emulated_nvshmem: Path) -> None:
    assert None in mortal_ranks.run(2, _unlike_sizes, str(emulated_nvshmem))
