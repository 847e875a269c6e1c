"""Replacing outputs: oper replaces only its own, if asked, and nothing that came meanwhile."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from oper.base.errors import OperError
from oper.files.overwrite_rules import FILE_MARK
from oper.files.storage import atomic_file
from oper.plan.plan import Plan
from oper.profiling.profile import Profile
from tests.cli.test_writes import FOLDER_WRITERS, WRITERS
from tests.support.commands import SYNTH, Before, fine, hidden, oper, refused, tree

PLAN = "plan p --topology cpu:2 -o"
MARKERS = ("plan.json", "profile.json")


# What may be replaced


@pytest.mark.parametrize("content", ["{}", "[1]", "no JSON", '{"schema": "mine"}'])
@pytest.mark.parametrize("name", FOLDER_WRITERS)
def test_a_foreign_project_is_kept(here: Path, name: str, content: str) -> None:
    Path("mine").mkdir()
    for marker in MARKERS:
        Path("mine", marker).write_text(content)
    Path("mine/thesis.txt").write_text("years of work")
    for more in ("", " --force"):
        refused(f"{WRITERS[name]} mine{more}", "mine", "was not written by oper", "another path")


@pytest.mark.parametrize("name", FOLDER_WRITERS)
def test_what_a_user_adds_to_our_folder_is_kept(here: Path, name: str) -> None:
    fine(*WRITERS[name].split(), "out")
    fine(*WRITERS[name].split(), "out", "--force")
    outside = Path("outside")
    outside.mkdir()
    adds: dict[str, Callable[[Path], object]] = {
        "notes.txt": lambda path: path.write_text("mine"),
        ".hidden": lambda path: path.write_text("mine"),
        "checkpoints/": lambda path: path.mkdir(),
        "link": lambda path: path.symlink_to(outside),
    }
    below = [p for p in Path("out").iterdir() if p.is_dir()]
    for folder in (Path("out"), *below):
        for added, add in adds.items():
            add(folder / added)
            shown = (folder / added).relative_to("out").as_posix() + "/" * added.endswith("/")
            refused(f"{WRITERS[name]} out --force", "out: holds files", shown)
            if added.endswith("/"):
                (folder / added).rmdir()
            else:
                (folder / added).unlink()
    fine(*WRITERS[name].split(), "out", "--force")


def test_many_foreign_files_are_counted(here: Path) -> None:
    for number in range(8):
        Path("q", f"note{number}").write_text("mine")
    refused(f"{PLAN} q --force", "note0, note1, note2, note3, note4 and 3 more")


@pytest.mark.parametrize("name", WRITERS)
def test_ours_is_replaced_only_when_asked(here: Path, name: str) -> None:
    place = "new.parquet" if name == "synth" else "new"
    fine(*WRITERS[name].split(), place)
    refused(f"{WRITERS[name]} {place}", f"{place}: exists", "--force")
    before = tree(here)
    fine(*WRITERS[name].split(), place, "--force")
    assert tree(here) == before  # the same bytes, and nothing beside them


def test_one_kind_does_not_replace_another(here: Path) -> None:
    refused(f"{PLAN} p --force", "p", "plan.json")
    refused(f"{WRITERS['profile']} q --force", "q", "profile.json")


def test_an_empty_folder_is_filled(here: Path) -> None:
    Path("empty").mkdir()
    fine(*PLAN.split(), "empty")
    Plan.load("empty")


FILE_WRITERS = (
    ("report q -o page.html", "page.html"),
    (f"{SYNTH} -o x.parquet", "x.parquet"),
    (f"{SYNTH} -o x.parquet", "x.tables.yaml"),
    ("topology measure --ranks 1 -o here.yaml", "here.yaml"),
)


@pytest.mark.parametrize("content", ["mine", "\0" * 5_000, "written by oper"])
@pytest.mark.parametrize(("command", "place"), FILE_WRITERS)
def test_a_file_of_the_users_is_kept(
    here: Path, command: str, place: str, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oper.measure.launch.measure_local", lambda *_, **__: pytest.fail("worked"))
    Path(place).write_text(content)
    for more in ("", " --force"):
        refused(f"{command}{more}", f"{place}: exists and was not written by oper", "another path")
    Path(place).rename("other")
    Path(place).symlink_to("other")  # whose target would be written
    refused(f"{command} --force", f"{place}: exists and was not written by oper")


@pytest.mark.parametrize(("command", "place"), FILE_WRITERS)
def test_a_file_of_ours_is_replaced_only_when_asked(here: Path, command: str, place: str) -> None:
    fine(*command.split())
    refused(command, "exists", "--force")
    before = Path(place).stat().st_ino
    fine(*command.split(), "--force")
    assert Path(place).stat().st_ino != before
    Path(place).write_text("")  # which nobody misses
    fine(*command.split(), "--force")
    assert Path(place).stat().st_size


def test_a_file_that_is_none_is_kept(here: Path) -> None:
    os.mkfifo("pipe.parquet")
    refused_here = oper(*SYNTH.split(), "-o", "pipe.parquet", "--force")
    assert refused_here.status == 2
    assert "not a regular file" in refused_here.errors


def test_a_file_that_appears_meanwhile_is_kept(here: Path) -> None:
    for before in ("", FILE_MARK):
        if before:
            Path("x").write_text(before)
        with pytest.raises(OperError, match=r"appeared while.*kept as x\.kept-1"):
            _written_beside_a_users_file()
        assert (Path("x").read_text(), Path("x.kept-1").read_text()) == ("mine", "new")
        Path("x.kept-1").unlink()


def _written_beside_a_users_file() -> None:
    with atomic_file("x", overwrite=True) as temporary:
        temporary.write_text("new")
        Path("x").unlink(missing_ok=True)
        Path("x").write_text("mine")


def test_from_python(here: Path) -> None:
    profile, plan = Profile.load("p"), Plan.load("q")
    for save in (profile.save, plan.save):
        save("out")
        with pytest.raises(OperError, match="overwrite=True"):
            save("out")
        save("out", overwrite=True)
        shutil.rmtree("out")


@pytest.mark.parametrize("more", ["", " --force"])
@pytest.mark.parametrize("name", FOLDER_WRITERS)
def test_the_current_folder_is_kept(
    here: Path, name: str, more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("empty/deep").mkdir(parents=True)
    Path("link").symlink_to("empty/deep")
    words = [str(here / w) if (here / w).exists() else w for w in WRITERS[name].split()]
    command = " ".join(words).replace("w@", f"{here}/w@")
    for inside, places in (
        (here / "empty/deep", (".", "..", "../deep", str(here / "link"), "/")),
        (here / "q", (".",)),
        (here / "p", (".",)),
    ):
        monkeypatch.chdir(inside)
        for place in places:
            refused(f"{command} {place}{more}", place, "current directory")


def test_a_link_is_followed(here: Path, steps: str) -> None:
    Path("elsewhere").mkdir()
    for name in ("link", "file.parquet"):
        Path(name).symlink_to(f"elsewhere/{name}")  # to nothing yet
    for more in ((), ("--force",)):
        fine(*PLAN.split(), "link", *more)
        fine(*SYNTH.split(), "-o", "file.parquet", *more)
        assert Path("link").is_symlink()
        assert Path("file.parquet").is_symlink()
        Plan.load("elsewhere/link")
        assert sorted(p.name for p in Path("elsewhere").iterdir()) == ["file.parquet", "link"]
    refused(f"{PLAN} link", "link: exists")


def test_markers_do_not_vouch_for_what_is_outside(here: Path) -> None:
    """A marker with names that lead out of its folder, or with none at all."""
    fine(*WRITERS["windows"].split(), "out")
    marker = Path("out/profile.json")
    content = json.loads(marker.read_text())
    for windows in ([{"name": ".."}], [{"name": "."}], [{"name": "a/b"}], [7], "x", {"a": 1}):
        marker.write_text(json.dumps(content | {"windows": windows, "files": ["notes"]}))
        refused(f"{WRITERS['windows']} out --force", "window-000/")


# What comes while a command works


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("name", FOLDER_WRITERS)
def test_a_folder_that_comes_meanwhile(
    here: Path, name: str, there: bool, steps: str, before: Before
) -> None:
    command = f"{WRITERS[name]} new --force"
    if there:
        fine(*command.split())
    expected = tree(here) | {"new": None, "new/theirs.txt": b"theirs"}

    def come() -> None:
        Path("new").mkdir(exist_ok=True)
        Path("new/theirs.txt").write_text("theirs")

    before("_sync_tree", come)
    said = oper(*command.split())
    assert said.status == 2, said
    assert "appeared while this command worked" in said.errors
    left = tree(here)
    assert {name: left[name] for name in left if not name.startswith("new.kept-1")} == expected
    # Hours of work are not thrown away: it is as good as where it was to be.
    assert "new.kept-1" in said.errors
    shutil.rmtree("new")
    Path("new.kept-1").rename("new")
    whole = tree(Path("new"))
    shutil.rmtree("new")
    fine(*command.split())
    assert sorted(whole) == sorted(tree(Path("new")))


def test_what_was_made_is_kept_beside_what_was_kept_before(
    here: Path, steps: str, before: Before
) -> None:
    Path("new.kept-1").mkdir()
    Path("new.kept-1/older").write_text("older")
    before("_sync_tree", lambda: Path("new").write_text("theirs"))
    said = oper(*PLAN.split(), "new")
    assert said.status == 2, said
    assert "new.kept-2" in said.errors
    Plan.load("new.kept-2")
    assert tree(Path("new.kept-1")) == {"older": b"older"}
    assert not hidden(here)


def test_a_folder_that_comes_at_the_last_moment(here: Path, steps: str, before: Before) -> None:
    """Between the last look at the place and the exchange of the names."""
    fine(*PLAN.split(), "new")
    expected = tree(here) | {"new/theirs.txt": b"theirs"}
    before("_exchange", lambda: Path("new/theirs.txt").write_text("theirs"))
    said = oper(*PLAN.split(), "new", "--force")
    assert said.status == 2, said
    assert "theirs.txt" in said.errors
    Plan.load("new.kept-1")
    shutil.rmtree("new.kept-1")
    assert tree(here) == expected


def test_a_folder_that_goes_meanwhile(here: Path, steps: str, before: Before) -> None:
    fine(*PLAN.split(), "new")
    before("_exchange", lambda: shutil.rmtree("new"))
    fine(*PLAN.split(), "new", "--force")
    Plan.load("new")
    assert not hidden(here)


def test_an_empty_folder_that_comes_meanwhile_is_filled(here: Path, before: Before) -> None:
    before("_sync_tree", lambda: Path("new").mkdir())
    fine(*PLAN.split(), "new")
    Plan.load("new")


def test_a_file_that_comes_meanwhile(here: Path, steps: str, before: Before) -> None:
    before("_sync_file", lambda: Path("new.parquet").write_text("theirs"))
    said = oper(*SYNTH.split(), "-o", "new.parquet")
    assert said.status == 2, said
    assert "appeared while this command worked" in said.errors
    assert Path("new.parquet").read_text() == "theirs"
    assert Path("new.parquet.kept-1").read_bytes().startswith(b"PAR1")
    assert not hidden(here)
