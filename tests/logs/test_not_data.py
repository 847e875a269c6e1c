"""Files in a folder that are not part of its log are named, and samples are never counted twice."""

import gzip
import os
import warnings
from pathlib import Path

import pytest

from oper.base.errors import OperError, OperNotice, OperWarning
from oper.logs import open_log
from tests.logs.test_log_folder import read_all, refused, write
from tests.support.commands import oper

ROWS = "a,b\n7,7\n"


def noticed(log: Path | list[Path], *words: str) -> list[int]:
    """Read a log, whose only notice has these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read_all(log)
    assert [w.category for w in caught] == [OperNotice]
    text = str(caught[0].message)
    assert all(word in text for word in words), text
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.csv~", "a backup"),
        ("a.csv.~1~", "a backup"),
        ("a.csv.bak", "a backup"),
        ("a.csv.BAK", "a backup"),
        ("a.csv.bak.gz", "a backup"),
        ("a.csv.old", "a backup"),
        ("a.csv.orig", "a backup"),
        ("a.csv.swp", "a backup"),
        ("#a.csv#", "a backup"),
        ("a.tmp", "an unfinished"),
        ("a.csv.crdownload", "an unfinished"),
        ("a.csv.part", "an unfinished"),
        ("a.csv._COPYING_", "an unfinished"),
        ("a.parquet.inprogress", "an unfinished"),
        ("part-0-0.inprogress.1f3a", "an unfinished"),
        ("a.csv.lock", "an unfinished"),
        ("~$a.csv", "an unfinished"),
        ("a.csv.sha256", "a checksum"),
        ("MD5SUMS", "a checksum"),
        ("README", "a description"),
        ("readme.txt", "a description"),
        ("README.first.txt", "a description"),
        ("LICENSE", "a description"),
        ("LICENSE-data.txt", "a description"),
        ("notes.txt", "a description"),
        ("schema.yml", "a description"),
        ("desktop.ini", "a description"),
    ],
)
def test_names_that_are_not_data(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / name).write_text(ROWS)
    refused(tmp_path, str(tmp_path), name, kind)
    write(tmp_path / "a.csv", [1], b=[2])
    assert noticed(tmp_path, f"{name} ({kind}") == [1]
    assert read_all(tmp_path / name) == [7]  # The user names it.


@pytest.mark.parametrize("name", ["old.csv", "notes.csv", "readme.csv", "part.csv", "a.log", "tmp"])
def test_names_that_may_be_data(tmp_path: Path, name: str) -> None:
    write(tmp_path / "c.csv", [1], b=[2])
    (tmp_path / name).write_text(ROWS)
    assert sorted(read_all(tmp_path)) == [1, 7]


def test_all_skipped_files_are_one_line(tmp_path: Path) -> None:
    write(tmp_path / "log" / "a.csv", [1])
    for number in range(7):
        (tmp_path / "log" / f"{number}.csv").touch()
    said = oper("profile", tmp_path / "log", "-o", tmp_path / "p")
    assert said.status == 0, said
    (line,) = (line for line in said.errors.splitlines() if "skipped" in line)
    assert "4.csv (empty) and 2 more" in line


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.csv", "a.csv.gz"),
        ("a", "a.gz"),
        ("a.csv", "a.tsv"),
        ("a.csv", "a (1).csv"),
        ("a.csv", "a - Copy.csv"),
        ("a.csv", "a copy.csv"),
        ("a.csv", "Copy of a.csv"),
        ("a.csv", "a.old.csv"),
        ("a.csv", "a_backup.csv"),
        ("a.csv", "a.csv.zst"),
        ("k=1/a.csv", "k=1/a.csv.gz"),
    ],
)
def test_the_same_samples_twice_are_refused(tmp_path: Path, one: str, other: str) -> None:
    for name in (one, other):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        packed = name.endswith(".gz")
        (tmp_path / name).write_bytes(gzip.compress(ROWS.encode()) if packed else ROWS.encode())
    refused(tmp_path, Path(one).name, Path(other).name, "twice", "one by one")
    (tmp_path / one).unlink()
    if not other.endswith(".zst"):
        assert read_all(tmp_path) == [7]


def test_numbered_names_are_parts_of_a_log(tmp_path: Path) -> None:
    for number in range(1, 4):
        write(tmp_path / f"a ({number}).csv", [number])
    assert read_all(tmp_path) == [1, 2, 3]


def test_a_file_with_two_names(tmp_path: Path) -> None:
    one = write(tmp_path / "log" / "b.csv", [1])
    (tmp_path / "log" / "a.csv").symlink_to("b.csv")
    assert noticed(tmp_path / "log", "a.csv (a link to b.csv)") == [1]
    (tmp_path / "log" / "a.csv").unlink()
    os.link(one, tmp_path / "log" / "c.csv")
    refused(tmp_path / "log", "b.csv", "c.csv", "two names of one file", "remove one")
    (tmp_path / "log" / "c.csv").unlink()
    write(tmp_path / "other" / "d.csv", [2])
    for name in ("x.csv", "y.csv"):
        (tmp_path / "log" / name).symlink_to(tmp_path / "other" / "d.csv")
    assert noticed(tmp_path / "log", "y.csv (a link to x.csv)") == [1, 2]


def test_a_partition_with_two_names(tmp_path: Path) -> None:
    write(tmp_path / "dt=9" / "f.csv", [1])
    (tmp_path / "dt=10").symlink_to(tmp_path / "dt=9")
    refused(tmp_path, "dt=9/f.csv", "dt=10/f.csv", "two names of one file")
    (tmp_path / "dt=10").unlink()
    write(tmp_path / "dt=9.bak" / "f.csv", [1])
    refused(tmp_path, "dt=9.bak", "a backup of", "counted twice")
    (tmp_path / "dt=9.bak").rename(tmp_path / "dt=7.bak")
    assert read_all(tmp_path) == [1, 1]


def test_a_folder_linked_into_itself(tmp_path: Path) -> None:
    write(tmp_path / "log" / "f.csv", [1])
    (tmp_path / "log" / "again").symlink_to(tmp_path / "log")
    refused(tmp_path / "log", "again", "a link to a folder above it", "remove the link")


def test_a_file_that_is_given_twice_is_warned_of(tmp_path: Path) -> None:
    one = write(tmp_path / "a.csv", [1])
    for given in ([one, one], [tmp_path, one]):
        with pytest.warns(OperWarning, match=r"a\.csv: is one file, .*more than once"):
            assert len(open_log(given).names) == 2


@pytest.mark.parametrize("empty", [b"", gzip.compress(b"", mtime=0)])
def test_files_without_a_byte(tmp_path: Path, empty: bytes) -> None:
    (tmp_path / "part-0.csv").write_bytes(empty)
    (tmp_path / "part-1.csv").write_bytes(empty)
    refused(tmp_path, "without files of a log", "part-0.csv (empty)", "part-1.csv (empty)")
    with pytest.raises(OperError):
        open_log(tmp_path / "part-0.csv")
    write(tmp_path / "part-2.csv", [1])
    assert noticed(tmp_path, "part-0.csv (empty)") == [1]


def test_a_foreign_file_in_a_folder_is_to_be_moved_away(tmp_path: Path) -> None:
    write(tmp_path / "b.csv", [1])
    (tmp_path / "plot.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    refused(tmp_path, "plot.png", "image", f"move the file out of {tmp_path}")
    (tmp_path / "plot.png").unlink()
    (tmp_path / "words.txt").write_text("These are the clicks of one day.\nAsk Ann.\n")
    refused(tmp_path, "words.txt", "b.csv", "not part of the log")


def test_json_next_to_json_lines_is_data(tmp_path: Path) -> None:
    write(tmp_path / "c.csv", [3])
    (tmp_path / "meta.json").write_text("{}")
    assert noticed(tmp_path, "meta.json (a description)") == [3]
    (tmp_path / "c.csv").unlink()
    (tmp_path / "meta.json").unlink()
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "b.json").write_text('{"a": 2}\n')
    assert read_all(tmp_path) == [1, 2]


def test_folders_without_data_are_named(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [1])
    (tmp_path / "about").mkdir()
    (tmp_path / "about" / "README.md").write_text("words")
    assert noticed(tmp_path, "README.md (a description)") == [1]
    (tmp_path / "about" / "b.json").write_text("{}")
    refused(tmp_path, "about", "b.json", "KEY=VALUE")
