"""Columns of Arrow's types: read as ids, or left out by name, and never the end of a run."""

import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oper.base.errors import OperError
from oper.logs import LogOptions, open_log
from tests.support.commands import oper

DAYS = pa.array([0, 1, 1], pa.date32())
UNSUPPORTED = {
    "fixed-size binary": pa.array([b"abcd"] * 3, pa.binary(4)),
    "map": pa.array([[("k", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
    "struct": pa.array([{"a": 1}] * 3),
    "duration": pa.array([1, 2, 3], pa.duration("s")),
    "time of day": pa.array([1, 2, 3], pa.time64("us")),
    "lists of lists": pa.array([[[1]]] * 3),
    "lists of fixed-size binary": pa.array([[b"abcd"]] * 3, pa.list_(pa.binary(4))),
    "lists of durations": pa.array([[1]] * 3, pa.list_(pa.duration("s"))),
    "uuid": pa.array([uuid.UUID(int=n).bytes for n in range(3)], pa.uuid()),
    "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"] * 3)),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, 1], pa.int8())),
    "dictionary of binary": pa.array([b"abcd"] * 3, pa.binary(4)).dictionary_encode(),
    "bytes": pa.array([b"\xff\xfe"] * 3),
    "large bytes": pa.array([b"\xff\xfe"] * 3, pa.large_binary()),
    "dictionary of bytes": pa.array([b"\xff"] * 3).dictionary_encode(),
    "lists of bytes": pa.array([[b"\xff"]] * 3),
    "a.b": pa.array([b"\xff"] * 3),
}
IDS = {
    "string view": (pa.array(["7", "8", "7"], pa.string_view()), [7, 8, 7]),
    "large string": (pa.array(["7", "8", "7"], pa.large_string()), [7, 8, 7]),
    "binary": (pa.array([b"x", b"8", b"x"]), ["x", "8", "x"]),
    "large binary": (pa.array([b"x", b"8", b"x"], pa.large_binary()), ["x", "8", "x"]),
    "binary view": (pa.array([b"x", b"8", b"x"], pa.binary_view()), ["x", "8", "x"]),
    "dictionary": (pa.array(["x", "8", "x"]).dictionary_encode(), ["x", "8", "x"]),
    "list view": (pa.array([[7], [8, 9], []], pa.list_view(pa.int64())), [7, 8, 9]),
    "fixed-size list": (
        pa.array([[7, 8]] * 2 + [[9, 9]], pa.list_(pa.int8(), 2)),
        [7, 8, 7, 8, 9, 9],
    ),
    "lists of dictionaries": (
        pa.array([["x"], ["y"], []], pa.list_(pa.dictionary(pa.int32(), pa.string()))),
        ["x", "y"],
    ),
    "boolean": (pa.array([True, False, None]), [1, 0]),
    "nothing": (pa.nulls(3), []),
}


def written(folder: Path, name: str, column: Any) -> Path:
    pq.write_table(pa.table({"user": [1, 2, 3], name: column}), folder / "log")
    return folder / "log"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_types_are_left_out_by_name(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, name, UNSUPPORTED[name])
    said = oper("profile", path, "-o", tmp_path / "p")
    assert said.status == 0, said
    assert said.errors.startswith(f"left out: {name} (")
    assert said.errors.count("\n") == 1
    named = oper("profile", path, "-o", tmp_path / "q", "--columns", name)
    assert named.status == 2
    assert f"in column {name!r}, got " in named.errors
    assert "leave it out with --columns, or write it as" in named.errors
    assert "damaged" not in named.errors
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("name", IDS)
def test_types_of_ids(tmp_path: Path, name: str) -> None:
    column, expected = IDS[name]
    log = open_log(written(tmp_path, name, column))
    assert log.features == ("user", name)
    (batch,) = log.batches()
    assert pa.array(batch.features[name].values).to_pylist() == expected


@pytest.mark.parametrize("column", [DAYS, DAYS.cast(pa.timestamp("ms"))])
def test_dates_are_ids_if_they_are_named(tmp_path: Path, column: Any) -> None:
    path = written(tmp_path, "day", column)
    assert list(open_log(path).left_out) == ["day"]
    (batch,) = open_log(path, LogOptions(columns=("day",))).batches()
    assert [v[:10] for v in batch.features["day"].values.to_pylist()] == [
        "1970-01-01",
        "1970-01-02",
        "1970-01-02",
    ]


def test_bytes_that_end_as_texts_begin(tmp_path: Path) -> None:
    """Only the first values are looked at, so the error of a later one says what to do."""
    path = tmp_path / "log"
    pq.write_table(pa.table({"a": [b"x"] * 2_000 + [b"\xff"]}), path)
    with pytest.raises(OperError, match="'a', got binary that is not; leave it out"):
        list(open_log(path).batches())
