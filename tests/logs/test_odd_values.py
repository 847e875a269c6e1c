"""Values that are no whole numbers, in columns whose other values are: refused, left out or warned
of, and never a vocabulary without a word. Text ids get their vocabulary as ever."""

import gzip
import json
import uuid
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError, OperWarning
from oper.logs import LogOptions, Prepared, RowReader, open_log, prepare
from oper.profiling.profile import Profile
from oper.profiling.table_options import TableOptions
from oper.tables.table import IdRule, Table
from tests.support.commands import oper
from tests.support.log_contents import everything, within_a_function

RULES = [("vocab", ()), ("hash:9", ()), (None, ("*",))]


def prepared_of(
    path: Path, ids: str | None = None, columns: tuple[str, ...] = ()
) -> tuple[Prepared, list[str]]:
    """The tables by `--ids` and `--columns`, and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", OperWarning)
        prepared = TableOptions(ids=ids).prepare(open_log(path, LogOptions(columns=columns)))
    return prepared, [str(warning.message) for warning in said]


def written(folder: Path, values: Sequence[str], form: str = "csv") -> Path:
    """A log with the values in column `item`, and a column of small numbers."""
    path = folder / "log"
    if form == "parquet":
        pq.write_table(pa.table({"item": list(values), "n": range(len(values))}), path)
    elif form == "json":
        lines = [json.dumps({"item": v, "n": n}) for n, v in enumerate(values)]
        path.write_text("\n".join(lines))
    else:
        path.write_text("item\tn\n" + "".join(f"{v}\t{n}\n" for n, v in enumerate(values)))
    return path


def place_of(number: int, form: str) -> str:
    return {"csv": f"line {number + 2}", "json": f"line {number + 1}"}.get(form, f"row {number}")


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
@pytest.mark.parametrize(
    ("stray", "at"), [("Total", 4), ("int", 0), ("NULL", 1), ("item", 2), ("-", 0), ("NA", 4)]
)
def test_a_stray_value_among_numbers_is_refused(
    tmp_path: Path, form: str, stray: str, at: int
) -> None:
    values = ["7", "7", "9", "800"]
    path = written(tmp_path, [*values[:at], stray, *values[at:]], form)
    place = f"{path}, {place_of(at, form)}"
    said = oper("profile", path, "-o", tmp_path / "p")
    assert said.status == 2, said
    assert said.errors.startswith(f"error: {place}: column 'item' is {stray!r}")
    assert f"--missing {stray}" in said.errors
    assert (said.errors.count("\n"), (tmp_path / "p").exists()) == (1, False)
    for ids, columns in RULES:
        _, (warning,) = prepared_of(path, ids, columns)
        assert warning.startswith(f"column 'item': {stray!r} in {place}, stands among numbers")
    said = oper("profile", path, "-o", tmp_path / "q", "--missing", stray)
    assert (said.status, said.errors) == (0, ""), said
    table = Profile.load(tmp_path / "q").tables[0]
    assert (table.rows, table.ids.kind) == (801, "dense")


def test_lines_of_types_and_totals(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    for text, line in (("u,i\nint,int\n1,2\n3,4\n5,6\n", 2), ("u,i\n1,2\n3,4\n5,6\nTotal,12\n", 5)):
        path.write_text(text)
        with pytest.raises(OperError, match=f"log.csv, line {line}: column 'u' is '"):
            prepare(open_log(path))
    path.write_text("u,price\nint,float\n1,0.5\n1,2.5\n1,3.5\n")
    with pytest.raises(OperError, match="'float', and nearly all of its different values are num"):
        prepare(open_log(path))


@pytest.mark.parametrize("late", [False, True])
def test_the_share_of_stray_values(
    tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One in 21 of the different values may be a text; with more, the ids are texts."""
    if late:
        monkeypatch.setattr("oper.logs.formats.text_lines.PEEK_BYTES", 100)
        monkeypatch.setattr("oper.logs.formats.text_lines._CHUNK_BYTES", 150)
    numbers = [str(n % 40) for n in range(90)]
    path = written(tmp_path, [*numbers, "x", "y", "x"])
    with pytest.raises(OperError, match=r"line 92: column 'item' is 'x'"):
        prepare(open_log(path))
    path = written(tmp_path, [*numbers, "x", "y", "z"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare(open_log(path)).tables[0].ids.kind == "vocab"


def test_few_numbers_are_only_warned_of(tmp_path: Path) -> None:
    with pytest.warns(OperWarning, match=r"'NULL' in .*line 3, stands among .*missing='NULL'"):
        prepared = prepare(open_log(written(tmp_path, ["1", "NULL", "3", "3"])))
    assert prepared.tables[0].ids.kind == "vocab"


def test_tables_may_say_that_ids_are_texts(tmp_path: Path) -> None:
    path = written(tmp_path, ["7", "8", "9", "x"])
    log = open_log(path)
    with pytest.warns(OperWarning, match="'x' in .*log, line 5, stands among numbers"):
        prepared = prepare(log, [Table("t", 0, features=("item",), ids=IdRule("vocab"))])
    assert everything(RowReader(log, prepared).batches()) == {"item": [[1], [2], [3], [4]]}


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
@pytest.mark.parametrize(
    "values",
    [["0.12", "0.5", "3"], ["1e-3", "1", "2"], [".5", "NaN", "7.25"], ["1,5", "2,25", "3"]],
)
def test_texts_of_fractions_are_left_out(tmp_path: Path, form: str, values: list[str]) -> None:
    path = written(tmp_path, values, form)
    for ids in (None, "vocab", "hash:9"):
        prepared, said = prepared_of(path, ids)
        assert ([t.name for t in prepared.tables], said) == (["n"], [])
        assert prepared.left_out["item"].startswith(f"{values[0]!r} in ")
    _, (warning,) = prepared_of(path, columns=("item",))
    assert "texts" in warning


def test_a_late_fraction_leaves_the_column_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column is left out wherever in the log its first fraction is."""
    monkeypatch.setattr("oper.logs.formats.text_lines.PEEK_BYTES", 100)
    path = written(tmp_path, [*map(str, range(500)), "2.5"])
    prepared = prepare(open_log(path))
    assert [t.name for t in prepared.tables] == ["n"]
    assert prepared.left_out == {"item": f"'2.5' in {path}, line 502, is not a whole number"}


@pytest.mark.parametrize("form", ["csv", "parquet", "json"])
@pytest.mark.parametrize(
    "written_as",
    ["{}_000", "'{}'", "{}\u00a0", "\u200b{}", "０{}", "0x{}f", "+{}", "={}", "{}.000.000", "{}L",
     "{},000,000", "{}\u202f000", "`{}`", "−{}", "0b{}01"],
)  # fmt: skip
def test_numbers_in_another_form_are_warned_of(tmp_path: Path, form: str, written_as: str) -> None:
    if form == "csv" and written_as in ("+{}", "{},000,000"):
        return  # left out; warned of as several ids
    values = [written_as.format(n) for n in (1, 1, 1, 10)]
    values += ["1", "2"] if written_as.startswith("{}_") else []
    path = written(tmp_path, values, form)
    for ids, columns in ((None, ()), *RULES):
        _, (warning,) = prepared_of(path, ids, columns)
        assert warning.startswith(f"column 'item': {values[0]!r} in {path}, {place_of(0, form)}")
        assert "look like numbers" in warning


rng = np.random.default_rng(5)
TEXT_IDS = {
    "words": ["red", "green", "blue"],
    "hashes": [f"{n:08x}" for n in rng.integers(0, 2**32, 500)],
    "short hashes": [f"{n:04x}" for n in rng.integers(0, 2**16, 500)],
    "hashes with 0x": [f"0x{n:08x}" for n in rng.integers(0, 2**32, 500)],
    "uuids": [str(uuid.UUID(int=int(n))) for n in rng.integers(0, 2**62, 500)],
    "codes": [f"{n}{'ABC'[n % 3]}" for n in range(100)],
    "half of them codes": [f"{n}{['', 'X'][n % 2]}" for n in range(100)],
    "ISBNs": [f"{n:09d}{[*map(str, range(10)), 'X'][n % 11]}" for n in range(500)],
    "zeros before codes": [f"00{n}a" for n in range(50)],
    "a flag": ["0", "0", "A", "0"],
    "a few letters beside a zero": ["0"] * 90 + ["a", "b", "c"],
    "long digits": [f"{n}" + "1" * 24 for n in range(50)],
    "pairs": [f"{n}_{n}" for n in range(50)],
    "versions": [f"1.{n}.0" for n in range(50)],
}


@pytest.mark.parametrize("form", ["parquet", "json", "csv"])
@pytest.mark.parametrize("name", TEXT_IDS)
def test_text_ids_get_a_vocabulary_without_a_word(tmp_path: Path, form: str, name: str) -> None:
    if (form, name) == ("csv", "long digits"):
        return  # left out, as numbers of more than 64 bits
    path = written(tmp_path, TEXT_IDS[name], form)
    for ids, columns in ((None, ()), *RULES):
        prepared, said = prepared_of(path, ids, columns)
        assert said == []
        assert prepared.tables[0].rows == (9 if ids == "hash:9" else 1 + len(set(TEXT_IDS[name])))


def test_integers_from_2_63_on_are_numbers(tmp_path: Path) -> None:
    values = [2**63 + n for n in range(9)]
    for path in (
        written(tmp_path, [*map(str, values), "-5", str(-(2**63))]),
        written(tmp_path, [*map(str, values), "7", "8"], "parquet"),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert prepare(open_log(path)).tables[0].ids.kind == "vocab"


ROWS = st.lists(
    st.tuples(st.none() | st.integers(0, 50), st.none() | st.integers(0, 2**62)),
    min_size=1,
    max_size=30,
).filter(lambda rows: all(any(r[i] is not None for r in rows) for i in (0, 1)))
FORMS = ["csv", "tsv", ";", "|", "::", "\x01", "quoted", "spaces", "gz", "\r\n",
         "json", "json texts", "json lists", "parquet", "parquet texts"]  # fmt: skip


@within_a_function
@given(ROWS)
def test_whole_numbers_have_the_same_counts_in_every_form(
    tmp_path: Path, rows: list[tuple[int | None, int | None]]
) -> None:
    expected = [Counter(r[i] for r in rows if r[i] is not None) for i in (0, 1)]
    for form in FORMS:
        path = in_form(tmp_path, rows, form)
        with warnings.catch_warnings():
            warnings.simplefilter("error", OperWarning)
            log = open_log(path)
            assert log.features == ("a", "b"), form
            prepare(log, [Table("t", 9, features=("a", "b"), ids=IdRule("hash"))])
        found = everything(log.batches())
        assert [Counter(v for bag in found[n] for v in bag) for n in "ab"] == expected, form
        assert len(found["a"]) == len(rows), form


def in_form(folder: Path, rows: list[tuple[int | None, int | None]], form: str) -> Path:
    path = folder / "log"
    if form.startswith("parquet"):
        kind = pa.string() if "texts" in form else pa.int64()
        columns = [[None if r[i] is None else r[i] for r in rows] for i in (0, 1)]
        if "texts" in form:
            columns = [[None if v is None else str(v) for v in c] for c in columns]  # type: ignore[misc]
        pq.write_table(pa.table([pa.array(c, kind) for c in columns], names=["a", "b"]), path)
        return path
    if form.startswith("json"):

        def shaped(value: int | None) -> Any:
            if "lists" in form:
                return [] if value is None else [value]
            return str(value) if "texts" in form and value is not None else value

        path.write_text(
            "".join(json.dumps({"a": shaped(a), "b": shaped(b)}) + "\n" for a, b in rows)
        )
        return path
    separator = {"tsv": "\t", "quoted": ",", "spaces": " , "}.get(form, form)
    separator = "," if separator in ("csv", "gz", "\r\n") else separator
    quote = '"' if form == "quoted" else ""
    end = "\r\n" if form == "\r\n" else "\n"
    fields = [("a", "b"), *(["" if v is None else str(v) for v in row] for row in rows)]
    text = "".join(separator.join(f"{quote}{f}{quote}" for f in row) + end for row in fields)
    path.write_bytes(gzip.compress(text.encode()) if form == "gz" else text.encode())
    return path
