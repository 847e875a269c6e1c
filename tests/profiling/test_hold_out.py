"""`oper profile --hold-out`: the last part of a log is counted apart, and travels with the profile;
windows know the next and the previous one."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oper
from oper.base.errors import OperError, OperNotice
from oper.profiling.profile import Profile, merge
from tests.support.commands import fine, refused, tree, write_log
from tests.support.examples import examples


def counts(profile: Profile) -> tuple[int, list[int], list[int]]:
    return profile.samples, profile.accesses.tolist(), profile.samples_with_row.tolist()


@given(st.integers(2, 80), st.floats(0.02, 0.98), st.integers(0, 2**32 - 1))
@examples(20)
def test_both_parts_are_the_profiles_of_their_samples(
    tmp_path_factory: pytest.TempPathFactory, samples: int, share: float, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("log")
    random = np.random.default_rng(seed)
    bags = [random.integers(0, 9, random.integers(0, 4)).tolist() for _ in range(samples)]
    bags[0] = [8, 8]  # so that there are bags, and the largest id is known
    pq.write_table(
        pa.table({"a": bags, "b": random.integers(0, 5, samples)}), folder / "log.parquet"
    )
    last = round(share * samples)
    log = folder / "log.parquet"
    if not 0 < last < samples:
        with pytest.raises(OperError, match="leaves samples on both sides"):
            oper.profile(log, columns=("a", "b"), hold_out=share)
        return
    found = oper.profile(log, columns=("a", "b"), hold_out=share)
    first = samples - last
    expected = oper.profile(log, found, rows=f"0:{first}", columns=("a", "b"))
    assert counts(found) == counts(expected)
    assert found.digest == expected.digest
    later = oper.profile(log, found, rows=f"{first}:{samples}", columns=("a", "b"))
    assert found.following is not None
    assert counts(found.following) == counts(later)
    assert found.preceding is None


@pytest.mark.parametrize("limit", ["1GB", "1B"])  # the counters are in memory, or in files
def test_the_part_is_saved_with_the_profile_and_read_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(Path("log.parquet"))
    options = ("--columns", "C*", "--hold-out", "25%", "--memory-limit", limit)
    told = fine("profile", "log.parquet", "-o", "p", *options)
    assert [
        line.split()[:4] for line in told.splitlines() if line.startswith(("counted", "held"))
    ] == [
        ["counted", "0", "450", "450"],
        ["held", "out", "450", "600"],
    ]
    found = Profile.load("p")
    assert (found.samples, found.holds_out) == (450, True)
    assert found.following is not None
    assert found.following.samples == 150
    found.save("again")
    copied = Profile.load("again").following
    assert copied is not None
    assert counts(copied) == counts(found.following)
    one = found.select([1]).following
    assert one is not None
    assert [t.name for t in one.tables] == ["C2"]
    assert one.accesses.tolist() == found.following.table_accesses(1).tolist()
    fine("profile", "log.parquet", "-o", "p", "--force", *options)  # all files are oper's own
    assert not [name for name in tree(Path("p")) if "counted" in name or "window" in name]


def test_a_damaged_part_is_found_with_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(Path("log.parquet"))
    fine("profile", "log.parquet", "-o", "p", "--columns", "C*", "--hold-out", "25%")
    file = next(Path("p/held-out").glob("*.npy"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    refused("plan p --topology cpu:2 -o q", str(file), "SHA-256")


def test_windows_know_their_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(Path("log.parquet"))
    in_memory = oper.profile("log.parquet", None, "w", columns=("C*",), windows=3)
    on_disk = [Profile.load(f"w@{number}") for number in range(3)]
    for windows in (in_memory, on_disk):
        assert windows[0].preceding is None
        assert windows[2].following is None
        for earlier, later in itertools.pairwise(windows):
            assert earlier.following is not None
            assert later.preceding is not None
            assert counts(earlier.following) == counts(later)
            assert counts(later.preceding) == counts(earlier)
            assert not earlier.holds_out
    assert Profile.load("w").following is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--hold-out 20% --windows 2", ("--hold-out", "priced on the next one")),
        ("--hold-out 20% --by-column day", ("--hold-out", "priced on the next one")),
        ("--hold-out 0", ("--hold-out 0", "leaves samples on both sides")),
        ("--hold-out 100%", ("--hold-out 1", "600")),
        ("--hold-out much", ("--hold-out",)),
    ],
)
def test_what_cannot_be_held_out_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(Path("log.parquet"))
    refused(f"profile log.parquet -o p --columns C* {options}", *words)


def test_a_sum_says_that_it_has_no_held_out_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_log(Path("log.parquet"))
    for name, rows in (("a", "0:50%"), ("b", "50%:100%")):
        options = ("--columns", "C*", "--hold-out", "25%", "--rows", rows)
        fine("profile", "log.parquet", "-o", name, *options)
    with pytest.warns(OperNotice, match="held out .* not in the sum"):
        merged = merge([Profile.load("a"), Profile.load("b")])
    assert merged.samples == 450
    assert merged.following is None
