"""`oper plan check` with a log reads the part of it that the plan's profile counted."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.checker.replay import LogPart
from oper.logs.batches.batch import Batch, Location
from oper.logs.batches.log_options import TimeUnit
from oper.plan.plan import Plan
from oper.profiling.windows import TimeWindows
from tests.support.commands import fine, oper, write_log
from tests.support.examples import examples

# Options of the profile, which of its windows, and what the part is called.
PARTS = {
    "rows": (("--rows", "100:250"), "", "samples 100:250"),
    "percentage": (("--rows", "50%:"), "", "samples 50%:"),
    "window": (("--windows", "4"), "@2", "from sample 300 to 450"),
    "uneven windows": (("--windows", "7"), "@3", "the window from sample"),
    "rows and window": (("--rows", "100:", "--windows", "2"), "@1", "samples 100:, the window"),
    "seconds": (("--by-column", "day", "--every", "1d", "--time-unit", "s"), "@4", "of day from"),
    "milliseconds": (("--by-column", "ms", "--every", "12h"), "@3", "of ms from 2024-01-0"),
    "times": (("--by-column", "at", "--every", "0.7d"), "@2", "of at from 2024-01-0"),
    "part of a second": (("--by-column", "tenths", "--every", "0.1"), "@7", "of tenths from 2024"),
    "a fraction": (("--by-column", "fractions", "--every", "0.3"), "@99", "of fractions from 2"),
    "plain": (("--by-column", "step", "--every", "70"), "@5", "of step from 350"),
    "sample": (("--sample", "30%"), "", "a sample of 30%"),
    "sampled rows": (("--rows", ":400", "--sample", "50%", "--seed", "3"), "", "a sample of 50%"),
    "window of a sample": (("--windows", "4", "--sample", "50%"), "@3", "a sample of 50%"),
    "sum of a part": (("--rows", "0:50%", "--windows", "4"), "", "samples 0:50%"),
    "sum of a sample": (("--windows", "4", "--sample", "50%"), "", "a sample of 50%"),
    "sum of both": (
        ("--rows", ":400", "--by-column", "step", "--every", "70", "--sample", "50%"),
        "", "samples :400, a sample of 50%",
    ),
    "span of a sample": (
        ("--by-column", "step", "--every", "70", "--sample", "50%"), "@5", "a sample of 50%"
    ),
}  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "plain.parquet")
    table = pq.read_table(tmp_path / "plain.parquet")
    seconds = 1_704_067_200 + np.arange(600) * 900
    more = {
        "ms": seconds * 1000 + 7,
        "tenths": seconds[0] * 1000 + np.arange(600) * 100,
        "fractions": np.round(np.arange(600) * 0.1, 1),
        "at": pa.array(seconds * 1000, pa.timestamp("ms")),
        "step": np.arange(600),
    }
    for name, column in more.items():
        table = table.append_column(name, pa.array(column))
    pq.write_table(table, tmp_path / "log.parquet")
    return tmp_path


def plan(options: tuple[str, ...], window: str = "") -> None:
    fine("profile", "log.parquet", "-o", "p", "--columns", "C*", *options)
    fine("plan", f"p{window}", "-o", "q", "--topology", "cpu:2", "--batch-size", "64")


@pytest.mark.parametrize(("options", "window", "words"), PARTS.values(), ids=PARTS.keys())
def test_the_same_part_is_checked(
    here: Path, options: tuple[str, ...], window: str, words: str
) -> None:
    plan(options, window)
    part = Plan.load("q").log_part
    assert part
    said = json.loads(fine("plan", "check", "q", "log.parquet", "--json"))
    assert said["ok"]
    assert words in said["findings"][-1]["invariant"]
    assert max(map(len, fine("plan", "check", "q", "log.parquet").splitlines())) <= 100


def test_a_part_may_be_given(here: Path) -> None:
    plan(("--windows", "4"), "@2")
    fine("plan", "check", "q", "log.parquet", "--rows", "300:450")
    said = oper("plan", "check", "q", "log.parquet", "--rows", "301:450")
    assert said.status == 2
    assert "149 samples of --rows" in said.errors
    # As many samples of another part: only their rows tell.
    assert oper("plan", "check", "q", "log.parquet", "--rows", "0:150").status == 1


@pytest.mark.parametrize(("options", "window"), [((), ""), (("--windows", "2"), "@1")])
def test_another_log_is_called_so(here: Path, options: tuple[str, ...], window: str) -> None:
    plan(options, window)
    write_log(here / "other.parquet", samples=500)
    said = oper("plan", "check", "q", "other.parquet")
    assert said.status == 2
    assert "it is another log, or another part" in said.errors
    assert said.errors.count("\n") == 1


def test_plans_of_whole_logs_and_of_all_windows_have_no_part(here: Path) -> None:
    plan(("--windows", "3"))
    assert not json.loads(Path("q/plan.json").read_text())["log_part"]
    fine("plan", "check", "q", "log.parquet")


def test_a_replanned_plan_is_of_the_new_part(here: Path) -> None:
    plan(("--windows", "2"), "@0")
    fine("replan", "q", "p@1", "-o", "new")
    assert Plan.load("new").log_part["window"]["from_sample"] == 300
    fine("plan", "check", "new", "log.parquet")


@examples(100)
@given(
    every=st.one_of(st.sampled_from([0.1, 0.3, 1.0, 86_400.0]), st.floats(1e-3, 1e6)),
    unit=st.sampled_from(["s", "ms", "us", "ns"]),
    plain=st.booleans(),
    base=st.integers(-(10**6), 2 * 10**9),
    data=st.data(),
)
def test_windows_of_times_have_the_samples_that_were_counted(
    every: float, unit: TimeUnit, plain: bool, base: int, data: st.DataObject
) -> None:
    """Times at the bounds are those that rounding would put into another window."""
    steps = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=20))
    times = np.array([(base // every + step) * every for step in steps], dtype=np.float64)
    windows = TimeWindows("t", every, unit, plain)
    batch = Batch(len(times), {}, Location("log", 0, "row"), time=times, plain_time=plain)
    counted = windows.of(batch, 0)
    for number in np.unique(counted).tolist():
        told = json.loads(json.dumps({"window": windows.describe(number), "time_unit": unit}))
        expected = int((counted == number).sum())
        assert sum(b.samples for b in LogPart(told).batches([batch])) == expected


def test_plans_of_before_tell_windows_by_their_bounds() -> None:
    times = np.linspace(0, 9 * 43_200, 10, dtype=np.float64)
    batch = Batch(10, {}, Location("log", 0, "row"), time=times)
    window = {"column": "t", "from_value": 86_400_000.0, "to_value": 172_800_000.0}
    (part,) = LogPart({"window": window, "time_unit": "ms"}).batches([batch])
    assert part.time is not None
    assert part.time.tolist() == [86_400, 129_600]
    with pytest.raises(OperError, match="profile the log again"):
        list(LogPart({"window": {**window, "to_value": 86_400_000.0}}).batches([batch]))


def test_a_sum_of_profiles_says_that_its_parts_are_unknown(here: Path) -> None:
    fine("profile", "log.parquet", "-o", "p", "--columns", "C*", "--windows", "3")
    fine("profiles", "merge", "p@0", "p@2", "-o", "sum")
    fine("plan", "sum", "-o", "q", "--topology", "cpu:2", "--batch-size", "64")
    said = oper("plan", "check", "q", "log.parquet")
    assert said.status == 2
    assert "if its profile is a sum, the parts are not known" in said.errors
    assert said.errors.count("\n") == 1


def test_a_log_without_the_plans_columns_blames_no_option(here: Path) -> None:
    """Nobody has typed --columns; who has reads of it."""
    plan(())
    pq.write_table(pq.read_table("log.parquet").drop_columns(["C1"]), "other.parquet")
    said = oper("plan", "check", "q", "other.parquet")
    assert said.status == 2
    assert "other.parquet: has no column 'C1', which the plan's profile read" in said.errors
    assert "--" not in said.errors
    said = oper("plan", "check", "q", "other.parquet", "--columns", "nothing")
    assert "--columns 'nothing': matches no column" in said.errors


def test_ids_that_the_plans_log_cannot_have_are_another_logs(here: Path) -> None:
    """Nobody who checks a plan is to give its tables more rows."""
    plan(())
    table = pq.read_table("log.parquet")
    ids = table["C1"].to_numpy().copy()
    ids[-1] = 1 << 20
    pq.write_table(table.set_column(table.column_names.index("C1"), "C1", [ids]), "other.parquet")
    said = oper("plan", "check", "q", "other.parquet")
    assert said.status == 2
    assert "in column 'C1', as table" in said.errors
    assert "got 1048576; the log" in said.errors
    assert "the log of the plan's profile has no such ids: give that one" in said.errors
    assert "give the table at least" not in said.errors
