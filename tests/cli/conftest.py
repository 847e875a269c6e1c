"""A folder for commands to work in, and what may happen while they write."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oper.files import atomic_renames, storage
from tests.support.commands import Before, make_folder


@pytest.fixture(scope="module", autouse=True)
def _plans_need_not_be_the_best(small_programmes: None) -> None:
    """The subject is the output of commands."""


@pytest.fixture(scope="session")
def _folder_with_plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    make_folder(folder)
    return folder


@pytest.fixture
def here(_folder_with_plans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with what `tests.support.commands.make_folder` makes."""
    shutil.copytree(_folder_with_plans, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.fixture(params=["in one step", "in two steps"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With names exchanged in one step, and on a file system that cannot."""
    if request.param == "in two steps":
        monkeypatch.setattr(atomic_renames, "_renameat2", lambda *_: False)
    return request.param


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Iterator[Before]:
    """Has something happen before a function of `oper.files.storage` runs for the first time. A
    test in which the function never runs fails."""
    waiting = []

    def before_first(name: str, happens: Callable[[], object]) -> None:
        real = getattr(storage, name)
        waiting.append(name)

        def wrapper(*arguments: object, **options: object) -> object:
            if name in waiting:
                waiting.remove(name)
                happens()
            return real(*arguments, **options)

        monkeypatch.setattr(storage, name, wrapper)

    yield before_first
    assert not waiting, f"storage.{waiting[0]} never ran"
