"""Columns that hold ids by default, and the warnings about doubtful columns."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperWarning
from oper.logs import LogOptions, open_log, prepare
from oper.profiling.profile import Profile
from oper.profiling.table_options import TableOptions
from oper.tables.table import Table
from tests.support.commands import oper
from tests.support.log_contents import within_a_function

whole_numbers = st.one_of(
    st.tuples(st.just(pa.int64()), st.lists(st.none() | st.integers(-(2**63), 2**63 - 1))),
    st.tuples(st.just(pa.uint64()), st.lists(st.none() | st.integers(0, 2**64 - 1))),
    st.tuples(st.just(pa.uint64()), st.lists(st.integers(2**64 - 9, 2**64 - 1))),
)
fractions = st.tuples(st.just(pa.float64()), st.lists(st.floats(-1e9, 1e9)))


@within_a_function
@given(whole_numbers | fractions)
def test_csv_and_parquet_have_the_same_ids(tmp_path: Path, column: tuple[Any, list[Any]]) -> None:
    kind, values = column
    table = pa.table({"a": [1] * (len(values) + 1), "b": pa.array([*values, 7], kind)})
    pq.write_table(table, tmp_path / "log.parquet")
    pacsv.write_csv(table, tmp_path / "log.csv")
    # Written without a point, 7.0 and 1e9 are whole numbers.
    written = any(set(".e") & set(f) for f in (tmp_path / "log.csv").read_text().split())
    logs = [open_log(tmp_path / name) for name in ("log.parquet", "log.csv")]
    if kind == pa.float64():
        assert (logs[0].features, list(logs[0].left_out)) == (("a",), ["b"])
        assert ("b" in logs[1].left_out) == written
    else:
        assert [(log.features, log.left_out) for log in logs] == [(("a", "b"), {})] * 2


POINTED = "{!r} in line {} is a whole number with a point; `columns` reads a column of such as ids"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (["1", "2", "2.5"], "'2.5' in line 5 is not a whole number"),
        (["1", "2.0", "3"], POINTED.format("2.0", 4)),
        (["1e+02", "7"], POINTED.format("1e+02", 3)),
        (["1", "1e3", "x"], ""),  # texts are ids
        (["1", str(2**64), "2"], f"'{2**64}' in line 4 is not a 64-bit number"),
        (["-9", str(2**63), "-1"], ""),
        ([str(-(2**63) - 1)], f"'{-(2**63) - 1}' in line 3 is not a 64-bit number"),
        (["", "NaN", "0.5"], "'0.5' in line 5 is not a whole number"),
        (["2020-01-01", "2020-01-02"], "times, date32[day]"),
    ],
)
def test_reasons_of_a_csv_file(tmp_path: Path, fields: list[str], reason: str) -> None:
    lines = "".join(f"{number},{field}\n" for number, field in enumerate(fields))
    (tmp_path / "log.csv").write_text(f"\na,b\n{lines}")
    assert open_log(tmp_path / "log.csv").left_out == ({"b": reason} if reason else {})


def test_what_an_option_names_is_not_left_out(tmp_path: Path) -> None:
    table = pa.table({"label": [1], "a": [1], "x": [0.5], "y": [0.5], "t": [1]})
    pq.write_table(table, tmp_path / "log")
    number = "numbers, double"
    for options, expected in [
        (LogOptions(), {"label": "the label", "x": number, "y": number}),
        (LogOptions(dense=("x",)), {"label": "the label", "y": number}),
        (LogOptions(label="label", time="t", dense=()), {"x": number, "y": number}),
        (LogOptions(columns=("a",)), {}),
    ]:
        assert open_log(tmp_path / "log", options).left_out == expected


def test_profile_names_what_it_leaves_out(tmp_path: Path) -> None:
    """A hundred thousand good lines before the bad one: all within the beginning that is read."""
    lines = "".join(f"{n % 7},{n % 5 if n < 99_999 else 2.5},0.5\n" for n in range(100_000))
    (tmp_path / "log.csv").write_text(f"a,b,c\n{lines}")
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p", "--json")
    assert said.status == 0, said
    first = [("b", "2.5", 100_001), ("c", "0.5", 2)]
    reasons = {
        name: f"{value!r} in line {line} is not a whole number" for name, value, line in first
    }
    assert said.errors == (
        f"left out: b ({reasons['b']}), c ({reasons['c']}); name the columns of ids with "
        "--columns\n"
    )
    assert json.loads(said.out)["left_out"] == reasons
    assert Profile.load(tmp_path / "p").source["left_out"] == reasons
    shown = oper("profiles", "show", tmp_path / "p", "--json")
    assert json.loads(shown.out)["left_out"] == reasons
    chosen = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "q", "--columns", "a", "--json")
    assert (chosen.errors, json.loads(chosen.out)["left_out"]) == ("", {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a;b\n1;2;3\n4\n", ["column 'a;b': is the only one", "--delimiter", "separated by ';'"]),
        ("a|b\n1\n", ["column 'a|b': is the only one", "separated by '|'"]),
        ("a,b\n1,3^4\n2,5^6\n", ["'b'", "'3^4'", "--list-separator '^'"]),
        ("a,b\n1,3\x1d4\n2,5\x1d6\n", ["'b'", "--list-separator '\\x1d'"]),
        ("a,b\n1,3\x024\n2,5\x026\n", ["'b'", "--list-separator '\\x02'"]),
        ("a,b\n1,3|4|5\n2,7\n3,8|9\n", ["'b'", "'3|4|5'", "--list-separator '|'"]),
        ("a,b\n1,x;y\n", ["'b'", "'x;y'", "--list-separator ';'"]),
        ("a,b\n1,3 4\n2,\n3,[5]\n", ["'b'", "'3 4'", "--list-separator ' '"]),
        ('a,b\n1,"[3, 4]"\n2,"5"\n', ["'b'", "'[3, 4]'", "--list-separator ,"]),
        ("a\n1\n", []),
        ("a,b\n1,New York\n2,Rome\n", []),
        ("a,b\n1,10 a\n2,3 4\n", []),
        ("a,b\n1,x\n2,y|z\n", []),
    ],
)
def test_wrong_separators_are_warned_of(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "log.csv").write_text(text)
    for more in ((), ("--columns", "*"), ("--ids", "hash:9")):
        said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p", "--force", *more)
        assert said.status == 0, said
        assert said.errors.count("\n") == bool(words), said
        assert all(word in said.errors for word in words), said


def test_bags_that_are_read_as_bags_are_not_warned_of(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b\n1,3|4|5\n2,7\n")
    log = ("profile", tmp_path / "log.csv")
    assert not oper(*log, "-o", tmp_path / "p", "--list-separator", "|").errors
    assert not oper(*log, "-o", tmp_path / "q", "--columns", "a").errors


@pytest.mark.parametrize("batch", [7, 1000])
@pytest.mark.parametrize(
    ("values", "value", "row"),
    [
        ([*range(50), 2**40, *range(49)], str(2**40), 50),
        ([*range(100), 2**64 - 1], str(2**64 - 1), 100),
    ],
)
def test_the_value_that_makes_a_vocabulary_is_named(
    tmp_path: Path, values: list[Any], value: str, row: int, batch: int
) -> None:
    kind = pa.uint64() if 2**64 - 1 in values else None
    pq.write_table(pa.table({"a": pa.array(values, kind)}), tmp_path / "log")
    # In a small batch it is alone among few; those before it count too.
    with pytest.warns(
        OperWarning, match=f"column 'a': {value} in .*log, row {row}, is not a row id"
    ):
        prepared = prepare(open_log(tmp_path / "log", LogOptions(("a",), batch_rows=batch)))
    assert prepared.tables[0].ids.kind == "vocab"


@pytest.mark.parametrize(
    "values", [["x", "y", "3"], [2**40, 2**41, 5], list(range(99)), ["1", "2", "x", "y"]]
)
def test_columns_of_texts_and_hashes_have_no_stray_value(tmp_path: Path, values: list[Any]) -> None:
    pq.write_table(pa.table({"a": values}), tmp_path / "log")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(open_log(tmp_path / "log"))


def test_a_negative_id_that_is_skipped_is_not_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [*range(50), -7, 2**40]}), tmp_path / "log")
    with pytest.warns(OperWarning, match=f"{2**40} in .*log, row 51"):
        prepare(open_log(tmp_path / "log", LogOptions(on_bad_id="skip")))


def test_a_late_fraction_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a\n" + "4\n" * 300_000 + "2.5\n")
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p", "--columns", "a")
    assert f"warning: column 'a': '2.5' in {tmp_path}/log.csv, line 300002, is" in said.errors
    assert said.errors.count("\n") == 1


@pytest.mark.parametrize(
    ("samples", "largest", "fits"),
    [(9, 2**24 - 1, True), (9, 2**24, False), (167_773, 2**24, True), (9, 1_700_000_000, False)],
)
@pytest.mark.parametrize("rule", [(), ("--ids", "dense")])
@pytest.mark.filterwarnings("ignore::oper.base.errors.OperWarning")
def test_huge_tables_of_columns_that_nobody_named(
    tmp_path: Path, samples: int, largest: int, fits: bool, rule: tuple[str, ...]
) -> None:
    columns = {"a": [1] * samples, "row": np.full(samples, largest)}
    pq.write_table(pa.table(columns), tmp_path / "log")
    kind = rule[-1] if rule else None
    stated = TableOptions(None, 4, "fp32", "none", kind, 1)
    if fits:
        assert stated.prepare(open_log(tmp_path / "log")).tables[1].rows == largest + 1
    else:
        said = oper("profile", tmp_path / "log", "-o", tmp_path / "p", *rule)
        assert said.status == 2
        assert f"log: column 'row' would be a table of {largest + 1:,} rows" in said.errors
        assert "--columns" in said.errors
        assert not (tmp_path / "p").exists()
    # Bags are columns of ids, and nothing else.
    pq.write_table(pa.table({"row": [[largest]] * samples}), tmp_path / "bags")
    named = open_log(tmp_path / "log", LogOptions(columns=("row",)))
    for log in (named, open_log(tmp_path / "bags")):
        with warnings.catch_warnings(record=True) as said_of:
            warnings.simplefilter("always")
            assert stated.prepare(log).tables[0].rows == largest + 1
        huge = [str(w.message) for w in said_of if "of counters" in str(w.message)]
        assert len(huge) == (not fits)
        assert all("ids='vocab'" in m and f"{largest + 1:,} rows" in m for m in huge)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_a_column_without_a_name_is_left_out(tmp_path: Path, form: str) -> None:
    write = pacsv.write_csv if form == "csv" else pq.write_table
    write(pa.table({"": [0, 1], "user": [5, 6]}), tmp_path / "log")
    said = oper("profile", tmp_path / "log", "-o", tmp_path / "p")
    assert said.status == 0, said
    assert "left out: '' (it has no name)" in said.errors
    assert [t.name for t in Profile.load(tmp_path / "p").tables] == ["user"]


def test_columns_of_one_name_are_refused_where_they_are_read(tmp_path: Path) -> None:
    columns = [pa.array([1]), pa.array([2]), pa.array([3])]
    pq.write_table(pa.table(columns, names=["a", "b", "a"]), tmp_path / "log")
    said = oper("profile", tmp_path / "log", "-o", tmp_path / "p")
    assert said.status == 2
    assert "log: two columns are called 'a'; rename one" in said.errors
    assert oper("profile", tmp_path / "log", "-o", tmp_path / "p", "--columns", "b").status == 0


def test_rows_that_a_file_of_tables_leaves_open_are_warned_of(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2**30]}), tmp_path / "log")
    with pytest.warns(OperWarning, match="'a': gets 1,073,741,825 rows, .* of counters"):
        prepare(open_log(tmp_path / "log"), [Table("a", 0)])


@pytest.mark.parametrize("rule", [(), ("--ids", "dense")])
@pytest.mark.parametrize(
    ("times", "words"),
    [
        (range(11_000_000, 11_000_100), "most of them unread"),
        ([f"at {n}" for n in range(20_000)], "nearly all of them read once"),
    ],
)
def test_columns_that_somebody_named_are_no_times(
    tmp_path: Path, times: Sequence[Any], words: str, rule: tuple[str, ...]
) -> None:
    """`--columns` is the remedy that the warning names."""
    if rule and isinstance(times[0], str):
        rule = ("--ids", "vocab")
    pq.write_table(pa.table({"a": [1] * len(times), "at": list(times)}), tmp_path / "log")
    warned = oper("profile", tmp_path / "log", "-o", tmp_path / "p", *rule)
    assert "warning: column 'at': " in warned.errors
    assert words in warned.errors
    said = oper("profile", tmp_path / "log", "-o", tmp_path / "q", "--columns", "a,at", *rule)
    assert (said.status, said.errors) == (0, "")
