"""Profiles on disk: what is written is read back, added up, and refused where it is damaged."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.files.manifest import write_manifest
from oper.files.storage import atomic_folder
from oper.profiling import profile as profiles
from oper.profiling.counter_arrays import new_counters
from oper.profiling.distinct_rows import Distinct
from oper.profiling.profile import Profile, merge, window_name, write_windows
from oper.tables.bag_lengths import BagLengths
from oper.tables.table import Table
from tests.support.planner.profiles import make_profile

BAG_LENGTHS = BagLengths.of_pairs(
    np.array([(0, 0, 3), (0, 1, 997), (1, 70, 1000)]), np.array([997, 9000, 0, 0])
)


def same(one: Profile, other: Profile) -> None:
    assert (one.bag_lengths is None) == (other.bag_lengths is None)
    if one.bag_lengths and other.bag_lengths:
        np.testing.assert_array_equal(one.bag_lengths.pairs, other.bag_lengths.pairs)
        np.testing.assert_array_equal(one.bag_lengths.distinct, other.bag_lengths.distinct)
    assert (one.tables, one.samples, one.bagged) == (other.tables, other.samples, other.bagged)
    np.testing.assert_array_equal(one.accesses, other.accesses)
    np.testing.assert_array_equal(one.samples_with_row, other.samples_with_row)
    assert one.accesses.dtype == one.samples_with_row.dtype == other.accesses.dtype
    assert one.distinct == other.distinct
    assert one.digest == other.digest


def save_windows(folder: Path, windows: list[Profile]) -> None:
    with atomic_folder(folder, profiles.FORMAT) as made:
        for number, window in enumerate(windows):
            (made / window_name(number)).mkdir()
            window.write(made / window_name(number))
        write_windows(made, windows)


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@pytest.mark.parametrize("mmap", [False, True])
def test_saved_and_opened(tmp_path: Path, bags: bool, dtype: type, mmap: bool) -> None:
    made = make_profile(1, bags=bags)
    made.accesses, made.samples_with_row = (
        made.accesses.astype(dtype),
        made.samples_with_row.astype(dtype),
    )
    made.source = {"files": ["a.npz"]}
    made.distinct = Distinct(64, 4, (0.5,) * 4, (0.25,) * 4, 3, (1.5,) * 4, (2.0,) * 4)
    made.bag_lengths = BAG_LENGTHS if bags else None
    digest = made.digest  # before it is written, from memory
    made.save(tmp_path / "p")
    made.save(tmp_path / "p", overwrite=True)  # in the place of the first
    opened = Profile.load(tmp_path / "p", mmap=mmap, check=True)
    same(opened, made)
    assert opened.digest == digest
    assert opened.source == made.source
    assert isinstance(opened.accesses, np.memmap) == mmap
    for table in range(4):
        np.testing.assert_array_equal(
            opened.table_samples_with_row(table), made.table_samples_with_row(table)
        )
        assert len(opened.table_samples_with_row(table)) == made.tables[table].rows


def test_folder_depends_on_the_counts_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_profile(1).save(tmp_path / name)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


def test_digest_tells_profiles_apart() -> None:
    made = make_profile(1)
    other = make_profile(1)
    other.accesses[7] += 1
    ratio = Distinct(64, 4, (0.5,) * 4, (0.25,) * 4, 3, (1.5,) * 4, (2.0,) * 4)
    digests = [
        made.digest,
        other.digest,
        replace(made, samples=999).digest,
        replace(made, distinct=ratio).digest,
        replace(made, bag_lengths=BAG_LENGTHS).digest,
        replace(made, bag_lengths=replace(BAG_LENGTHS, distinct=np.arange(4))).digest,
        replace(made, bag_lengths=BagLengths.sum([BAG_LENGTHS, BAG_LENGTHS])).digest,
        replace(made, tables=(replace(made.tables[0], dim=4), *made.tables[1:])).digest,
    ]
    assert len(set(digests)) == len(digests)


@given(st.lists(st.booleans(), min_size=1, max_size=4), st.integers(0, 1000))
def test_merging_adds(bags: list[bool], seed: int) -> None:
    parts = [make_profile(seed + n, bags=b) for n, b in enumerate(bags)]
    whole = merge(parts)
    assert whole.samples == 1000 * len(parts)
    assert whole.bagged == (False, any(bags), False, False)
    np.testing.assert_array_equal(
        whole.accesses, np.sum([p.accesses for p in parts], axis=0, dtype=np.int64)
    )
    np.testing.assert_array_equal(
        whole.table_samples_with_row(1),
        np.sum([p.table_samples_with_row(1) for p in parts], axis=0, dtype=np.int64),
    )


def test_merging_widens_and_may_use_files(tmp_path: Path) -> None:
    part = make_profile(1)
    part.accesses[3] = (1 << 32) - 1
    assert merge([part]).accesses.dtype == np.uint32
    with atomic_folder(tmp_path / "sum", profiles.FORMAT) as folder:
        whole = merge([part, part], folder)
        assert isinstance(whole.accesses, np.memmap)
        whole.write(folder)
    opened = Profile.load(tmp_path / "sum", check=True)
    assert opened.accesses.dtype == opened.samples_with_row.dtype == np.uint64
    assert opened.accesses[3] == (1 << 33) - 2
    assert sorted(p.name for p in (tmp_path / "sum").iterdir()) == [
        "accesses.npy",
        "profile.json",
        "samples_with_row.npy",
    ]


def test_merging_measurements_weighs_them() -> None:
    one, two = make_profile(1), make_profile(2)
    one.distinct = Distinct(64, 4, (1.0,) * 4, (1.0,) * 4, 3, (2.0,) * 4, (4.0,) * 4)
    two.distinct = Distinct(64, 4, (1.0,) * 4, (1.0,) * 4, 1, (6.0,) * 4, (8.0,) * 4)
    merged = merge([one, two]).distinct
    assert merged is not None
    assert (merged.batches, merged.rank_rows, merged.union_rows) == (4, (3.0,) * 4, (5.0,) * 4)
    two.distinct = replace(two.distinct, ranks=2)
    assert merge([one, two]).distinct is None
    two.distinct = None
    assert merge([one, two]).distinct is None


def test_lengths_of_bags_follow_sums_and_selections() -> None:
    parts = [replace(make_profile(n), bag_lengths=BAG_LENGTHS) for n in range(3)]
    summed = merge(parts).bag_lengths
    assert summed is not None
    np.testing.assert_array_equal(summed.bags, 3 * BAG_LENGTHS.bags)
    np.testing.assert_array_equal(summed.distinct, 3 * BAG_LENGTHS.distinct)
    selected = parts[0].select([1, 3]).bag_lengths
    assert selected is not None
    np.testing.assert_array_equal(selected.pairs, [(0, 70, 1000)])
    # Of a sum they are known only where they were counted of every part.
    assert merge([*parts, make_profile(3)]).bag_lengths is None
    assert make_profile(3).select([1]).bag_lengths is None


def test_damaged_lengths_of_bags_are_refused(tmp_path: Path) -> None:
    made = make_profile(1)
    table, length, bags = BAG_LENGTHS.pairs[::-1].T
    made.bag_lengths = BagLengths(table, length, bags, BAG_LENGTHS.distinct)
    made.save(tmp_path / "p")
    with pytest.raises(OperError, match=r"bag_lengths\.npy: is damaged \(they are not ascending\)"):
        Profile.load(tmp_path / "p")
    made.bag_lengths = BAG_LENGTHS
    made.save(tmp_path / "p", overwrite=True)
    content = json.loads((tmp_path / "p" / "profile.json").read_text())
    others: list[object] = [[1.5] * 4, [-1] * 4, [True] * 4, [1 << 63] * 4, [997] * 4]
    for distinct in [None, {}, [1, 2], *others]:
        content["distinct_in_bags"] = distinct
        write_manifest(tmp_path / "p", profiles.FORMAT, content)
        with pytest.raises(OperError, match=r"bag_lengths\.npy: is damaged"):
            Profile.load(tmp_path / "p")


def test_merging_refuses_other_tables() -> None:
    one, two = make_profile(1), make_profile(2)
    two.tables = (*two.tables[:2], replace(two.tables[2], dim=4), two.tables[3])
    with pytest.raises(OperError, match=r"number 2 of them: table 't2'.*`?tables`?"):
        merge([one, two])
    with pytest.raises(OperError, match="3 tables, and the first 4"):
        merge([one, make_profile(2, rows=(4, 3, 2))])
    two = make_profile(2)
    two.source = {"sampled": {"share": 0.5}}
    with pytest.raises(OperError, match=r"0\.5 of the samples, and the first 1"):
        merge([one, two])


def test_windows_open_alone_and_as_their_sum(tmp_path: Path) -> None:
    windows = [make_profile(n) for n in range(3)]
    save_windows(tmp_path / "w", windows)
    for number, window in enumerate(windows):
        same(Profile.load(f"{tmp_path / 'w'}@{number}"), window)
    same(Profile.load(tmp_path / "w"), merge(windows))
    with pytest.raises(OperError, match="windows @0 to @2"):
        Profile.load(f"{tmp_path / 'w'}@3")
    windows[0].save(tmp_path / "one@1")  # a name with an @ is a name
    same(Profile.load(tmp_path / "one@1"), windows[0])
    windows[0].save(tmp_path / "one")
    with pytest.raises(OperError, match="has no windows"):
        Profile.load(f"{tmp_path / 'one'}@0")


def test_not_a_profile(tmp_path: Path) -> None:
    with pytest.raises(OperError, match="no such folder"):
        Profile.load(tmp_path / "absent")
    with pytest.raises(
        OperError, match=r"expected a profile .*profile\.json.* got an empty folder"
    ):
        Profile.load(tmp_path)
    (tmp_path / "profile.json").write_text('{"schema": "oper.plan", "version": 1}')
    with pytest.raises(OperError, match="schema"):
        Profile.load(tmp_path)
    (tmp_path / "profile.json").write_text('{"schema": "oper.profile", "version": 99}')
    with pytest.raises(OperError, match="expected version 4, got 99"):
        Profile.load(tmp_path)


@pytest.mark.parametrize("name", ["accesses.npy", "samples_with_row.npy"])
def test_truncated_and_missing_files(tmp_path: Path, name: str) -> None:
    make_profile(1).save(tmp_path / "p")
    file = tmp_path / "p" / name
    content = file.read_bytes()
    for size in (0, 1, 60, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(OperError, match=f"{name}: {size} bytes, and {len(content)} were"):
            Profile.load(tmp_path / "p")
    file.write_bytes(content[:-1] + b"\xff")
    Profile.load(tmp_path / "p", check=False)
    with pytest.raises(OperError, match=f"{name}: its SHA-256"):
        Profile.load(tmp_path / "p")
    file.unlink()
    with pytest.raises(OperError, match=f"{name}: is missing"):
        Profile.load(tmp_path / "p")


def test_counters_of_another_shape(tmp_path: Path) -> None:
    made = make_profile(1)
    made.accesses = made.accesses[:-1]
    made.save(tmp_path / "p")
    with pytest.raises(
        OperError,
        match=r"accesses\.npy: expected 69 counters of uint32 or uint64, got uint32 \(68,\)",
    ):
        Profile.load(tmp_path / "p")


def damaged_values() -> st.SearchStrategy[object]:
    return st.sampled_from([None, [], {}, "x", -1, [{}], [1], {"x": 1}])


@given(data=st.data())
def test_damaged_markers_are_refused(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "p"
    made = make_profile(1)
    made.distinct = Distinct(64, 4, (1.0,) * 4, (1.0,) * 4, 3, (2.0,) * 4, (4.0,) * 4)
    made.save(folder)
    content = json.loads((folder / "profile.json").read_text())
    key = data.draw(st.sampled_from(["tables", "files", "fingerprint", "digest", "samples"]))
    if data.draw(st.booleans()):
        del content[key]
    elif key in ("tables", "files"):
        content[key] = data.draw(damaged_values())
    else:
        content["tables"][0]["rows"] = data.draw(damaged_values())
    write_manifest(folder, profiles.FORMAT, content)
    with pytest.raises(OperError, match=r"is damaged|npy: is missing"):
        Profile.load(folder)


def test_truncated_marker(tmp_path: Path) -> None:
    make_profile(1).save(tmp_path / "p")
    marker = tmp_path / "p" / "profile.json"
    marker.write_bytes(marker.read_bytes()[:100])
    with pytest.raises(OperError, match=r"profile\.json, line \d+, column \d+: is not JSON"):
        Profile.load(tmp_path / "p")


def test_damaged_window_list(tmp_path: Path) -> None:
    save_windows(tmp_path / "w", [make_profile(1)])
    damaged: list[object] = [None, [1], [{}], [{"name": "0"}], 3]
    for windows in damaged:
        content = {"schema": "oper.profile", "version": 4, "windows": windows, "files": {}}
        write_manifest(tmp_path / "w", profiles.FORMAT, content)
        with pytest.raises(OperError, match=r"profile\.json: is damaged"):
            Profile.load(tmp_path / "w")


def test_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, other = make_profile(1), make_profile(2)
    made.save(tmp_path / "p")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for failing in (interrupted, full):
        with monkeypatch.context() as patch:
            patch.setattr(profiles, "describe_files", failing)
            with pytest.raises((KeyboardInterrupt, OperError)):
                other.save(tmp_path / "p", overwrite=True)
        assert [p.name for p in tmp_path.iterdir()] == ["p"]
        same(Profile.load(tmp_path / "p", check=True), made)


def test_full_disk_shows_before_counters_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with (
        pytest.raises(OperError, match="No space left"),
        atomic_folder(tmp_path / "p", profiles.FORMAT) as folder,
    ):
        new_counters(10, np.uint32, folder, "accesses.npy")
    assert not list(tmp_path.iterdir())


def test_one_table_of_one_row(tmp_path: Path) -> None:
    made = Profile((Table("t", 1),), 5, np.array([5], np.uint32), np.zeros(0, np.uint32), (False,))
    made.save(tmp_path / "p")
    same(Profile.load(tmp_path / "p"), made)
