"""Parts of a log: the rows, batches and columns that options choose."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.logs import Batch, Log, LogOptions, RowReader, open_log, prepare
from tests.support.log_contents import everything, within_a_function


def numbered(folder: Path, *sizes: int) -> list[Path]:
    """Files whose samples are numbered through."""
    paths, first = [], 0
    for index, size in enumerate(sizes):
        path = folder / f"part_{index}.parquet"
        table = {"label": np.ones(size), "c": np.arange(first, first + size), "x": np.ones(size)}
        pq.write_table(pa.table(table), path)
        paths.append(path)
        first += size
    return paths


@within_a_function
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(lambda s: sum(s) > 0),
    st.floats(0, 1, exclude_max=True),
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 7),
)
def test_rows_and_batches(
    tmp_path: Path, sizes: list[int], share: float, length: int, batch: int, exact: int
) -> None:
    paths, total = numbered(tmp_path, *sizes), sum(sizes)
    start = int(share * total)
    options = LogOptions(rows=f"{start}:{start + length}", batch_rows=batch)
    log = open_log(paths, options)
    expected = list(range(start, min(total, start + length)))
    assert log.samples == len(expected)
    batches = list(log.batches())
    assert max(b.samples for b in batches) <= batch
    assert everything(batches)["c"] == [[v] for v in expected]
    # Tables are sized by the whole log, whatever part is read.
    prepared = prepare(log)
    assert prepared.tables[0].rows == total
    whole: list[Batch] = list(RowReader(log, prepared).batches(exact))
    assert [b.samples for b in whole[:-1]] == [exact] * (len(whole) - 1)
    assert everything(whole)["c"] == [[v] for v in expected]
    assert all(b.dense is not None and b.dense.shape == (b.samples, 1) for b in whole)


@pytest.mark.parametrize("start", [5, 6, 30])
def test_rows_beyond_the_log(tmp_path: Path, start: int) -> None:
    log = open_log(numbered(tmp_path, 3, 2), LogOptions(rows=f"{start}:{start + 9}"))
    with pytest.raises(OperError, match=r"`rows`|rows="):
        list(log.batches())


@pytest.mark.parametrize(
    ("rows", "expected"),
    [("0:80%", range(8)), ("50%:", range(5, 10)), (":3", range(3)), ("2:4", range(2, 4))],
)
@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_percentages(tmp_path: Path, rows: str, expected: range, form: str) -> None:
    (path,) = numbered(tmp_path, 10)
    if form == "csv":
        pacsv.write_csv(pq.read_table(path), tmp_path / "log.csv")
        path = tmp_path / "log.csv"
    log = open_log(path, LogOptions(columns=("c",), rows=rows))
    assert everything(log.batches())["c"] == [[v] for v in expected]


@pytest.mark.parametrize("rows", ["5", "a:b", "5:2", "0:101%", "3:3", "-1:4", "0:0.5"])
def test_rows_that_are_none(tmp_path: Path, rows: str) -> None:
    with pytest.raises(OperError, match=r"`rows`|rows="):
        list(open_log(numbered(tmp_path, 10), LogOptions(rows=rows)).batches())


@pytest.mark.parametrize(
    ("options", "features", "dense"),
    [
        (LogOptions(), ("a", "b2", "b10"), ("x",)),
        (LogOptions(columns=("b*",)), ("b2", "b10"), ("x",)),
        (LogOptions(columns=("b1?", "a")), ("a", "b10"), ("x",)),
        (LogOptions(dense=("a", "x")), ("b2", "b10"), ("a", "x")),
        (LogOptions(dense=()), ("a", "b2", "b10"), ()),
        (LogOptions(label="b2"), ("label", "a", "b10"), ("x",)),
        (LogOptions(time="a"), ("b2", "b10"), ("x",)),
    ],
)
@pytest.mark.parametrize("write", [pq.write_table, pacsv.write_csv])
def test_which_columns(
    tmp_path: Path,
    options: LogOptions,
    features: tuple[str, ...],
    dense: tuple[str, ...],
    write: Callable[..., None],
) -> None:
    table = {"label": [1], "a": [1], "x": [0.5], "b2": [3], "b10": [4]}
    write(pa.table(table), str(tmp_path / "log"))
    log = open_log(tmp_path / "log", options)
    assert (log.features, log.dense) == (features, dense)


@pytest.mark.parametrize(
    "column",
    [
        [10.0, 86_410.0],
        pa.array([10, 86_410], pa.timestamp("s")),
        pa.array([10, 86_410]),
        ["1970-01-01 00:00:10", "1970-01-02 00:00:10"],
    ],
)
@pytest.mark.parametrize("write", [pq.write_table, pacsv.write_csv])
def test_times(tmp_path: Path, column: Any, write: Callable[..., None]) -> None:
    write(pa.table({"when": column, "c": [1, 2]}), str(tmp_path / "log"))
    log = open_log(tmp_path / "log", LogOptions(columns=("c",), time="when"))
    (batch,) = log.batches()
    assert batch.time is not None
    assert batch.time.tolist() == [10.0, 86_410.0]


def test_ids_only_reads_nothing_else(tmp_path: Path) -> None:
    (batch,) = open_log(numbered(tmp_path, 3)).batches(ids_only=True)
    assert batch.label is None
    assert batch.dense is None
    assert isinstance(open_log(numbered(tmp_path, 3)), Log)
