"""Changes of a folder since it was written are found, whatever reads it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from oper.base.errors import OperError
from oper.files.json_file import read_json
from oper.files.manifest import open_folder, write_manifest
from oper.profiling.profile import FORMAT, MARKER, Profile, write_windows
from oper.tables.table import Table
from tests.support.examples import examples


def a_profile(seed: int = 0) -> Profile:
    accesses = np.random.default_rng(seed).integers(0, 9, 70).astype(np.uint32)
    tables = (Table("a", 40), Table("b", 30))
    return Profile(tables, 50, accesses, accesses[:40], (True, False), source={"files": ["x"]})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest") / "p"
    a_profile().save(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "p"))


@examples(200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_flipped_bit_is_found(saved: Path, tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "p"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    name = data.draw(st.sampled_from([MARKER, "accesses.npy", "samples_with_row.npy"]))
    content = bytearray((folder / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    (folder / name).write_bytes(content)
    try:
        opened = Profile.load(folder)
    except OperError:
        return
    # White space in the marker, which means nothing, may change.
    assert name == MARKER
    assert read_json(folder / MARKER) == read_json(saved / MARKER)
    assert opened.digest == a_profile().digest


@pytest.mark.parametrize("figure", ["samples", "digest", "source", "rows"])
def test_an_edited_figure_is_found(copied: Path, figure: str) -> None:
    content = json.loads((copied / MARKER).read_text())
    content[figure] = {"samples": 51, "rows": 71}.get(figure, "other")
    (copied / MARKER).write_text(json.dumps(content))
    with pytest.raises(OperError, match=r"profile\.json: its SHA-256 is not the one"):
        Profile.load(copied)


def test_a_key_given_twice_is_found(copied: Path) -> None:
    text = (copied / MARKER).read_text()
    (copied / MARKER).write_text(text.replace('"samples": 50', '"samples": 50, "samples": 50'))
    with pytest.raises(OperError, match=r"profile\.json: has the key 'samples' twice"):
        Profile.load(copied)


@pytest.mark.parametrize(
    ("version", "got"),
    [
        (3, "3, written by an older oper; profile the log again with this oper"),
        (5, "5, written by a newer oper; install that oper, or profile the log again"),
        ("4", "'4'; profile the log again"),
        (True, "True; profile the log again"),
        (None, "None; profile the log again"),
    ],
)
def test_a_folder_of_another_version_is_refused(copied: Path, version: object, got: str) -> None:
    content = open_folder(copied, FORMAT)
    write_manifest(copied, FORMAT, content | {"version": version})
    with pytest.raises(OperError, match=f"profile.json: expected version 4, got {got}"):
        Profile.load(copied)


def test_windows_that_were_exchanged_are_found(tmp_path: Path) -> None:
    windows = [a_profile(0), a_profile(1)]
    for number, window in enumerate(windows):
        window.save(tmp_path / "w" / f"window-{number:03d}")
    write_windows(tmp_path / "w", windows)
    assert len(Profile.load_windows(tmp_path / "w")) == 2
    (tmp_path / "w" / "window-000").rename(tmp_path / "w" / "first")
    (tmp_path / "w" / "window-001").rename(tmp_path / "w" / "window-000")
    (tmp_path / "w" / "first").rename(tmp_path / "w" / "window-001")
    with pytest.raises(OperError, match="window-000: is not the window that"):
        Profile.load(tmp_path / "w")


@pytest.mark.parametrize("name", ["../p/accesses.npy", "/dev/null", "a/../../b", ""])
def test_files_outside_the_folder_are_refused(copied: Path, name: str) -> None:
    content = open_folder(copied, FORMAT)
    content["files"][name] = content["files"]["accesses.npy"]
    write_manifest(copied, FORMAT, content)
    with pytest.raises(OperError, match=r"is no file of the folder|is missing"):
        Profile.load(copied)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "nested"),
        ('{"a":' * 100_000, "nested"),
        ("9" * 5_000, "5,000 digits"),
        ('{"a": 1, "a": 2}', "'a' twice"),
        ("[1,", "line 1, column 4"),
    ],
)
def test_json_that_no_oper_wrote(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(OperError, match=message) as raised:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(raised.value)
