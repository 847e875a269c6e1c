"""Names for the contents of a path, and errors for folders of other kinds."""

import os
from pathlib import Path

import pytest

import oper
from oper.base.errors import OperError
from oper.files.storage import check_output
from oper.files.what_is import what_is, written_kind
from tests.support.commands import make_folder, refused


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("kinds")
    make_folder(place)
    (place / "empty").mkdir()
    (place / "other").mkdir()
    for name in "abcdefg":
        (place / "other" / name).touch()
    (place / "gone").symlink_to("nowhere")
    return place


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("p", "a profile's folder"),
        ("w", "a profile's folder"),
        ("q", "a plan's folder"),
        ("log.parquet", "a file"),
        ("empty", "an empty folder"),
        ("other", "a folder with a, b, c, d, e and 2 more"),
        ("absent", "nothing"),
        ("gone", "a link to something that is not there"),
    ],
)
def test_what_is_at_a_path(folder: Path, name: str, found: str) -> None:
    assert what_is(folder / name) == found


def test_json_of_others_is_no_marker(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema": "other.plan"}')
    (tmp_path / "notes.json").write_text('{"schema": "oper.plan"}')
    (tmp_path / "pipe.json").mkdir()
    os.mkfifo(tmp_path / "profile.json")
    assert written_kind(tmp_path) is None


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan log.parquet --topology cpu:2 -o new", ["oper profile log.parquet -o PROFILE"]),
        ("compare log.parquet --topology cpu:2", ["oper profile log.parquet -o PROFILE"]),
        ("drift q log.parquet", ["expected a profile", "got a file", "oper profile log.parquet"]),
        ("plan q --topology cpu:2 -o new", ["expected a profile", "got a plan's folder"]),
        ("plan show p", ["expected a plan", "oper plan p --topology NAME -o PLAN"]),
        ("plan show empty", ["expected a plan", "got an empty folder", "oper plan PROFILE"]),
        ("report p -o r.html", ["expected a plan", "oper plan p --topology NAME -o PLAN"]),
        ("report q --profile log.parquet -o r.html", ["oper profile log.parquet -o PROFILE"]),
        ("profile p -o new", ["p: expected a log, got a profile's folder"]),
        ("simulate q", ["q: expected a log, got a plan's folder"]),
        ("plan p --topology q -o new", ["got 'q' (a plan's folder)"]),
        ("checkpoint inspect q", ["expected a checkpoint, got a plan's folder", "oper.save"]),
        ("checkpoint verify log.parquet", ["is a file; expected a checkpoint"]),
        ("top q", ["expected a file of a monitor's JSON lines, got a folder"]),
        ("plan p --config q --topology cpu:2 -o new", ["expected a YAML file, got a folder"]),
        ("profile log.parquet --tables empty -o new", ["empty", "a YAML file of tables"]),
    ],
)
def test_a_file_of_another_kind_is_refused_with_the_remedy(
    folder: Path, command: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    refused(command, *words)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan log.parquet", ["log.parquet: expected a profile", "oper profile log.parquet"]),
        ("plan log.parquet --topology nosuch", ["log.parquet: expected a profile"]),
        ("plan q --topology cpu:2", ["expected a profile", "got a plan's folder"]),
        ("plan absent@3", ["absent: no such folder; expected a profile"]),
        ("plan explain p", ["p: expected a plan"]),
        ("compare log.parquet", ["oper profile log.parquet -o PROFILE"]),
        ("replan q log.parquet", ["oper profile log.parquet -o PROFILE"]),
        ("drift log.parquet", ["log.parquet: expected a plan"]),
        ("report p", ["p: expected a plan", "got a profile's folder"]),
        ("profile absent", ["absent: no such file"]),
        ("profile q", ["q: expected a log, got a plan's folder"]),
        ("synth nothing", ["workload 'nothing'"]),
        ("checkpoint reshard q", ["expected a checkpoint, got a plan's folder"]),
        ("plan p", ["--topology NAME|FILE is missing"]),
    ],
)
def test_a_wrong_input_is_told_before_a_missing_option(
    folder: Path, command: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    refused(command, *words)


@pytest.mark.parametrize("command", ["plan p --topology cpu:2 -o", "profile log.parquet -o",
                                     "replan q p -o", "report q -o"])  # fmt: skip
def test_where_no_file_can_be_made_nothing_is_begun(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    refused(f"{command} /proc/x", "/proc/x: no file can be made in /proc", "choose a path")


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root can")
def test_a_folder_without_permission_is_an_error_that_says_so(tmp_path: Path) -> None:
    shut = tmp_path / "shut"
    shut.mkdir(mode=0o700)
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o055)
    os.seteuid(65534)
    try:
        with pytest.raises(OperError, match=r"cannot be read \(Permission denied\)"):
            oper.Plan.load(shut)
        with pytest.raises(OperError, match=r"no file can be made in .*Permission denied"):
            check_output(shut / "new")
    finally:
        os.seteuid(0)
