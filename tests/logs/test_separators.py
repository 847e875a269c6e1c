"""Separators of columns: found where every line has them, asked for where it may not be one."""

from pathlib import Path

import pytest

from oper.base.errors import OperError
from oper.logs import LogOptions, open_log
from tests.support.commands import oper
from tests.support.log_contents import everything

ROWS = [("user", "item"), ("1", "5"), ("2", "6")]
EXPECTED = {"user": [[1], [2]], "item": [[5], [6]]}


def written(folder: Path, text: str) -> Path:
    (folder / "log").write_bytes(text.encode())
    return folder / "log"


def joined(separator: str, end: str = "\n") -> str:
    return "".join(separator.join(row) + end for row in ROWS)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [",", "\t", ";", "|", "::", "\x01"])
def test_separators_that_are_found(tmp_path: Path, separator: str, end: str) -> None:
    path = written(tmp_path, joined(separator, end))
    assert everything(open_log(path).batches()) == EXPECTED
    lines = written(tmp_path, joined(separator, end).partition(end)[2])
    with pytest.raises(OperError, match=r"expected names of columns.*`?no_header`?"):
        open_log(lines)
    found = everything(open_log(lines, LogOptions(no_header=True)).batches())
    assert found == {"column_1": [[1], [2]], "column_2": [[5], [6]]}


@pytest.mark.parametrize("separator", [" ", ":", "~", "^", "#", "\x1f", "¦"])
@pytest.mark.parametrize("header", [True, False])
def test_one_column_is_refused_where_lines_may_have_more(
    tmp_path: Path, separator: str, header: bool
) -> None:
    text = joined(separator)
    path = written(tmp_path, text if header else text.partition("\n")[2])
    for no_header in (False, True):
        with pytest.raises(OperError, match=r"every line has .* equally often.*`?delimiter`?"):
            open_log(path, LogOptions(no_header=no_header))
    options = LogOptions(no_header=not header, delimiter=separator)
    names = dict(zip(EXPECTED, open_log(path, options).features, strict=True))
    found = everything(open_log(path, options).batches())
    assert found == {names[name]: ids for name, ids in EXPECTED.items()}
    whole = open_log(path, LogOptions(no_header=not header, delimiter=","))
    assert len(whole.features) == 1


@pytest.mark.parametrize(
    ("name", "separator"),
    [
        ("tab", "\t"), ("space", "  "), (r"\t", "\t"), (r"\x01", "\x01"), (r"\001", "\x01"),
        (r"\u0001", "\x01"), ("^A", "\x01"), ("semicolon", ";"), ("pipe", "|"), ("::", "::"),
        ("||", "||"), ("^", "^"), ("¦", "¦"),
    ],
)  # fmt: skip
def test_the_delimiter_that_is_given(tmp_path: Path, name: str, separator: str) -> None:
    path = written(tmp_path, joined(separator))
    assert everything(open_log(path, LogOptions(delimiter=name)).batches()) == EXPECTED
    said = oper("profile", path, "-o", tmp_path / "p", "--delimiter", name, "--columns", "item")
    assert (said.status, said.errors) == (0, ""), said


@pytest.mark.parametrize("given", ["", "x", "1", '"', "\n", r"\n", "a,b", "," * 9, r"\x00"])
def test_delimiters_that_are_none(given: str) -> None:
    with pytest.raises(OperError, match=r"`?delimiter`? .*: expected 1 to 8 characters"):
        LogOptions(delimiter=given)
    with pytest.raises(OperError, match="both"):
        LogOptions(delimiter=";", list_separator=";")


def test_runs_of_spaces(tmp_path: Path) -> None:
    path = written(tmp_path, "  user   item\n1  5  \n\n   \n  2     6\r\n")
    log = open_log(path, LogOptions(delimiter=" "))
    assert everything(log.batches()) == EXPECTED
    assert log.count_samples() == 2
    written(tmp_path, "user item\n1 5\n2 6 7\n")
    with pytest.raises(OperError, match="line 3: expected 2 fields, got 3"):
        list(open_log(path, LogOptions(delimiter=" ")).batches())


@pytest.mark.parametrize("delimiter", ["::", " ", ";"])
def test_separators_within_quotes_are_text(tmp_path: Path, delimiter: str) -> None:
    rows = [
        ("a", "b", "c"),
        (f'"x{delimiter}{delimiter}y"', '"1"', f'"{delimiter}"'),
        ('5"', "2", '"z ""q"" "'),
    ]
    path = written(tmp_path, "\n".join(delimiter.join(row) for row in rows))
    found = everything(open_log(path, LogOptions(delimiter=delimiter)).batches())
    assert (found["a"], found["b"]) == ([[f"x{delimiter}{delimiter}y"], ['5"']], [[1], [2]])
    assert found["c"] == [[] if delimiter == " " else [delimiter], ['z "q" ']]


@pytest.mark.parametrize("text", ["1;2,5;3\n2;3,5;4\n", "1;2,5;3\n2;3;4\n", "1,3|4\n2,5|6\n"])
def test_two_separators_are_asked_for(tmp_path: Path, text: str) -> None:
    for no_header in (False, True):
        with pytest.raises(
            OperError, match=r"may be separated by ',' or '[;|]'; pass `?delimiter`?"
        ):
            open_log(written(tmp_path, text), LogOptions(no_header=no_header))


def test_commas_within_movielens_titles(tmp_path: Path) -> None:
    text = "1::Toy Story, The (1995)::Animation|Comedy\n2::Jumanji (1995)::Adventure\n"
    log = open_log(written(tmp_path, text), LogOptions(no_header=True))
    assert everything(log.batches())["column_2"] == [["Toy Story, The (1995)"], ["Jumanji (1995)"]]


def test_a_comma_file_stays_one(tmp_path: Path) -> None:
    """Another character in its lines, as often in each, does not make it another file."""
    path = written(tmp_path, 'a,b\n1,"x;y"\n2,"z;w"\n3\n')
    with pytest.raises(OperError, match="line 4: expected 2 fields, got 1"):
        list(open_log(path).batches())


def test_a_log_of_one_bag_column(tmp_path: Path) -> None:
    path = written(tmp_path, "items\n1 5 9\n2 3\n")
    said = oper("profile", path, "-o", tmp_path / "p")
    assert said.status == 0
    assert "--list-separator ' '" in said.errors
    log = open_log(path, LogOptions(list_separator=" "))
    assert everything(log.batches()) == {"items": [[1, 5, 9], [2, 3]]}
    lines = written(tmp_path, "1 5 9\n2 3\n")
    with pytest.raises(OperError, match="no_header=True and list_separator=' '") as raised:
        open_log(lines)
    assert "if it is a sample, pass no_header" not in str(raised.value)
    log = open_log(lines, LogOptions(list_separator=" ", no_header=True))
    assert everything(log.batches()) == {"column_1": [[1, 5, 9], [2, 3]]}


def test_list_separators_as_shells_write_them(tmp_path: Path) -> None:
    path = written(tmp_path, "a,b\n1,3\x1d4\n2,5\n")
    log = open_log(path, LogOptions(list_separator=r"\x1d"))
    assert everything(log.batches())["b"] == [[3, 4], [5]]
