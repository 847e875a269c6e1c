"""Times are left out unless they are named; other columns that are hardly ids are warned of."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from oper.base.errors import OperNotice
from oper.logs import read
from oper.profiling.profile import Profile
from tests.support.commands import oper

SAMPLES = 20_000
RULES = [(), ("--ids", "dense"), ("--ids", "vocab"), ("--ids", "hash:100")]
random = np.random.default_rng(0)
seconds = 1_400_000_000 + random.integers(0, 9_000, SAMPLES) * 3_600
DOUBTFUL = {
    "large": (seconds, "in seconds since 1970"),
    "larger": (seconds * 1000 + 7, "in milliseconds since 1970"),
    "number": (np.arange(SAMPLES) + 5, "count up, from sample to sample"),
    "shuffled": (random.permutation(SAMPLES), "different"),
    "name": ([f"s{n}" for n in range(SAMPLES)], "different"),
}
in_order = np.cumsum(random.integers(0, 900, SAMPLES)) + 1_400_000_000_000
in_order[::500] -= 3_000  # a few come late
TIMES = {
    "x_ms": in_order,
    "c3": in_order * 1000 + random.integers(0, 999, SAMPLES),
    "ts": seconds,
    "event_time": seconds * 1000 + 7,
    "createdAt": seconds * 10**6,
    "timestamp_ns": seconds * 10**9,
    "time": np.where(np.arange(SAMPLES) % 9, seconds, 0),
    "x": [f"2024-01-{d % 28 + 1:02d} 10:00" for d in range(SAMPLES)],
    "y": [f"2024-01-{d % 28 + 1:02d}T10:00:00+01:00" for d in range(SAMPLES)],
    "date": [str(value) for value in seconds],
    "z": pa.array(seconds, pa.timestamp("s")),
}
PLAIN = {
    "ids": random.integers(0, 9_000, SAMPLES),
    "hashes": random.integers(0, 9_000, SAMPLES) * 477_218 % 2**32,
    "text": [f"t{n % 900}" for n in range(SAMPLES)],
    "years": 2000 + np.arange(SAMPLES) % 25,
    "hour": np.arange(SAMPLES) % 24,
    "time_of_day": np.arange(SAMPLES) % 8_640,
}


@pytest.mark.parametrize("name", DOUBTFUL)
@pytest.mark.parametrize("rule", RULES)
def test_columns_that_are_hardly_features(tmp_path: Path, name: str, rule: tuple[str, ...]) -> None:
    values, words = DOUBTFUL[name]
    said = profiled(tmp_path, {"user": PLAIN["ids"], name: values}, rule)
    if said.status == 2:  # too large a table, or texts as row numbers
        assert name in ("large", "larger", "name")
        assert rule in RULES[:2]
        return
    lines = [line for line in said.errors.splitlines() if line.startswith("warning: ")]
    assert len(lines) == 1, said.errors
    assert f"column {name!r}" in lines[0]
    assert words in lines[0] or "different" in lines[0]
    chosen = profiled(tmp_path, {"user": PLAIN["ids"], name: values}, (*rule, "--columns", "user"))
    assert (chosen.status, chosen.errors) == (0, "")


@pytest.mark.parametrize("rule", RULES[2:])
@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_columns_that_are_features(tmp_path: Path, rule: tuple[str, ...], form: str) -> None:
    said = profiled(tmp_path, PLAIN, rule, form)
    assert (said.status, said.errors) == (0, "")


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_times_are_left_out_unless_they_are_named(tmp_path: Path, name: str, form: str) -> None:
    columns = {"user": PLAIN["ids"], name: TIMES[name]}
    for rule in RULES:
        said = profiled(tmp_path, columns, rule, form)
        assert said.status == 0, said
        assert said.errors.startswith(f"left out: {name} (times")
        assert said.errors.count("\n") == 1
        assert [t.name for t in Profile.load(tmp_path / "p").tables] == ["user"]
    said = profiled(tmp_path, columns, ("--ids", "vocab", "--columns", f"user,{name}"), form)
    assert said.status == 0, said
    different = len(set(pa.array(TIMES[name]).to_pylist()))
    assert [t.rows for t in Profile.load(tmp_path / "p").tables][1] == 1 + different


def test_times_in_lists_and_in_small_logs(tmp_path: Path) -> None:
    columns = {
        "user": [1, 2, 3],
        "hist_ts": [[seconds[0]], [], list(seconds[:3])],
        "ts": [1.7e9] * 3,
    }
    said = profiled(tmp_path, columns, ())
    assert "left out: ts (numbers, double), hist_ts (times: first 4 values" in said.errors
    assert [t.name for t in Profile.load(tmp_path / "p").tables] == ["user"]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ts", np.arange(SAMPLES)),  # no dates
        ("ts", 1_400_000_000 + np.arange(SAMPLES)),  # dates, but they count up
        ("tweet_id", 1_500_000_000_000_000_000 + random.integers(0, 10**17, SAMPLES)),
        ("timeId", seconds),
        ("event_id", in_order),
        ("x", random.permutation(in_order)),
        ("x", 1_400_000_000_000 + np.arange(SAMPLES) * 10),  # counts up
        ("x", np.repeat(in_order[:400], 50)),  # few differ, as users in the order of their ids
        ("x", np.cumsum(random.integers(1, 9, SAMPLES)) + 1_400_000_000),
        ("x", in_order * 10**6),  # snowflake ids
        ("item", seconds),
        ("time", np.append(seconds[1:], 77)),  # one is no date
        ("time", [f"2024-01-{d % 28 + 1:02d} 10:00" for d in range(SAMPLES - 1)] + ["never"]),
    ],
)
def test_ids_like_times_are_kept(tmp_path: Path, name: str, values: Any) -> None:
    said = profiled(tmp_path, {"user": PLAIN["ids"], name: values}, ("--ids", "hash:100"))
    assert said.status == 0, said
    assert "left out" not in said.errors
    assert [t.name for t in Profile.load(tmp_path / "p").tables] == ["user", name]


def test_tables_and_arrays_name_their_times(tmp_path: Path) -> None:
    """A file of tables names its columns, as --columns does, and --values names arrays."""
    (tmp_path / "t.yaml").write_text("[{name: ts, rows: 100, dim: 4, ids: hash}]")
    said = profiled(
        tmp_path, {"user": PLAIN["ids"], "ts": seconds}, ("--tables", str(tmp_path / "t.yaml"))
    )
    assert (said.status, said.errors) == (0, "")
    np.savez(tmp_path / "log.npz", ts=seconds, lengths=np.ones(SAMPLES, np.int64))
    arrays = ("--values", "ts", "--lengths", "lengths", "--ids", "hash:100")
    said = oper("profile", tmp_path / "log.npz", "-o", tmp_path / "p", "--force", *arrays)
    assert said.status == 0, said
    assert "left out" not in said.errors


def test_a_log_of_times_alone(tmp_path: Path) -> None:
    said = profiled(tmp_path, {"ts": seconds}, ())
    assert said.status == 2
    assert "expected a column of ids, got only columns that are left out: ts (times" in said.errors
    assert "--columns" in said.errors


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_simulate_and_read_leave_times_out(tmp_path: Path, form: str) -> None:
    profiled(tmp_path, {"user": PLAIN["ids"], "ts": seconds}, (), form)
    run = ("--workers", "2", "--batch-size", "64", "--cache", "50%", "--policy", "random")
    said = oper("simulate", tmp_path / "log", *run)
    assert said.status == 0, said
    assert "left out: ts (times" in said.errors
    with pytest.warns(OperNotice, match="left out: ts"):
        assert list(next(read(tmp_path / "log")).features) == ["user"]


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_labels_and_fractions_are_left_out(tmp_path: Path, form: str) -> None:
    columns = {"user": [1, 2, 3], "label": [0, 1, 0], "price": [1.5, 2.0, 3.0]}
    profiled(tmp_path, columns, (), form)
    assert [t.name for t in Profile.load(tmp_path / "p").tables] == ["user"]


@pytest.mark.parametrize("rule", RULES[2:])
def test_few_of_a_large_dictionary_and_bags_of_dates(tmp_path: Path, rule: tuple[str, ...]) -> None:
    few = pa.DictionaryArray.from_arrays(
        pa.array(random.integers(0, 500, SAMPLES), pa.int32()),
        pa.array([f"n{n}" for n in range(100_000)]),
    )
    bags = pa.array([[f"2024-01-{d % 28 + 1:02d}", "2024-02-01"] for d in range(SAMPLES)])
    said = profiled(tmp_path, {"few": few, "visits": bags}, rule)
    assert (said.status, said.errors) == (0, "")


def profiled(folder: Path, columns: dict[str, Any], more: tuple[str, ...], form: str = "") -> Any:
    write = pacsv.write_csv if form == "csv" else pq.write_table
    write(pa.table(columns), folder / "log")
    return oper("profile", folder / "log", "-o", folder / "p", "--force", *more)
