"""Names from logs and paths that would steer a terminal are printed as escapes."""

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from oper.base.formatting import printable
from oper.logs import table_discovery
from oper.profiling.profile import Profile
from tests.support.commands import Said, fine, oper

NAMES = ["C\x1b[31mred\x1b[0m", "C\u202eback", "C\a", "C\0nul", "C\nline", "C\u2066", "C日本"]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    columns = {name: np.arange(300) % (7 + n) for n, name in enumerate(NAMES)}
    pq.write_table(pa.table(columns), "log.parquet")
    fine("profile", "log.parquet", "--columns", "C*", "-o", "p")
    fine("plan", "p", "--topology", "cpu:2", "-o", "q")
    return tmp_path


@pytest.mark.parametrize("command", ["profiles show p", "plan show q -v"])
def test_tables(planned: Path, command: str) -> None:
    assert_plain(oper(*command.split()))


def test_the_width_of_a_column_is_that_of_what_is_printed(planned: Path) -> None:
    lines = fine("profiles", "show", "p").splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("table"))
    ends = {line.rindex("dense") for line in lines[first + 1 : first + 1 + len(NAMES) - 1]}
    assert len(ends) == 1


def test_json_has_the_names_as_they_are(planned: Path) -> None:
    content = json.loads(fine("profiles", "show", "p", "--json"))
    assert {table["name"] for table in content["tables"]} == set(NAMES)


def test_errors_and_warnings(planned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "no\x1b]0;title\a\u202e\nerror: fake"
    for command in (
        ["plan", "show", path],
        ["plan", "p", f"--{path}"],
        ["report", path, "-o", path],
    ):
        said = oper(*command)
        assert said.status == 2
        assert said.errors.count("\n") == 1
        assert_plain(said)
    # As if tables of so few rows were huge.
    monkeypatch.setattr(table_discovery, "_REFUSED_ROWS", 10**4)
    columns = {name: np.full(300, 10**5 + n) for n, name in enumerate(NAMES)}
    pq.write_table(pa.table(columns), "sparse.parquet")
    assert_plain(oper("profile", "sparse.parquet", "--columns", "C*", "-o", "s"))


def test_rich(planned: Path) -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(Profile.load("p"))
    assert_plain(Said(0, out.getvalue(), ""))


def test_what_is_printable_stays() -> None:
    assert printable("µs, 日本, C\\x1b, a b") == "µs, 日本, C\\x1b, a b"
    assert printable("می\u200cخواهم, a\u3000b\xa0c") == "می\u200cخواهم, a\u3000b\xa0c"
    assert printable("a\nb\x85\udc80", kept="\n") == "a\nb\\x85\\udc80"


def assert_plain(said: Said) -> None:
    text = said.out + said.errors
    assert "\\x1b" in text or "\\u202e" in text
    assert not [c for c in text if not c.isprintable() and c != "\n"], text
