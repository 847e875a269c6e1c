"""Folders are read whole, in the order of their keys by value and of their files' names."""

import gzip
from collections.abc import Iterable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.logs import LogOptions, open_log
from oper.logs.log_folder import files_in
from oper.profiling.profile import Profile
from tests.support.commands import oper

NULL = "__HIVE_DEFAULT_PARTITION__"


def write(path: Path, ids: Iterable[int], **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (pacsv.write_csv if path.suffix == ".csv" else pq.write_table)(
        pa.table({"a": list(ids), **more}), path
    )
    return path


def read_all(log: Any, name: str = "a", **options: Any) -> list[Any]:
    batches = open_log(log, LogOptions(**options)).batches()
    return [
        value for batch in batches for value in pa.array(batch.features[name].values).to_pylist()
    ]


def refused(log: Any, *words: str) -> None:
    with pytest.raises(OperError) as refusal:
        open_log(log)
    text = str(refusal.value)
    assert "\n" not in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    "names",
    [
        ["dt=9", "dt=10", "dt=11"],
        ["dt=2026-1-9", "dt=2026-1-10", "dt=2026-02-01"],
        ["dt=2026-01-09", "dt=2026-01-10"],
        ["dt=-10", "dt=-9", "dt=0.5", "dt=1.25", "dt=10"],
        [f"dt={NULL}", "dt=1", "dt=2"],
        ["dt=week 2", "dt=week 10"],
        ["dt=2026-01-01 09%3A00%3A00", "dt=2026-01-01 10%3A00%3A00"],
        ["dt=9/hour=2", "dt=9/hour=10", "dt=10/hour=1"],
        ["dt=A", "dt=B"],
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_partitions_are_read_in_the_order_of_their_keys(
    tmp_path: Path, names: list[str], suffix: str
) -> None:
    for number, name in reversed(list(enumerate(names))):
        write(tmp_path / name / f"part-10{suffix}", [2 * number + 1])
        write(tmp_path / name / f"part-2{suffix}", [2 * number])
    assert read_all(tmp_path) == list(range(2 * len(names)))
    said = oper("profile", tmp_path, "-o", tmp_path / ".p", "--json")
    assert said.status == 0, said
    assert Profile.load(tmp_path / ".p").samples == 2 * len(names)


@given(st.lists(st.integers(-(10**17), 10**17), min_size=1, max_size=8, unique=True))
def test_whole_numbers_are_ordered_as_such(
    tmp_path_factory: pytest.TempPathFactory, values: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("log")
    for value in values:
        (folder / f"k={value}").mkdir()
        (folder / f"k={value}" / "f").write_text("a")
    assert [file.keys["k"].value for file in files_in(folder)] == sorted(values)


@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=6, unique=True))
def test_texts_keep_their_value(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("log")
    for text in texts:
        name = "k=" + quote(text, safe="")
        (folder / name).mkdir()
        (folder / name / "f").write_text("a")
    found = [file.keys["k"].value for file in files_in(folder)]
    assert sorted(map(str, found)) == sorted(
        str(int(t)) if isinstance(found[0], int) else t for t in texts
    )


def test_what_pyarrow_writes(tmp_path: Path) -> None:
    days = [date(2026, 1, 1 + n % 3) for n in range(30)]
    table = pa.table({"a": range(30), "dt": days, "shop": [f"é/{n % 2}" for n in range(30)]})
    schema = pa.schema([("dt", pa.date32()), ("shop", pa.string())])
    form = ds.partitioning(schema, flavor="hive")
    ds.write_dataset(table, tmp_path / "log", format="parquet", partitioning=form)
    by_day = sorted(range(30), key=lambda n: (n % 3, n % 2))
    assert read_all(tmp_path / "log") == by_day
    assert read_all(tmp_path / "log", "shop", columns=("shop",)) == [f"é/{n % 2}" for n in by_day]


def test_keys_are_features_times_labels_and_numbers_if_they_are_named(tmp_path: Path) -> None:
    for day in (9, 10):
        for label in (0, 1):
            folder = tmp_path / f"dt=2026-1-{day}" / f"shop={day}" / f"label={label}"
            write(folder / "f.csv", [day, day], b=[0.5, label])
    log = open_log(tmp_path)
    assert log.features == ("a",)
    assert log.left_out == {
        "b": "'0.5' in line 2 is not a whole number",
        "dt": "a partition key",
        "shop": "a partition key",
        "label": "the label",
    }
    (first, *_, last) = log.batches()
    np.testing.assert_array_equal(first.label, [0, 0])
    np.testing.assert_array_equal(last.label, [1, 1])
    options = LogOptions(columns=("shop", "dt"), dense=("shop*", "b"), time="dt")
    with pytest.raises(OperError, match="both name shop"):
        open_log(tmp_path, options)
    options = LogOptions(columns=("dt", "a"), dense=("shop", "b"), time="dt")
    (first, *_, last) = open_log(tmp_path, options).batches()
    assert first.features["dt"].values.to_pylist() == ["2026-1-9"] * 2
    np.testing.assert_array_equal(first.dense, [[0.5, 9], [0, 9]])
    np.testing.assert_array_equal(last.time, [datetime(2026, 1, 10, tzinfo=UTC).timestamp()] * 2)
    assert not last.plain_time
    assert read_all(tmp_path, "shop", columns=("shop",)) == [9] * 4 + [10] * 4


@pytest.mark.parametrize(
    ("names", "spans"),
    [
        (["2026-01-09", "2026-01-10"], ["2026-01-09T00:00:00+00:00", "2026-01-10T00:00:00+00:00"]),
        (["20260109", "20260110"], ["2026-01-09T00:00:00+00:00", "2026-01-10T00:00:00+00:00"]),
        (["2026010923", "2026011000"], ["2026-01-09T00:00:00+00:00", "2026-01-10T00:00:00+00:00"]),
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_windows_by_a_key(tmp_path: Path, names: list[str], spans: list[str], suffix: str) -> None:
    for number, name in enumerate(names):
        write(tmp_path / "log" / f"dt={name}" / f"f{suffix}", range(3 + number))
    window = ("--by-column", "dt", "--every", "1d")
    said = oper("profile", tmp_path / "log", "-o", tmp_path / "p", *window)
    assert said.status == 0, said
    windows = Profile.load_windows(tmp_path / "p")
    assert [(w.samples, w.source["window"]["from"]) for w in windows] == list(
        zip((3, 4), spans, strict=True)
    )


def test_a_sample_without_a_date_is_refused_as_a_time(tmp_path: Path) -> None:
    write(tmp_path / "log" / "dt=2026-01-01" / "f.csv", [1])
    write(tmp_path / "log" / f"dt={NULL}" / "f.csv", [2])
    assert read_all(tmp_path / "log") == [2, 1]
    said = oper("profile", tmp_path / "log", "-o", tmp_path / "p", "--by-column", "dt")
    assert said.status == 2
    assert "has no time" in said.errors


def test_a_column_of_the_file_wins_over_the_key(tmp_path: Path) -> None:
    for day in (9, 10):
        write(tmp_path / f"dt={day}" / "f.parquet", [day], dt=[day + 1])
    assert read_all(tmp_path, "dt") == [10, 11]


def test_files_that_are_not_the_log(tmp_path: Path) -> None:
    write(tmp_path / "part-2.csv", [2])
    write(tmp_path / "part-10.csv", [10])
    markers = ("_SUCCESS", "_metadata", "_common_metadata", "_started_77", "_committed_77")
    for name in (*markers, ".part-2.csv.crc", "part.crc", ".x", "meta.json", "a.md", "b.yaml"):
        (tmp_path / name).write_text("nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "part-2.csv").write_text("a\n77\n")
    (tmp_path / "about").mkdir()
    (tmp_path / "about" / "README.md").write_text("words")
    assert read_all(tmp_path) == [2, 10]
    write(tmp_path / "_part.csv", [0])  # no marker: it is read, not left out in silence
    assert read_all(tmp_path) == [0, 2, 10]


def test_part_of_a_tree_is_never_counted(tmp_path: Path) -> None:
    write(tmp_path / "top.parquet", [1])
    below = write(tmp_path / "january" / "deep" / "f.parquet", [2])
    refused(tmp_path, str(tmp_path / "january"), str(below), "KEY=VALUE", "one by one")
    (tmp_path / "january").rename(tmp_path / "dt=1")
    refused(tmp_path, str(tmp_path / "dt=1" / "deep"))


def test_keys_must_agree(tmp_path: Path) -> None:
    write(tmp_path / "dt=1" / "f.csv", [1])
    write(tmp_path / "day=2" / "f.csv", [1])
    refused(tmp_path, "same partition keys", "day for", "day=2/f.csv", "dt for", "dt=1/f.csv")
    (tmp_path / "day=2" / "f.csv").rename(tmp_path / "f.csv")
    refused(tmp_path, "none for", "dt for")
    write(tmp_path / "twice" / "a=1" / "a=2" / "f.csv", [1])
    refused(tmp_path / "twice", "a, a", "rename")


def test_formats_are_not_mixed(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a.csv", [1]), write(tmp_path / "b.parquet", [1])
    refused(tmp_path, "one format", str(one), str(two))
    assert read_all([one, two]) == [1, 1]
    (tmp_path / "c.csv").write_bytes(gzip.compress(one.read_bytes()))
    two.unlink()
    assert read_all(tmp_path) == [1, 1]


@pytest.mark.parametrize(
    ("marker", "name"),
    [
        ("_delta_log/00.json", "Delta Lake"),
        ("metadata/v1.metadata.json", "Apache Iceberg"),
        (".hoodie/hoodie.properties", "Apache Hudi"),
        ("_spark_metadata/0", "structured streaming"),
    ],
)
def test_tables_with_metadata_are_refused(tmp_path: Path, marker: str, name: str) -> None:
    data = write(tmp_path / "t" / "data" / "dt=1" / "f.parquet", [1])
    (tmp_path / "t" / marker).parent.mkdir(parents=True)
    (tmp_path / "t" / marker).write_text("{}")
    for folder in (tmp_path / "t", tmp_path / "t" / "data", data.parent):
        refused(folder, str(folder), name, "as Parquet")
    (tmp_path / "days").mkdir()
    (tmp_path / "t").rename(tmp_path / "days" / "dt=1")
    refused(tmp_path / "days", name)
    assert read_all(tmp_path / "days" / "dt=1" / "data" / "dt=1" / "f.parquet") == [1]


def test_links(tmp_path: Path) -> None:
    write(tmp_path / "log" / "dt=1" / "f.csv", [1])
    (tmp_path / "log" / "dt=1" / "dt=2").symlink_to(tmp_path / "log")
    refused(tmp_path / "log", "dt=2", "link to a folder above")
    (tmp_path / "log" / "dt=1" / "dt=2").unlink()
    write(tmp_path / "other" / "f.csv", [2])
    (tmp_path / "log" / "dt=0").symlink_to(tmp_path / "other")
    assert read_all(tmp_path / "log") == [2, 1]
    (tmp_path / "log" / "more").symlink_to(tmp_path / "other")
    refused(tmp_path / "log", "more", "one by one")


def test_folders_far_below(tmp_path: Path) -> None:
    write(tmp_path / "log" / Path(*(f"k{n}=1" for n in range(65))) / "f.csv", [1])
    refused(tmp_path / "log", "at most 64 partition keys")


def test_a_key_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "k=\udcff").mkdir()
    (tmp_path / "k=\udcff" / "f.csv").write_text("a\n1\n")
    refused(tmp_path, "udcff", "UTF-8")


def test_a_part_of_the_files_keeps_their_keys(tmp_path: Path) -> None:
    """Ranks that torchrun started count a part of the files each."""
    for day in range(8, 12):
        write(tmp_path / f"day={day}" / "f.csv", [1])
    log = open_log(tmp_path, LogOptions(columns=("day",)))
    found = [b.features["day"].values.tolist() for b in log.part(1, 2).batches()]
    assert found == [[9], [11]]


def test_numbers_of_other_scripts_in_names(tmp_path: Path) -> None:
    for name in ("²", "²2", "x²10.csv", "１"):
        write(tmp_path / f"{name}.csv", [1])
    assert read_all(tmp_path) == [1] * 4


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_are_read_by_name(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"f1{suffix}", [1, 2], b=[7, 8], x=[0.5, 1.5], y=[2.5, 3.5])
    table = pa.table({"y": [9.5], "b": [70], "x": [8.5], "a": [10]})
    (pacsv.write_csv if suffix == ".csv" else pq.write_table)(table, tmp_path / f"f2{suffix}")
    assert (read_all(tmp_path), read_all(tmp_path, "b")) == ([1, 2, 10], [7, 8, 70])
    dense = np.concatenate([np.asarray(batch.dense) for batch in open_log(tmp_path).batches()])
    np.testing.assert_array_equal(dense, [[0.5, 2.5], [1.5, 3.5], [8.5, 9.5]])


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        (pa.array([1, 2], pa.int32()), pa.array([3], pa.int64()), [1, 2, 3]),
        (pa.array([1, 2]), pa.array(["3"]), [1, 2, 3]),
        (pa.array(["1", "2"]), pa.array([3]), [1, 2, 3]),
        (pa.array([1, 2]), pa.array([3], pa.uint64()), [1, 2, 3]),
    ],
)
def test_types_that_differ_between_files(
    tmp_path: Path, first: Any, second: Any, rows: list[int]
) -> None:
    write(tmp_path / "f1.parquet", first)
    pq.write_table(pa.table({"a": first}), tmp_path / "f1.parquet")
    pq.write_table(pa.table({"a": second}), tmp_path / "f2.parquet")
    assert read_all(tmp_path) == rows


def test_integers_then_texts_share_a_vocabulary(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [5, 6, 5]}), tmp_path / "f1.parquet")
    pq.write_table(pa.table({"a": ["5", "x"]}), tmp_path / "f2.parquet")
    said = oper("profile", tmp_path, "-o", tmp_path / ".p")
    assert said.status == 0, said
    assert Profile.load(tmp_path / ".p").accesses.tolist() == [0, 3, 1, 1]


def test_lists_in_a_later_file_make_bags(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "f1.parquet")
    pq.write_table(pa.table({"a": [[1, 1, 2], []]}), tmp_path / "f2.parquet")
    assert open_log(tmp_path).bags == {"a"}
    said = oper("profile", tmp_path, "-o", tmp_path / ".p")
    assert said.status == 0, said
    profile = Profile.load(tmp_path / ".p")
    assert profile.accesses.tolist() == [0, 3, 2]
    assert profile.table_samples_with_row(0).tolist() == [0, 2, 2]


def test_a_column_that_lacks_or_changes_its_kind_names_both_files(tmp_path: Path) -> None:
    one = write(tmp_path / "f1.parquet", [1], b=[1])
    two = write(tmp_path / "f2.parquet", [1])
    refused(tmp_path, str(one), str(two), "b fewer")
    two = write(tmp_path / "f2.parquet", [1], b=[1.5])
    refused(tmp_path, str(one), str(two), "column 'b': numbers, double here, ids there")
