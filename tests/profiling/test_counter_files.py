"""Counters on the disk, dense and sparse: both read the same, and nothing damaged is read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.cost.workload import Workload
from oper.files.manifest import open_folder, write_manifest
from oper.files.storage import atomic_folder
from oper.plan.plan import Plan
from oper.plan.settings import PlanSettings
from oper.planner.make_plan import make_plan
from oper.planner.replan.drift import drift_by_window
from oper.profiling import profile as profiles
from oper.profiling.counter_arrays import new_counters
from oper.profiling.counter_files import (
    BLOCK_ROWS,
    SparseCounts,
    counter_files,
    load_counters,
    save_counters,
    sparse_counts,
)
from oper.profiling.profile import Profile, in_order, merge, window_name, write_windows
from oper.tables.table import Table
from oper.topology.topology import Topology
from tests.support.commands import fine

SIZES = (1, 300, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS + 17)


def counters_of(size: int, read: dict[int, int], dtype: Any) -> Any:
    counters = np.zeros(size, dtype)
    for row, count in read.items():
        counters[row % size] = min(count, np.iinfo(dtype).max)
    return counters


@st.composite
def counters(draw: st.DrawFn) -> Any:
    """Few rows read, some of them at the ends of blocks, and often."""
    rows = st.one_of(
        st.integers(0, 1 << 18),
        st.sampled_from([n * BLOCK_ROWS + d for n in range(4) for d in (-1, 0)]),
    )
    counts = st.one_of(st.integers(1, 600), st.sampled_from([255, 256, 2**32 - 1, 2**60]))
    read = draw(st.dictionaries(rows, counts, max_size=20))
    return counters_of(
        draw(st.sampled_from(SIZES)), read, draw(st.sampled_from([np.uint32, np.uint64]))
    )


@given(made=counters(), mmap=st.booleans())
def test_sparse_counters_read_as_dense_ones(
    made: Any, mmap: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("counters")
    kept = save_counters(folder, "accesses", made, sparse=True)
    names = {path.name for path in folder.iterdir()}
    loaded = load_counters(folder, counter_files("accesses", names), len(made), mmap)
    assert type(loaded) is (SparseCounts if isinstance(kept, SparseCounts) else type(loaded))
    for found in (kept, loaded):
        assert found.dtype == made.dtype
        assert found.max(initial=0) == made.max(initial=0)
        assert found.sum(dtype=np.uint64) == made.sum(dtype=np.uint64)
        dense = found.dense if isinstance(found, SparseCounts) else found
        assert dense.dtype == made.dtype
        np.testing.assert_array_equal(dense, made)
        if isinstance(found, SparseCounts):
            total = np.arange(len(made), dtype=np.uint64)
            found.add_to(total)
            np.testing.assert_array_equal(total, np.arange(len(made), dtype=np.uint64) + made)
    written = sum(path.stat().st_size for path in folder.iterdir())
    assert written <= made.nbytes + 128


@given(made=counters())
def test_sparse_counters_in_memory_are_those_of_the_files(made: Any) -> None:
    sparse = sparse_counts(made)
    sparse.check(Path("made up"))
    assert sparse.dtype == made.dtype
    np.testing.assert_array_equal(sparse.dense, made)
    assert sparse.sum(np.uint64) == made.sum(dtype=np.uint64)


def test_each_is_written_where_it_is_smaller(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for number, (read, count, is_sparse) in enumerate(
        [(0, 1, True), (0.01, 300, True), (1, 1, True), (0.5, 300, True), (0.6, 300, False)]
    ):
        made = (random.random(4 * BLOCK_ROWS) < read) * np.uint32(count)
        folder = tmp_path / str(number)
        folder.mkdir()
        kept = save_counters(folder, "n", made, sparse=True)
        assert isinstance(kept, SparseCounts) == is_sparse
        sparse_bytes = np.count_nonzero(made) * (7 if count > 255 else 3) + 40 + 4 * 128
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert size == min(made.nbytes + 128, sparse_bytes)
        assert not isinstance(save_counters(folder, "m", made), SparseCounts)  # only if asked for
    tiny = np.zeros(90, np.uint32)
    assert not isinstance(save_counters(tmp_path, "tiny", tiny, sparse=True), SparseCounts)


def test_counters_mapped_to_the_dense_file_leave_it(tmp_path: Path) -> None:
    made = new_counters(4 * BLOCK_ROWS, np.uint32, tmp_path, "accesses.npy")
    made[[5, BLOCK_ROWS, -1]] = 1, 300, 2
    kept = save_counters(tmp_path, "accesses", made, sparse=True)
    assert isinstance(kept, SparseCounts)
    assert not (tmp_path / "accesses.npy").exists()
    np.testing.assert_array_equal(kept.dense, made)


def drop_last(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays.update({name: arrays[name][:-1]})


def put(name: str, at: int, value: int) -> Callable[[dict[str, Any]], None]:
    return lambda arrays: arrays[name].__setitem__(at, value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *((drop_last(name), "is damaged") for name in ("block_starts", "rows", "counts")),
        (drop_last("large_counts"), "large counts"),
        (put("block_starts", 0, 1), "follow each other"),
        (put("block_starts", 2, 4), "follow each other"),
        (put("block_starts", 1, -(2**63)), "follow each other"),
        (put("block_starts", -1, 2), "follow each other"),
        (put("rows", 1, 3), "not ascending"),
        (put("rows", -1, 17), "not ascending"),  # beyond the last row
        (put("counts", 0, 0), "large counts"),
        (put("large_counts", 0, 255), "large counts"),
        (lambda a: a.update(rows=a["rows"].astype(np.int64)), "of uint16"),
        (lambda a: a.update(counts=a["counts"].reshape(1, -1)), "of uint8"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, damage: Callable[[dict[str, Any]], None], message: str
) -> None:
    """With right digests, as of a folder that something else wrote."""
    size = 3 * BLOCK_ROWS + 17
    made = counters_of(size, {3: 1, 4: 300, BLOCK_ROWS + 1: 2, size - 1: 1}, np.uint32)
    save_counters(tmp_path, "n", made, sparse=True)
    files = counter_files("n", {path.name for path in tmp_path.iterdir()})
    arrays = {file[2:-4]: np.load(tmp_path / file) for file in files}
    damage(arrays)
    for name, array in arrays.items():
        np.save(tmp_path / f"n_{name}.npy", array)
    with pytest.raises(OperError, match=message):
        load_counters(tmp_path, files, size, mmap=True)


def window(seed: int, bags: bool) -> Profile:
    random = np.random.default_rng(seed)
    tables = (Table("a", 3 * BLOCK_ROWS), Table("b", BLOCK_ROWS), Table("c", 100))
    accesses = np.zeros(sum(table.rows for table in tables), np.uint32)
    accesses[random.integers(0, len(accesses), 4000)] = random.zipf(1.3, 4000) % 5000
    begin = tables[0].rows
    of_b = accesses[begin : begin + tables[1].rows] // 2 * bags
    return Profile(tables, 9000, accesses, of_b if bags else of_b[:0], (False, bags, False))


def save_windows(folder: Path, windows: list[Profile], sparse: bool = True) -> None:
    with atomic_folder(folder, profiles.FORMAT) as made:
        for number, one in enumerate(windows):
            (made / window_name(number)).mkdir()
            one.write(made / window_name(number), sparse)
        write_windows(made, windows)


@pytest.mark.parametrize("bags", [(True, True), (True, False), (False, False)])
def test_windows_are_the_same_profiles_dense_and_sparse(
    tmp_path: Path, bags: tuple[bool, bool]
) -> None:
    save_windows(tmp_path / "sparse", [window(n, has) for n, has in enumerate(bags)])
    save_windows(tmp_path / "dense", [window(n, has) for n, has in enumerate(bags)], sparse=False)
    sizes = [
        sum(path.stat().st_size for path in (tmp_path / name).rglob("*.npy"))
        for name in ("sparse", "dense")
    ]
    assert sizes[0] < sizes[1] / 20
    for spec in ("", "@0", "@1"):
        one, other = (Profile.load(f"{tmp_path / name}{spec}") for name in ("sparse", "dense"))
        assert one.digest == other.digest
        assert one.bagged == other.bagged
        for name in ("accesses", "samples_with_row"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
        # The digest is of the counters themselves, however they are stored.
        assert one.digest == replace(one).digest


def test_summing_windows_makes_none_of_them_dense(tmp_path: Path) -> None:
    save_windows(tmp_path / "w", [window(n, n > 0) for n in range(3)])
    opened = Profile.load_windows(tmp_path / "w")
    summed = merge(opened)
    expected = merge([window(n, n > 0) for n in range(3)])
    np.testing.assert_array_equal(summed.accesses, expected.accesses)
    np.testing.assert_array_equal(summed.samples_with_row, expected.samples_with_row)
    for one in opened:
        assert "dense" not in vars(one.stored("accesses"))


def test_a_plan_named_like_a_window_does_not_hide_it(tmp_path: Path) -> None:
    save_windows(tmp_path / "w", [window(n, True) for n in range(2)])
    ranks, workload = Topology.load("cpu:2"), Workload("inference", "raw", 512)
    make_plan(window(9, True), ranks, workload, PlanSettings()).save(tmp_path / "w@1")
    assert (
        Profile.load(tmp_path / "w@1").digest == Profile.load(tmp_path / "w" / "window-001").digest
    )
    window(7, True).save(tmp_path / "w@0")
    assert Profile.load(tmp_path / "w@0").digest == window(7, True).digest


def test_drift_keeps_two_windows_dense_at_a_time(tmp_path: Path) -> None:
    """A window, and the one before it, which other plans are made from."""
    save_windows(tmp_path / "w", [window(n, True) for n in range(3)])
    workload, settings = Workload("inference", "raw", 512), PlanSettings(extra_memory=0.1)
    topology = Topology.load("2x2-a100")
    make_plan(window(9, True), topology, workload, settings).save(tmp_path / "plan")
    opened = Profile.load_windows(tmp_path / "w")
    most = []

    def report(step: str) -> None:
        most.append(sum("dense" in vars(one.stored("accesses")) for one in opened))

    found = drift_by_window(Plan.load(tmp_path / "plan"), opened, 0.05, report)
    assert max(most) == 2
    assert not any("dense" in vars(one.stored("accesses")) for one in opened)
    in_memory = [window(n, True) for n in range(3)]
    in_order(in_memory)
    alone = drift_by_window(Plan.load(tmp_path / "plan"), in_memory, 0.05)
    assert found.to_json() == alone.to_json()


def test_a_part_of_sparse_counters_is_missing(tmp_path: Path) -> None:
    save_windows(tmp_path / "w", [window(1, True)])
    folder = tmp_path / "w" / window_name(0)
    file = folder / "accesses_rows.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(OperError, match=r"accesses_rows\.npy: its SHA-256"):
        Profile.load(f"{tmp_path / 'w'}@0")
    file.unlink()
    with pytest.raises(OperError, match=r"accesses_rows\.npy: is missing"):
        Profile.load(f"{tmp_path / 'w'}@0")
    content = open_folder(folder, profiles.FORMAT)
    del content["files"]["accesses_rows.npy"]
    write_manifest(folder, profiles.FORMAT, content)
    with pytest.raises(OperError, match="the counters are missing"):
        Profile.load(f"{tmp_path / 'w'}@0")


@pytest.mark.parametrize("limit", [(), ("--memory-limit", "0B")])
def test_a_window_takes_what_its_rows_need(tmp_path: Path, limit: tuple[str, ...]) -> None:
    """A row number and a count of 4 bytes each for every row that a window read, and half as much
    again; beside the markers."""
    random = np.random.default_rng(1)
    ids = random.zipf(1.2, 40_000) % 390_000
    pq.write_table(pa.table({"f": np.append(ids, 389_999)}), tmp_path / "log.parquet")
    spans = ("--windows", "7", *limit)
    fine("profile", tmp_path / "log.parquet", "-o", tmp_path / "w", *spans)
    for number, part in enumerate(np.array_split(np.append(ids, 389_999), 7)):
        folder = tmp_path / "w" / window_name(number)
        arrays = sum(path.stat().st_size for path in folder.glob("*.npy"))
        assert arrays <= 1.5 * 8 * len(np.unique(part))
        assert not (folder / "accesses.npy").exists()
        opened = Profile.load(f"{tmp_path / 'w'}@{number}")
        assert int(opened.accesses.sum()) == opened.samples
    pq.write_table(pa.table({"f": [0, 389_999], "day": [0, 1]}), tmp_path / "two.parquet")
    spans = ("--columns", "f", "--by-column", "day", "--every", "1")
    fine("profile", tmp_path / "two.parquet", "-o", tmp_path / "d", *spans)
    assert sum(path.stat().st_size for path in (tmp_path / "d").rglob("*.npy")) < 2000
