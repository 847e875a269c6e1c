"""Numbers in text files: whole numbers with a point, and spaces around numbers and names."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError, OperWarning
from oper.logs import LogOptions, RowReader, open_log, prepare
from oper.tables.table import IdRule, Table
from tests.support.commands import oper
from tests.support.log_contents import everything, within_a_function

ITEM = LogOptions(columns=("item",))


def written(folder: Path, *values: str) -> Path:
    (folder / "log.csv").write_text("".join(f"{v},{n}\n" for n, v in enumerate(("item", *values))))
    return folder / "log.csv"


@pytest.fixture
def _many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oper.logs.formats.text_lines.PEEK_BYTES", 200)
    monkeypatch.setattr("oper.logs.formats.text_lines._CHUNK_BYTES", 1000)


@pytest.mark.parametrize("named", ["columns", "tables"])
@pytest.mark.parametrize("form", ["csv", "parquet", "decimal"])
def test_named_columns_of_whole_floats_have_their_integers(
    tmp_path: Path, named: str, form: str
) -> None:
    """They are read if `--columns` or a table names them, and left out by default, as prices."""
    path, values = written(tmp_path, "1.0", "", "3.0", "3.0"), [1.0, None, 3.0, 3.0]
    if form != "csv":
        kind = pa.decimal128(12, 0) if form == "decimal" else pa.float64()
        whole = [None if v is None else int(v) for v in values]
        column = pa.array(whole if form == "decimal" else values, kind)
        pq.write_table(pa.table({"item": column, "0": [1, 2, 3, 4]}), path)
    assert list(open_log(path).left_out) == ["item"]
    log = open_log(path, ITEM if named == "columns" else LogOptions())
    prepared = prepare(log, None if named == "columns" else [Table("item", 0)])
    assert [(t.name, t.rows) for t in prepared.tables] == [("item", 4)]
    rows = everything(RowReader(log, prepared).batches())
    assert rows == {"item": [[1], [], [3], [3]]}


def test_a_log_of_nothing_else_is_read_for_tables_that_name_it(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("item\n1.0\n3.0\n")
    log = open_log(tmp_path / "log.csv")
    assert everything(RowReader(log, prepare(log, [Table("item", 0)])).batches()) == {
        "item": [[1], [3]]
    }
    with pytest.raises(OperError, match="no column looks like ids; name them with `columns`"):
        prepare(log)


@within_a_function
@given(
    st.lists(st.none() | st.integers(-(2**53) + 1, 2**53 - 1), min_size=1, max_size=20),
    st.sampled_from(["{}.0", " {}.00 ", "{}.", "{}.0e+00", "{}"]),
)
def test_every_way_to_write_a_whole_number(
    tmp_path: Path, numbers: list[int | None], form: str
) -> None:
    values = ["" if n is None else form.format(n) for n in numbers]
    found = everything(open_log(written(tmp_path, "7.0", *values), ITEM).batches())
    assert found["item"] == [[7], *([] if n is None else [n] for n in numbers)]


@pytest.mark.parametrize("value", ["9007199254740993.0", "-9007199254740992.0", "1e+16"])
def test_numbers_that_a_float_may_have_changed_are_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(OperError, match=f"{re.escape(repr(value))} in .*line 3.* 2\\^53 or more"):
        list(open_log(written(tmp_path, "1.0", value), ITEM).batches())
    column = pa.array([1, 2**63], pa.decimal128(38, 0))
    pq.write_table(pa.table({"item": column}), tmp_path / "p")
    with pytest.raises(
        OperError, match=r"row 1: expected .* in column 'item', got 9223372036854775808"
    ):
        list(open_log(tmp_path / "p", ITEM).batches())


def test_other_columns_are_texts_and_warned_of(tmp_path: Path) -> None:
    path = written(tmp_path, "6.0", "6.5", "6.0")
    assert open_log(path).features == ("0",)
    for log, tables in (
        (open_log(path, ITEM), None),
        (open_log(path), [Table("item", 0, ids=IdRule("vocab"))]),
    ):
        with pytest.warns(OperWarning, match=r"'item': its values are read as texts.*'6\.5'"):
            prepare(log, tables)
        assert everything(log.batches(("item",)))["item"] == [["6.0"], ["6.5"], ["6.0"]]


def test_one_file_with_other_values_makes_texts_of_all(tmp_path: Path) -> None:
    first = written(tmp_path, "6.0", "7.0").rename(tmp_path / "1.csv")
    second = written(tmp_path, "6.5", "7").rename(tmp_path / "2.csv")
    log = open_log([first, second], ITEM)
    assert everything(log.batches())["item"] == [["6.0"], ["7.0"], ["6.5"], ["7"]]
    with pytest.warns(OperWarning, match=r"'6\.5'"):
        prepare(log)


@pytest.mark.usefixtures("_many_chunks")
@pytest.mark.parametrize("several", [False, True])
def test_a_point_that_comes_late(tmp_path: Path, several: bool) -> None:
    """6 and 6.0 are one id; a fraction after them, in a later file too, is refused."""
    numbers = [str(n % 9) for n in range(2000)]
    late = [*numbers, "6.0"]
    found = everything(open_log(written(tmp_path, *late), ITEM).batches())["item"]
    assert found == [[int(float(v))] for v in late]
    pointed = [f"{v}.0" for v in numbers]
    for values in ([*pointed, "6.5"], [*numbers, "6.5", "6.0"], [*pointed, "x"]):
        paths = [written(tmp_path, *values)]
        if several:
            first = written(tmp_path, *values[:1000]).rename(tmp_path / "0.csv")
            paths = [first, written(tmp_path, *numbers[:100], *values[1000:])]
        with pytest.raises(OperError, match=r"a column of whole numbers.*must have no other"):
            list(open_log(paths, ITEM).batches())


@pytest.mark.parametrize(
    ("values", "missing", "expected"),
    [
        (["1.0", "unknown", "3.0"], "unknown", [[1], [], [3]]),
        (["1.0", "-1.0", "3"], "-1", [[1], [], [3]]),
        (["1.0", "-1.0", "3"], "-1.0", [[1], [], [3]]),
        (["1.0", "nan", "3"], None, [[1], [], [3]]),
        (["1.0", " ", " 3 "], None, [[1], [], [3]]),
    ],
)
def test_missing_values_among_them(
    tmp_path: Path, values: list[str], missing: str | None, expected: Any
) -> None:
    log = open_log(written(tmp_path, *values), LogOptions(columns=("item",), missing=missing))
    prepared = prepare(log)
    assert [(t.ids.kind, t.rows) for t in prepared.tables] == [("dense", 4)]
    assert everything(RowReader(log, prepared).batches())["item"] == expected


def test_whole_floats_in_bags(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text('item,b\n"[1.0, 3.0]",1\n"[2.0]",2\n')
    log = open_log(tmp_path / "log.csv", LogOptions(columns=("item",), list_separator=","))
    assert everything(log.batches())["item"] == [[1, 3], [2]]


def test_spaces_around_names_and_numbers(tmp_path: Path) -> None:
    text = 'user, "item", word , label\n1, 5, x, 1\n2 ,\t6 , y ,0\n 3,  , z,  1\n'
    (tmp_path / "log.csv").write_text(text)
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p", "--columns", "user, item")
    assert (said.status, said.errors) == (0, ""), said
    log = open_log(tmp_path / "log.csv")
    assert log.features == ("user", "item", "word")
    (batch,) = log.batches()
    assert everything([batch]) == {
        "user": [[1], [2], [3]],
        "item": [[5], [6], []],
        "word": [[" x"], [" y "], [" z"]],  # texts keep their bytes
    }
    assert np.array_equal(batch.label, [1, 0, 1])  # type: ignore[arg-type]
    with pytest.warns(OperWarning, match="'word': values such as ' x' begin or end with a space"):
        prepare(log)
    (tmp_path / "two.csv").write_text("a, a\n1,2\n")
    with pytest.raises(OperError, match="two columns are called 'a'"):
        open_log(tmp_path / "two.csv")


def test_times_with_spaces(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("c, at\n1, 1970-01-01 00:00:10\n2, 1970-01-02\n")
    log = open_log(tmp_path / "log.csv", LogOptions(columns=("c",), time="at"))
    (batch,) = log.batches()
    assert batch.time is not None
    assert batch.time.tolist() == [10.0, 86_400.0]
