"""Windows by a time column: units of numbers, their guess, and too many windows."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from oper.base.errors import OperError
from oper.logs import LogOptions, RowReader, open_log, prepare
from oper.logs.batches.log_options import TimeUnit
from oper.logs.batches.timestamps import PER_SECOND, date_text
from oper.profiling.counting import CountOptions, count
from oper.profiling.profile import Profile
from oper.profiling.windows import EqualWindows, TimeWindows, find_time_windows
from tests.support.commands import oper, tree

DAY = 86_400
FIRST = 18_518  # 2020-09-13
UNITS: list[TimeUnit] = ["s", "ms", "us", "ns"]


def write(path: Path, times: Any) -> Path:
    table = pa.table({"ts": times, "f": np.arange(len(times)) % 5})
    (pq.write_table if path.suffix == ".parquet" else pacsv.write_csv)(table, str(path))
    return path


def spread(days: int = 3, samples: int = 30) -> np.ndarray:
    """Seconds in order, the last one of a day and the first one of the next among them."""
    return FIRST * DAY + np.sort(np.r_[np.arange(samples) * days * DAY // samples, DAY - 1, DAY])


def said_of(*arguments: object) -> tuple[dict[str, Any], str]:
    said = oper("profile", *arguments, "--by-column", "ts", "--columns", "f", "--json")
    assert said.status == 0, said
    return json.loads(said.out), said.errors


@pytest.mark.parametrize(
    ("name", "kind"),
    [("log.parquet", np.int64), ("log.parquet", np.float64), ("log.csv", np.int64)],
)
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("stated", [False, True])
def test_numbers_of_every_unit_make_the_same_windows(
    tmp_path: Path, name: str, kind: type, unit: TimeUnit, stated: bool
) -> None:
    scale = PER_SECOND[unit]
    log = write(tmp_path / name, (spread() * scale).astype(kind))
    more = ("--time-unit", unit) if stated else ()
    content, errors = said_of(log, "-o", tmp_path / "p", "--every", "1d", *more)
    assert [w["samples"] for w in content["windows"]] == [11, 11, 10]
    for number, window in enumerate(content["windows"]):
        assert window["from"] == f"2020-09-{13 + number}T00:00:00+00:00"
        assert window["to"] == f"2020-09-{14 + number}T00:00:00+00:00"
        assert window["from_value"] == (FIRST + number) * DAY * scale
        assert window["to_value"] == (FIRST + number + 1) * DAY * scale
    names = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
    if stated:
        assert errors == ""
    else:
        assert errors.count("\n") == 1
        assert errors.startswith("ts: numbers around 1.6e")
        assert f"are read as {names[unit]} since 1970, the first one as 2020-09-13" in errors
        assert "choose another unit with --time-unit" in errors
    shown = oper("profiles", "show", tmp_path / "p").out
    assert "2020-09-15T00:00:00+00:00" in shown


def test_what_was_guessed_is_kept(tmp_path: Path) -> None:
    log = write(tmp_path / "log.parquet", spread() * 1000)
    said_of(log, "-o", tmp_path / "p")
    for part in Profile.load_windows(str(tmp_path / "p")):
        assert part.source["options"]["time_unit"] == "ms"


@pytest.mark.parametrize("end", [DAY * 10**9 - 1, DAY * 10**9])
@pytest.mark.parametrize(
    ("name", "stamped"),  # texts of timestamps go to microseconds
    [("log.parquet", False), ("log.parquet", True), ("log.csv", False)],
)
def test_the_last_nanosecond_of_a_day(tmp_path: Path, end: int, stamped: bool, name: str) -> None:
    times = pa.array(np.array([0, end]) + FIRST * DAY * 10**9)
    log = write(tmp_path / name, times.cast(pa.timestamp("ns")) if stamped else times)
    content, _ = said_of(log, "-o", tmp_path / "p")
    assert len(content["windows"]) == (1 if end < DAY * 10**9 else 2)


@pytest.mark.parametrize(
    "times",
    [
        pa.array(spread()).cast(pa.timestamp("s")),
        pa.array(spread() * 1000).cast(pa.timestamp("ms")),
        pa.array(spread() * 10**6).cast(pa.timestamp("us", "Europe/Berlin")),
        pa.array(spread() * 10**9).cast(pa.timestamp("ns")),
        pa.array([date_text(float(t)) for t in spread()]),  # with a zone
        pa.array([str(date_text(float(t)))[:19] for t in spread()]).dictionary_encode(),
    ],
    ids=lambda times: str(times.type),
)
def test_timestamps_need_no_unit(tmp_path: Path, times: Any) -> None:
    log = write(tmp_path / "log.parquet", times)
    content, errors = said_of(log, "-o", tmp_path / "p")
    assert [w["samples"] for w in content["windows"]] == [11, 11, 10]
    assert content["windows"][0]["from"] == "2020-09-13T00:00:00+00:00"
    assert errors == ""
    again, errors = said_of(log, "-o", tmp_path / "q", "--time-unit", "ms")
    assert again["windows"] == content["windows"]
    assert errors == "--time-unit ms: has no effect, as column 'ts' holds times\n"


def test_dates_are_days(tmp_path: Path) -> None:
    for kind in (pa.date32(), pa.date64()):
        dates = pa.array(np.array([FIRST, FIRST + 1, -3], np.int32)).cast(pa.date32()).cast(kind)
        content, _ = said_of(write(tmp_path / "l.parquet", dates), "-o", tmp_path / str(kind))
        starts = [w["from"][:10] for w in content["windows"]]
        assert starts == ["1969-12-29", "2020-09-13", "2020-09-14"]


def test_plain_numbers_have_plain_windows(tmp_path: Path) -> None:
    log = write(tmp_path / "log.parquet", np.array([-7, 0, 9, 10, 25, 25]))
    content, errors = said_of(log, "-o", tmp_path / "p", "--every", "10")
    bounds = [(w["from_value"], w["to_value"], w["samples"]) for w in content["windows"]]
    assert bounds == [(-10, 0, 1), (0, 10, 2), (10, 20, 1), (20, 30, 2)]
    assert all("from" not in w for w in content["windows"])
    assert errors == ""
    content, errors = said_of(log, "-o", tmp_path / "q", "--every", "10s", "--time-unit", "s")
    assert content["windows"][0]["from"] == "1969-12-31T23:59:50+00:00"
    assert [w["samples"] for w in content["windows"]] == [1, 2, 1, 2]


GOOD = spread() * 1000


@pytest.mark.parametrize(
    ("times", "options", "words"),
    [
        (np.arange(10), "", ["--every 1d", "'ts'", "from 0 to 9", "--time-unit s, ms, us or ns"]),
        (np.arange(10) - 20_000, "", ["from -20,000 to -19,991", "own unit"]),
        (np.r_[20200913:20200923], "", ["20,200,913", "not dates from 1990"]),
        (np.r_[GOOD, 0], "", ["row 32: column 'ts' is 0", "milliseconds", "--time-unit ms"]),
        (np.r_[GOOD, -1, GOOD], "", ["row 32: column 'ts' is -1", "--time-unit ms"]),
        (np.r_[GOOD, GOOD[:3] // 1000], "", ["row 32: column 'ts' is 1,599,955,200"]),
        (GOOD, "--time-unit s", ["row 0", "years 1 to 9999 as seconds", "--time-unit ms would"]),
        (GOOD, "--time-unit h", ["--time-unit 'h'", "s, ms, us or ns"]),
        (GOOD, "--every 1m --max-windows 20", ["more than 20 windows", "2020-09-13", "allow more"]),
        (GOOD, "--every 1s --max-windows 30", ["--by-column ts --every 1s", "30 windows"]),
        (np.arange(1001) * 10, "--every 10", ["more than 1,000 windows from 0 to 10,000"]),
        (pa.array([*GOOD, None]), "", ["row 32: column 'ts' has no time"]),
        (np.r_[GOOD.astype(float), np.nan], "", ["row 32: column 'ts' has no time"]),
        (np.r_[GOOD.astype(float), np.inf], "", ["row 32: column 'ts' has no time"]),
        (pa.array(["2020-09-13"] * 3 + ["soon"]), "", ["'ts'", "cannot be read as times"]),
        (
            pa.array(GOOD).cast(pa.duration("ms")),
            "",
            ["got duration[ms] that cannot be read as times"],
        ),
    ],
)
def test_columns_that_cannot_be_cut(
    tmp_path: Path, times: Any, options: str, words: list[str]
) -> None:
    log = write(tmp_path / "log.parquet", times)
    before = tree(tmp_path)
    command = ("profile", log, "-o", tmp_path / "p", "--by-column", "ts", "--columns", "f")
    said = oper(*command, *options.split())
    assert said.status == 2, said
    assert said.errors.splitlines()[-1].startswith("error: ")
    for word in words:
        assert word in said.errors, said.errors
    assert tree(tmp_path) == before


def test_the_look_is_before_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("the log was counted, or its tables were sought")

    monkeypatch.setattr("oper.profiling.make_profile.count", never)
    monkeypatch.setattr("oper.profiling.table_options.TableOptions.prepare", never)
    log = write(tmp_path / "log.parquet", GOOD)
    arguments = ("--by-column", "ts", "--every", "1s", "--max-windows", "5", "--columns", "f")
    said = oper("profile", log, "-o", tmp_path / "p", *arguments)
    assert said.status == 2
    assert "more than 5 windows" in said.errors


def test_texts_that_turn_from_numbers_to_dates(tmp_path: Path) -> None:
    """Each file is one form by itself."""
    write(tmp_path / "1.csv", spread())
    write(tmp_path / "2.csv", pa.array(["2020-09-13 00:00:00"]))
    said = oper(
        *("profile", tmp_path / "1.csv", tmp_path / "2.csv", "-o", tmp_path / "p"),
        *("--by-column", "ts", "--columns", "f"),
    )
    assert said.status == 2
    assert "2.csv, line 2: from here on column 'ts' holds times, and numbers before" in said.errors


def test_equal_windows_have_the_same_limit(tmp_path: Path) -> None:
    log = write(tmp_path / "log.parquet", np.arange(1200))
    command = ("profile", log, "-o", tmp_path / "p", "--columns", "f", "--windows", 1001)
    said = oper(*command)
    assert said.status == 2
    assert "--windows 1001: gives more than 1,000 windows" in said.errors
    assert "--max-windows" in said.errors
    assert oper(*command[:-1], 11, "--max-windows", 10).status == 2
    assert oper(*command[:-1], 11, "--max-windows", 11, "--json").status == 0
    said = oper("profile", log, "-o", tmp_path / "q", "--columns", "f", "--max-windows", 5)
    assert said.errors == "warning: --max-windows: has no effect without --windows\n"


def test_files_without_times_say_so(tmp_path: Path) -> None:
    np.savez(tmp_path / "log.npz", item=[1, 2], other=[1, 2], lengths=np.array([1, 1], np.int32))
    said = oper(
        *("profile", tmp_path / "log.npz", "-o", tmp_path / "p", "--by-column", "other"),
        *("--values", "item,other", "--lengths", "lengths,lengths"),
    )
    assert said.status == 2
    assert "cannot have times; CSV and Parquet files can" in said.errors


def test_from_python(tmp_path: Path) -> None:
    log = open_log(write(tmp_path / "log.parquet", GOOD), LogOptions(columns=("f",), time="ts"))
    with pytest.warns(UserWarning, match="read as milliseconds since 1970"):
        read, windows = find_time_windows(log, "1d")
    prepared = prepare(read)
    parts = count(RowReader(read, prepared), CountOptions(windows=windows))
    assert [p.samples for p in parts] == [11, 11, 10]
    assert parts[0].source["window"]["from"] == "2020-09-13T00:00:00+00:00"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, same = find_time_windows(log.in_unit("ms"), "1d")
    assert (again.options, same) == (read.options, windows)
    with pytest.raises(OperError, match="more than 2 windows from 2020-09-13"):
        find_time_windows(log.in_unit("ms"), "1d", 2)
    with pytest.raises(OperError, match="more than 2 windows"):
        count(RowReader(read, prepared), CountOptions(windows=windows, max_windows=2))
    with pytest.raises(OperError, match="windows=1001"):
        CountOptions(windows=EqualWindows(1001, 2000))
    with pytest.raises(OperError, match=r"expected times in column .*, got plain numbers"):
        count(RowReader(log, prepared), CountOptions(windows=TimeWindows("ts", DAY)))
    with pytest.raises(OperError, match="the name of a column of times"):
        find_time_windows(open_log(tmp_path / "log.parquet"), "1d")
    with pytest.raises(OperError, match="time_unit='days'"):
        LogOptions(time="ts", time_unit="days")  # type: ignore[arg-type]
