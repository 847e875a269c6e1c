"""A sample is a line in every text: quotes, line ends and blank lines lose none unsaid."""

import gzip
import random
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.logs import LogOptions, open_log
from oper.logs.batches.columns import Column
from oper.logs.formats.csv_form import Form
from tests.support.examples import examples

IDS = LogOptions(columns=("a", "b"))
STAYS_OPEN = "a field begins with a quote that does not close on its line"


def lines_of(count: int) -> list[str]:
    return [f"{i},{i % 7},t{i}" for i in range(count)]


def written(path: Path, lines: list[str], end: str = "\n", last: str = "\n") -> Path:
    data = (end.join(["a,b,q", *lines]) + last).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def samples_of(path: Path, options: LogOptions = IDS) -> int:
    return sum(batch.samples for batch in open_log(path, options).batches())


@pytest.fixture(params=["one chunk", "small chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one chunk, and the same cut into many."""
    if request.param == "small chunks":
        monkeypatch.setattr("oper.logs.formats.text_lines.PEEK_BYTES", 200)
        monkeypatch.setattr("oper.logs.formats.text_lines._CHUNK_BYTES", 1500)
        monkeypatch.setattr("oper.logs.formats.csv_and_criteo._BLOCK_BYTES", 400)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("name", ["log.csv", "log.csv.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", ["\n", ""])
@pytest.mark.parametrize("bad", [2, 561, 2000])
@pytest.mark.parametrize("closes", [None, 1, 900])
def test_a_stray_quote_names_its_line(
    tmp_path: Path, name: str, end: str, last: str, bad: int, closes: int | None
) -> None:
    """In the last column, which is not asked for, whether or not another quote follows."""
    lines = lines_of(2000)
    lines[bad - 2] = '38,38,"abc'
    if closes and bad - 2 + closes < len(lines):
        lines[bad - 2 + closes] = '38,38,abc"'
    path = written(tmp_path / name, lines, end, last)
    with pytest.raises(OperError, match=f"{re.escape(name)}, line {bad}: {STAYS_OPEN}"):
        samples_of(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('a,b,q\n1,2,x\n3,4,"two\nlines"\n5,6,x\n', 3),  # a sample is one line
        ('a,b,q\n\n\r\n1,2,x\n\n3,4,"x\n', 6),
        ('a,b,q\n"1,2,x\n3,4,x\n', 2),
        ('a,b,q\n1,2,x\n3,"4,x\n5,"6",x\n', 3),
        ('a,b,q\n1,2,"x""\n3,4,x\n', 2),
        ('a,b,"q\n1,2,x\n3,4,x\n', 1),
        ('a\tb\tq\n1\t2\t"x, y\n3\t4\tx\n', 2),
        ('a,b,q\n1,2,x\n3,4","', 3),  # Arrow closes the quote at the end of the file
        ('a,b,q\n1,2,5" x\n3,4,"x\r5,6,x\n7,8,x"\n', 3),  # a return makes up for the swallowed line
    ],
)
def test_quotes_that_stay_open(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "log").write_bytes(text.encode())
    with pytest.raises(OperError, match=f"log, line {line}: {STAYS_OPEN}"):
        samples_of(tmp_path / "log")


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r\r\n", "\n\n", "\n\r\n\n"])
@pytest.mark.parametrize("last", ["", "\n", "\r\n", "\n\n", "\n\r"])
def test_quotes_and_lines_that_are_fine(tmp_path: Path, end: str, last: str) -> None:
    texts = ['"x"', '5" pipe', '"a""b"', '""', '"a" b"', "\0", '"1, 2"', "€"]
    lines = [f"{i},{i % 7},{texts[i % len(texts)]}" for i in range(500)]
    path = written(tmp_path / "log.csv", lines, end, last)
    assert samples_of(path) == open_log(path).count_samples() == 500
    assert samples_of(path, LogOptions(columns=("a",), rows="50%:")) == 250


@pytest.mark.usefixtures("chunks")
def test_a_return_within_a_line_is_named(tmp_path: Path) -> None:
    """Arrow ends a line there: in Criteo's TSV, a CSV, its quotes, and a CSV of one column."""
    lines = lines_of(500)
    lines[300] = "1,2,x\r3,4,y"
    with pytest.raises(OperError, match="line 302: has a carriage return in the middle"):
        samples_of(written(tmp_path / "log.csv", lines))
    (tmp_path / "one.csv").write_bytes(b"a\n1\n2\r3\n4\n")
    with pytest.raises(OperError, match="line 3: has a carriage return in the middle"):
        samples_of(tmp_path / "one.csv", LogOptions(columns=("a",)))
    lines[300] = '1,2,"x\ry"'
    with pytest.raises(OperError, match="line 302: has a carriage return in the middle"):
        samples_of(written(tmp_path / "log.csv", lines))
    (tmp_path / "old.csv").write_bytes(b"a,b\r1,2\r3,4\r")
    with pytest.raises(OperError, match="carriage return within its first line"):
        samples_of(tmp_path / "old.csv")
    criteo = ["\t".join(["1", *["2"] * 13, *["0000abcd"] * 26])] * 9
    criteo[5] = criteo[5][:-4] + "\r" + criteo[5][-4:]
    (tmp_path / "day_0").write_bytes("\n".join(criteo).encode())
    with pytest.raises(OperError, match="line 6: has a carriage return in the middle"):
        samples_of(tmp_path / "day_0", LogOptions())


def test_a_long_field_beside_a_ragged_line(tmp_path: Path) -> None:
    """The line is found whatever its neighbours hold."""
    lines = [f'1,2,"{"x" * 200_000}"', "1,2"]
    with pytest.raises(OperError, match="line 3: expected 3 fields, got 2"):
        samples_of(written(tmp_path / "log.csv", lines))


PIECES = ['"', '""', ",", "\n", "\r\n", "\r", "1", "x", "\0", "é", "\n1,2\n", '\n1,"2"\n']


@examples(300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PIECES), max_size=40), st.integers(1, 400))
@example(['"', ",", "\n1,2\n", "x", "\r", "x"], 10)
def test_any_text_gives_its_lines_or_an_error(
    tmp_path: Path, pieces: list[str], block: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oper.logs.formats.csv_and_criteo._BLOCK_BYTES", block)
        patch.setattr("oper.logs.formats.text_lines._CHUNK_BYTES", 20 * block)
        text = "a,b\n1,2\n" + "".join(pieces)
        (tmp_path / "log.csv").write_bytes(text.encode())
        try:
            log = open_log(tmp_path / "log.csv", LogOptions(columns=("a", "b"), dense=()))
            batches = list(log.batches())
        except OperError as error:
            said = str(error)
        else:
            said = ""
        if said:
            assert re.search(r"line [0-9]+: ", said), said
            return
        lines = [line.strip("\r") for line in text.split("\n")[1:]]
        lines = [line for line in lines if line]
        assert sum(b.samples for b in batches) == len(lines) == log.count_samples()
        form = Form((Column("a"), Column("b")), ",")
        fields = [form.fields(line) for line in lines]
        assert all(f is not None and len(f) == 2 for f in fields)
        for index, name in enumerate("ab"):
            found = [b.features[name] for b in batches]
            ids = sum(len(f.values) for f in found)
            assert ids == sum(f is not None and f[index] != "" for f in fields)


def test_files_of_one_log_are_named_apart(tmp_path: Path) -> None:
    """A quote that stays open at the top of the second file: its columns look like others."""
    (tmp_path / "1.csv").write_text("a,x\n1,0.5\n2,0.5\n")
    (tmp_path / "2.csv").write_text('a,x\n1,"1\n2,0.5\n')
    with pytest.raises(OperError, match=f"2.csv, line 2: {STAYS_OPEN}"):
        open_log([tmp_path / "1.csv", tmp_path / "2.csv"])


def test_csv_and_parquet_give_the_same_ids(tmp_path: Path) -> None:
    """Texts that need quotes, and mended by the error's advice; in CSV spaces around a number are
    no part of it."""
    rng = random.Random(0)
    texts = ["".join(rng.choices('ab",5 ', k=4)) for _ in range(300)]
    pq.write_table(pa.table({"q": texts}), tmp_path / "log.parquet")
    doubled = (text.replace('"', '""') for text in texts)
    (tmp_path / "log.csv").write_text("q\n" + "\n".join(f'"{t}"' for t in doubled))
    found = []
    for name in ("log.parquet", "log.csv"):
        batches = open_log(tmp_path / name).batches()
        found.append([str(v) for b in batches for v in b.features["q"].values])
    assert found[0] == texts
    assert found[1] == [t.strip() if t.strip().isdigit() else t for t in texts if t.strip()]
