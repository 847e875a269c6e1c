"""JSON lines read as the same log in Parquet does, and other JSON is refused by name."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.logs import LogOptions, RowReader, open_log, prepare, read
from oper.logs.formats.json_columns import JsonColumns
from tests.support.commands import oper
from tests.support.log_contents import everything, within_a_function

rows = st.fixed_dictionaries(
    {},
    optional={
        "user": st.none() | st.integers(-3, 2**63 - 1),
        "word": st.none() | st.text(max_size=4),
        "items": st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3),
        "words": st.none() | st.lists(st.sampled_from(["x", "", "7"]), max_size=3),
        "price": st.none() | st.floats(0, 9),
    },
)
SCHEMA = pa.schema(
    {
        "user": pa.int64(),
        "word": pa.string(),
        "items": pa.list_(pa.int64()),
        "words": pa.list_(pa.string()),
        "price": pa.float64(),
    }
)
FULL = {"user": 1, "word": "w", "items": [3], "words": ["w"], "price": 0.5}


@within_a_function
@given(st.lists(rows, max_size=20), st.integers(1, 7), st.booleans(), st.sampled_from(["-1", "1"]))
def test_json_lines_and_parquet_read_the_same(
    tmp_path: Path, samples: list[dict[str, Any]], batch: int, packed: bool, missing: str
) -> None:
    samples = [*samples, FULL]
    data = "\n".join(map(json.dumps, samples)).encode()
    (tmp_path / "log").write_bytes(gzip.compress(data) if packed else data)
    pq.write_table(pa.Table.from_pylist(samples, SCHEMA), tmp_path / "p")
    for options in (
        LogOptions(batch_rows=batch),
        LogOptions(columns=("items", "word*"), rows="0:60%", batch_rows=batch),
        LogOptions(columns=("user",), missing=missing, batch_rows=batch, on_bad_id="skip"),
    ):
        logs = [open_log(tmp_path / name, options) for name in ("log", "p")]
        found = []
        for log in logs:
            batches = list(log.batches())
            dense = [b.dense.tolist() for b in batches if b.dense is not None]
            found.append((everything(batches), log.bags, log.dense, log.samples, dense))
            assert set(log.features) <= set(FULL)
        assert found[0] == found[1]
        if options.columns:
            ids = [everything(RowReader(log, prepare(log)).batches()) for log in logs]
            assert ids[0] == ids[1]


def written(folder: Path, *lines: str) -> Path:
    (folder / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder / "log.jsonl"


def test_the_first_line_is_a_sample(tmp_path: Path) -> None:
    path = written(tmp_path, '{"user": 5, "item": 7}', "", '{"user": 6, "item": 7}')
    said = oper("profile", path, "-o", tmp_path / "p", "--json")
    assert said.status == 0, said
    assert json.loads(said.out)["samples"] == 2
    assert everything(read(path)) == {"user": [[5], [6]], "item": [[7], [7]]}


def test_columns_and_types_that_come_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oper.logs.formats.text_lines._CHUNK_BYTES", 1000)
    lines = ['{"a": 1, "n": null}'] * 500
    path = written(tmp_path, *lines, '{"late": "x", "n": [4], "a": 2.5}')
    assert open_log(path).left_out == {"a": "numbers, double"}
    found = everything(open_log(path, LogOptions(columns=("late", "n"))).batches())
    assert found == {"late": [[]] * 500 + [["x"]], "n": [[]] * 500 + [[4]]}
    with pytest.raises(
        OperError, match=r"line 501: expected whole numbers in column 'a', got 2\.5"
    ):
        list(open_log(path, LogOptions(columns=("a",))).batches())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["9007199254740993", "null"], [[2**53 + 1], []]),
        (["18446744073709551615", "5"], [[-1], [5]]),  # two's complement, as in Parquet
        (["-9223372036854775808", "9223372036854775807"], [[-(2**63)], [2**63 - 1]]),
        (["1.0", "null", "3"], [[1], [], [3]]),
        (["NaN", "3.0"], [[], [3]]),
        (["true", "false"], [[1], [0]]),
        (["[9007199254740993, null]", "[]"], [[2**53 + 1], []]),
        (['"2020-01-01"', '"2020-01-02"'], [["2020-01-01"], ["2020-01-02"]]),
    ],
)
def test_values_are_exact(tmp_path: Path, values: list[str], expected: Any) -> None:
    path = written(tmp_path, *(f'{{"a": {v}}}' for v in values))
    assert everything(open_log(path, LogOptions(columns=("a",))).batches())["a"] == expected


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (['{"x": 1}'], "an object in line 1"),
        (["1", '"x"'], "an integer in line 1 and a text in line 2"),
        (["1", "[2]"], "an integer in line 1 and a list in line 2"),
        (["[[1]]"], "lists with a list in line 1"),
        (["[1]", '["x"]'], "lists with an integer in line 1 and a text in line 2"),
        (["-1", "18446744073709551615"], "the integer 18446744073709551615"),
        (["18446744073709551616"], "the integer 18446744073709551616"),
    ],
)
def test_values_that_are_no_column_are_left_out_and_named(
    tmp_path: Path, values: list[str], reason: str
) -> None:
    path = written(tmp_path, *(f'{{"id": 7, "a": {v}}}' for v in values))
    log = open_log(path)
    assert list(log.left_out) == ["a"]
    assert log.left_out["a"].startswith(reason)
    assert everything(log.batches()) == {"id": [[7]] * len(values)}
    with pytest.raises(OperError, match=r"column 'a' has .*leave the column out with `?columns`?"):
        list(open_log(path, LogOptions(columns=("a",))).batches())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"a": 1}, {"a": 2}]', "one array of all samples.*jq -c '.\\[\\]' log"),
        ('[\n  {"a": 1},\n  {"a": 2}\n]\n', "one array of all samples"),
        ('[\n{\n"a": 1}]', "one array of all samples"),
        ('{\n  "a": 1\n}\n', "does not end on its line.*jq -c . log"),
        ('{"a": 1,\n "b": 2}\n', "does not end on its line"),
        ("[1, 2]\n[3]\n", "got a list; write"),
        ('{"a": 1} {"a": 2}\n', "does not end on its line, or is invalid"),
        ('{"b": ' + "[" * 100_000 + "]" * 100_000 + "}", "or is invalid"),
        ('{"a": 1}\n{"b": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 2: .*recursion"),
        ('{"a": 1}\n{"a": \n', "line 2: expected a JSON object"),
        ('{"a": 1}\n[1]\n', "line 2: expected a JSON object, got another value"),
        ('{"a": 1}\n{"a": 1, "a": 2}\n', "line 2: .*twice"),
        ('{"a": 1}\n{"a": 2}\r{"a": 3}\n', "line 2: expected a JSON object"),
        ('{"a": "x"}\n{"a": "\\ud83d"}\n', "line 2: .*surrogate"),
    ],
)
def test_other_json_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "log").write_text(text)
    with pytest.raises(OperError, match=words) as raised:
        list(read(tmp_path / "log"))
    assert "\n" not in str(raised.value)


def test_a_log_that_only_looks_like_json(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("{a},[b]\n1,2\n")
    assert everything(read(tmp_path / "log")) == {"{a}": [[1]], "[b]": [[2]]}
    (tmp_path / "log").write_text("[1,2]\n[3]\n")
    options = LogOptions(delimiter=";", list_separator=",", no_header=True)
    assert everything(open_log(tmp_path / "log", options).batches())["column_1"] == [[1, 2], [3]]


def test_windows_and_hold_out(tmp_path: Path) -> None:
    samples = [{"c": n % 7, "at": f"1970-01-0{1 + n // 40} 00:00:00"} for n in range(100)]
    written(tmp_path, *map(json.dumps, samples))
    pq.write_table(pa.Table.from_pylist(samples), tmp_path / "p")
    for more in (("--by-column", "at", "--every", "1d"), ("--windows", 3), ("--hold-out", "20%")):
        outputs = []
        for name in ("log.jsonl", "p"):
            log, out = tmp_path / name, tmp_path / f"out-{name}"
            said = oper("profile", log, "-o", out, "--columns", "c", "--json", "--force", *more)
            assert said.status == 0, said
            lines = said.out.replace("log.jsonl", "p").replace("out-p", "out").splitlines()
            outputs.append([line for line in lines if "second" not in line])
        assert outputs[0] == outputs[1]


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.integers(0, 9)
    | st.floats()
    | st.sampled_from(["", "x", "1", "2026-01-01", "a\\b", '"', "{", "é\u2028"])
)
lines_of_objects = st.lists(
    st.dictionaries(
        st.sampled_from(["a", "b", "é", "", '"']),
        scalars | st.lists(scalars, max_size=3) | st.just({"a": 1}) | st.just([[1]]),
        max_size=3,
    ).map(lambda value: json.dumps(value, ensure_ascii=len(value) > 1))
    | st.sampled_from(
        ['{"a": 1} {"a": 2}', '{"a":', "1}", "{}", "", "[1]", '{"a": 01}', '{"a": "\\ud83d"}', "x"]
    ),
    min_size=1,
    max_size=30,
)


@within_a_function
@given(lines_of_objects, st.sampled_from(["\n", "\r\n", " \n", "\n\n"]), st.integers(1, 200))
def test_columns_are_those_that_each_line_shows(
    tmp_path: Path, lines: list[str], end: str, piece: int
) -> None:
    """However many lines are checked at a time: Python's parser reads each of them otherwise."""
    (tmp_path / "log").write_bytes(end.join(lines).encode())

    def found() -> Any:
        try:
            columns = JsonColumns(tmp_path / "log")
        except OperError as error:
            return str(error)
        # Beside an integer, the first float of a column of numbers may have any line.
        kinds = {n: kind or len(reason) > 0 for n, (kind, reason) in columns.kinds().items()}
        return columns.samples, list(kinds.items()), columns.longest >= max(map(len, lines)) - 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oper.logs.formats.json_columns._PIECE_BYTES", piece)
        fast = found()
        patch.setattr(JsonColumns, "_check", lambda self, piece: False)
        assert fast == found()


def test_most_lines_are_checked_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's parser reads the lines until all columns and kinds are known."""
    monkeypatch.setattr("oper.logs.formats.json_columns._PIECE_BYTES", 1000)
    lines = [json.dumps({"a": n, "b": [str(n)], "c": n / 7}) for n in range(1000)]
    lines[500] = '{"a": -5, "d": true}'
    (tmp_path / "log").write_text("\r\n".join(lines))
    read: list[int] = []

    def parsed(path: Path, number: int, line: bytes, is_first: bool) -> Any:
        read.append(number)
        return json.loads(line)

    monkeypatch.setattr("oper.logs.formats.json_columns._object", parsed)
    columns = JsonColumns(tmp_path / "log")
    assert columns.samples == 1000
    assert [str(kind) for kind, _ in columns.kinds().values()] == [
        "int64", "list<item: string>", "double", "bool",
    ]  # fmt: skip
    assert 501 in read
    assert len(read) < 80


def test_bounds_of_integers_that_are_checked_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oper.logs.formats.json_columns._PIECE_BYTES", 100)
    for values, kind in (
        ([*range(99), -(2**63)], "int64"),
        ([*range(99), 2**63], "uint64"),
        ([*range(99), 2**63, *range(99)], "uint64"),
        ([-1, *range(99), 2**63], "None"),
        ([*range(99), 2**63, -1], "None"),
        ([*range(50), -1, *range(99), 2**63, 1], "None"),
    ):
        (tmp_path / "log").write_text("".join(f'{{"a": {v}, "b": [{v}]}}\n' for v in values))
        kinds = JsonColumns(tmp_path / "log").kinds()
        assert str(kinds["a"][0]) == kind
        assert str(kinds["b"][0]) == ("None" if kind == "None" else f"list<item: {kind}>")
