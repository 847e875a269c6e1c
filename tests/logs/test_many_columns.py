"""Logs of very many columns: the time follows their number, not its square."""

import time
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from oper.logs import LogOptions, RowReader, open_log, prepare
from oper.logs.vocabulary import file_names
from oper.profiling.counting import count


def seconds(folder: Path, columns: int, kind: str) -> float:
    """Return the seconds of this process for a log's profile."""
    names = [f"c{i}" for i in range(columns)]
    table = pa.table({name: [3] for name in names})
    if kind == "csv":
        pacsv.write_csv(table, folder / "log")
    else:
        pq.write_table(table, folder / "log")
    started = time.process_time()
    log = open_log(folder / "log", LogOptions(columns=tuple(names)))
    prepared = prepare(log)
    reader = RowReader(log, prepared)
    assert count(reader, prepared=prepared)[0].rows == 4 * columns
    assert len(reader.bagged) == len(file_names(names)) == columns
    return time.process_time() - started


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_time_is_linear_in_columns(tmp_path: Path, kind: str) -> None:
    seconds(tmp_path, 100, kind)  # what is done once
    few, many = (seconds(tmp_path, columns, kind) for columns in (1_000, 8_000))
    assert many < 24 * few  # 8 times, and not 64
