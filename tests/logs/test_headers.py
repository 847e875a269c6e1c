"""CSV files without a line of names: refused, or read by position where that is asked for."""

import gzip
from pathlib import Path

import pytest

from oper.base.errors import OperError
from oper.logs import LogOptions, open_log, read
from oper.profiling.profile import Profile
from tests.support.commands import oper
from tests.support.log_contents import everything

LINES = ["1,5,7", "2,6,8", "3,5,9"]


@pytest.mark.parametrize(
    "first",
    [
        "1,5,7",
        "1.5,-3,+2e3",
        ",5,",
        '"1","2","3"',
        "2019-01-05,10:30,1",
        "\ufeff1,2,3",
        "\n\n1,2,3",
        "2026-01-01T00:00:00Z,5,7",
        "2026-01-01 00:00:00.5+01:00,true,",
        "123e4567-e89b-12d3-a456-426614174000,0x1F,68fd1e64",
        "1,NULL,false",
        "CAUSBQoDdGFnAB12CD==,CAUSBQoDdGFnAB12,aGVsbG8sIHdvcmxkIQ1=",
    ],
)
@pytest.mark.parametrize("delimiter", [",", "\t"])
def test_a_first_line_of_values_is_refused(tmp_path: Path, first: str, delimiter: str) -> None:
    lines = [first] * 4 if first.endswith("=") else [first, *LINES]
    text = "\n".join(lines).replace(",", delimiter)
    (tmp_path / "log.csv").write_text(text, encoding="utf-8")
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p")
    assert said.status == 2, said
    assert "expected names of columns in the first line, got values" in said.errors
    assert "if it is a sample, pass --no-header" in said.errors
    assert not (tmp_path / "p").exists()
    by_position = LogOptions(columns=("column_3",), no_header=True)
    assert sum(b.samples for b in open_log(tmp_path / "log.csv", by_position).batches(())) == 4


@pytest.mark.parametrize(
    "first", ["id,2019,2020", ",b,c", "a,1.5,-3", "1;x,2,3", "_1,_2,_3", "ж,1,2"]
)
def test_a_name_with_a_letter_makes_a_header(tmp_path: Path, first: str) -> None:
    (tmp_path / "log.csv").write_text("\n".join([first, *LINES]), encoding="utf-8")
    log = open_log(tmp_path / "log.csv")
    assert list(log.features) == [name for name in first.split(",") if name]
    assert log.count_samples() == 3
    assert not log.doubts(log.features)


@pytest.mark.parametrize(
    ("text", "doubtful"),
    [
        ("u7,5,6\nu8,5,7\n", True),
        ("u7,1.5,x\nu8,2.5,y\n", True),
        ("user,5,6\nu8,x,y\n", False),
        ("user,item\nu8,x\n", False),
        (",user,item\n0,u8,x\n", False),
        ("user,n\nu8,1\n", False),
        ("u7,5\n", False),
    ],
)
def test_a_header_like_the_lines_below_is_doubted(
    tmp_path: Path, text: str, doubtful: bool
) -> None:
    (tmp_path / "log.csv").write_text(text)
    log = open_log(tmp_path / "log.csv")
    doubts = log.doubts(log.features)
    assert any("no_header=True" in doubt for doubt in doubts.values()) == doubtful
    log = open_log(tmp_path / "log.csv", LogOptions(no_header=True))
    assert not log.doubts(log.features)


@pytest.mark.parametrize("delimiter", [",", "\t"])
@pytest.mark.parametrize("packed", [False, True])
def test_columns_by_position(tmp_path: Path, delimiter: str, packed: bool) -> None:
    paths = []
    for number, line_end in enumerate(["\n", "\r\n"]):
        text = line_end.join(LINES).replace(",", delimiter).encode()
        paths.append(tmp_path / f"{number}.csv")
        paths[-1].write_bytes(gzip.compress(text) if packed else text)
    said = oper("profile", *paths, "-o", tmp_path / "p", "--no-header")
    assert said.status == 0, said
    made = Profile.load(tmp_path / "p")
    assert made.samples == 6
    assert [t.name for t in made.tables] == ["column_1", "column_2", "column_3"]
    assert made.table_accesses(0).tolist() == [0, 2, 2, 2]
    assert made.source["options"] == {"no_header": True}
    options = LogOptions(no_header=True)
    again = everything(read(paths, made.tables, folder=tmp_path / "p", **vars(options)))
    assert again["column_3"] == [[7], [8], [9]] * 2


def test_lines_are_counted_from_the_first_sample(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("1,0.5,x\n2,-3,y\n")
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p", "--no-header")
    assert "column_2 ('0.5' in line 1 is not a whole number)" in said.errors
    said = oper(
        *("profile", tmp_path / "log.csv", "-o", tmp_path / "q", "--no-header"),
        *("--ids", "dense", "--columns", "column_3"),
    )
    assert "log.csv, line 1: column 'column_3' holds texts" in said.errors


def test_a_plan_is_checked_with_the_log_it_was_made_for(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("\n".join(LINES * 9))
    for command in (
        ("profile", tmp_path / "log.csv", "-o", tmp_path / "p", "--no-header"),
        ("plan", tmp_path / "p", "-o", tmp_path / "plan", "--topology", "dgx-a100"),
        ("plan", "check", tmp_path / "plan", tmp_path / "log.csv", "--no-header"),
        (
            "simulate",
            tmp_path / "log.csv",
            "--no-header",
            *["--batch-size", 8, "--cache", 1, "--warm-up", 1],
        ),
    ):
        said = oper(*command)
        assert said.status == 0, said
    said = oper("plan", "check", tmp_path / "plan", tmp_path / "log.csv")
    assert said.status == 2
    assert "--no-header" in said.errors


def test_a_header_alone_is_an_empty_log(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("a,b")
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p")
    assert (said.status, "has no samples; the log is empty" in said.errors) == (2, True), said


def test_names_that_are_numbers_and_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("0,1,2\n" + "3,4,5\n" * 9)
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "p", "--columns", "0,2")
    assert said.status == 0, said
    assert Profile.load(tmp_path / "p").samples == 9
    said = oper("profile", tmp_path / "log.csv", "-o", tmp_path / "q", "--columns", "7")
    assert said.status == 2
    assert "--no-header" in said.errors


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("u,i\n1,2\nu,i\n3,4\n", 3),
        ("u,i\n\n1,2\nu,i", 4),
        ("\ufeffu;i\r\n1;2\r\n\ufeffu;i\r\n3;4\r\n", 3),
        ("u::i\n1::2\nu::i\n", 3),
        ('"u","i"\n1,2\n3,4\n"u","i"\n', 4),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_names_in_the_middle_are_refused(
    tmp_path: Path, text: str, line: int, packed: bool
) -> None:
    """Files that were put together have the names once for each file."""
    content = text.encode()
    (tmp_path / "log.csv").write_bytes(gzip.compress(content) if packed else content)
    log = open_log(tmp_path / "log.csv")
    with pytest.raises(OperError, match=f"log.csv, line {line}: expected a sample, got the names"):
        everything(log.batches(log.features))


@pytest.mark.parametrize("text", ["u,i\nu,ii\nu,\nau,i\n", "u\nu\na\n"])
def test_values_may_be_names(tmp_path: Path, text: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    log = open_log(tmp_path / "log.csv")
    assert sum(b.samples for b in log.batches(log.features)) == text.count("\n") - 1


@pytest.mark.parametrize("delimiter", [",", "\t", "::"])
@pytest.mark.parametrize("mark", ["=", ":"])
def test_values_with_their_names_are_refused(tmp_path: Path, delimiter: str, mark: str) -> None:
    lines = [f"user{mark}{i}{delimiter}item{mark}{i + 1}\n" for i in range(3)]
    (tmp_path / "log.csv").write_text("".join(lines))
    with pytest.raises(OperError, match=f"values with names, such as 'user{mark}0'"):
        open_log(tmp_path / "log.csv")
    (tmp_path / "log.csv").write_text(f"a:user{delimiter}a:item\n" + "".join(lines))
    assert list(open_log(tmp_path / "log.csv").features) == ["a:user", "a:item"]
    (tmp_path / "log.csv").write_text("ns:id,b:c\n" + "ns:5,b:6\n" * 3)
    assert list(open_log(tmp_path / "log.csv").features) == ["ns:id", "b:c"]


@pytest.mark.parametrize(
    ("text", "are_names"),
    [
        ("wd:item,wd:value\nwd:Q42,wd:red\n", True),
        ("ns:id,ns:kind\nns:a,ns:b\n", True),
        ("user:bob,at:5\nuser:ann,at:6\n", False),
        ("user:bob,tag:a\nuser:bob7,tag:b\nuser:ann,tag:c\n", False),
        ("2026-01-01 10:00,user=5\n2026-01-01 10:01,user=6\n", False),
    ],
)
def test_names_and_values_with_a_prefix(tmp_path: Path, text: str, are_names: bool) -> None:
    (tmp_path / "log.csv").write_text(text)
    if are_names:
        log = open_log(tmp_path / "log.csv")
        assert list(log.features) == text.split("\n", maxsplit=1)[0].split(",")
        assert log.count_samples() == text.count("\n") - 1
        return
    with pytest.raises(OperError, match="values with names, such as 'user"):
        open_log(tmp_path / "log.csv")


@pytest.mark.parametrize("name", ["UserFeatureHash2", "face2face", "true_item", "Data2026Release1"])
def test_names_that_are_hardly_values(tmp_path: Path, name: str) -> None:
    (tmp_path / "log.csv").write_text(f"{name}\n5\n6\n")
    assert open_log(tmp_path / "log.csv").features == (name,)
